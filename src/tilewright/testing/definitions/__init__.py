"""What each op means, written from its formula once more, for the fuzz.

`DEFINITIONS[op](**inputs)` returns the op's results. Called with float64 tensors it is the truth;
in the op's own dtype, with the roundings that PyTorch has, it is what the accuracy rule allows.
Nothing here calls an op's `reference`, so an error in both of them shows.
"""

from . import attention as attention, linear as linear
from .products import mx_values as mx_values
from .rows import DEFINITIONS as DEFINITIONS, FP8 as FP8, Results as Results, normed as normed, scores_of as scores_of, wide as wide
