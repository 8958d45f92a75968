"""Decode fast: a model's step as a list of calls on fixed buffers, run one by one or as one CUDA graph."""

from .engine import Engine, Generated
from .parallel import Group
from .program import Call, Frame
from .read import MODEL_TYPES
from .state import Sampling

__all__ = ["MODEL_TYPES", "Call", "Engine", "Frame", "Generated", "Group", "Sampling"]
