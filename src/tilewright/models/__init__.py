"""Where in a model: our kernels inside transformers models, and the ways to load one."""

from .configs import CONFIGS
from .generate import Comparison, Generation, compare, encode, generate
from .load import DTYPES, Loaded, demo_gguf, load, random_model
from .patch import Kept, Replaced, Report, patch

__all__ = [
    "CONFIGS",
    "DTYPES",
    "Comparison",
    "Generation",
    "Kept",
    "Loaded",
    "Replaced",
    "Report",
    "compare",
    "demo_gguf",
    "encode",
    "generate",
    "load",
    "patch",
    "random_model",
]
