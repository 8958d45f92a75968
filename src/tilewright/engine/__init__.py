"""Fast decoding: a model's step as a list of calls on fixed buffers, or as one CUDA graph."""

from .engine import Engine as Engine, Generated as Generated
from .parallel import Group as Group
from .program import Call as Call
from .read import MODEL_TYPES as MODEL_TYPES
from .sampling import Sampling as Sampling
