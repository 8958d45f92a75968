"""Puts our kernels into transformers models, and loads models."""

from .configs import CONFIGS
from .files import ModelFileError
from .generate import Comparison, Draw, Generation, compare, encode, generate
from .load import DTYPES, Loaded, demo_gguf, load, outline_of, random_model
from .patch import Kept, Replaced, Report, patch
from .shard import Shard, cut, shard_of

__all__ = [
    "CONFIGS",
    "DTYPES",
    "Comparison",
    "Draw",
    "Generation",
    "Kept",
    "Loaded",
    "ModelFileError",
    "Replaced",
    "Report",
    "Shard",
    "compare",
    "cut",
    "demo_gguf",
    "encode",
    "generate",
    "load",
    "outline_of",
    "patch",
    "random_model",
    "shard_of",
]
