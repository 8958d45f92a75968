"""Fast decoding: a model's step as a list of calls on fixed buffers, or as one CUDA graph."""

from .engine import Engine, Generated
from .parallel import Group
from .program import Call, StepBuffers
from .read import MODEL_TYPES
from .sampling import Sampling

__all__ = ["MODEL_TYPES", "Call", "Engine", "Generated", "Group", "Sampling", "StepBuffers"]
