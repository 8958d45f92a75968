"""LLM kernels in cuTile Python: one source for NVIDIA GPUs from Hopper to Blackwell and, interpreted, for a machine without a GPU."""

from typing import TYPE_CHECKING, Any

from .ops.attention import attention
from .ops.attention_decode import attention_decode
from .ops.matmul import matmul
from .ops.rms_norm import rms_norm
from .ops.rope import rope
from .ops.silu_mul import silu_mul
from .ops.softmax import softmax

if TYPE_CHECKING:
    from .models.patch import patch

__version__ = "0.1.0"
__all__ = ["__version__", "attention", "attention_decode", "matmul", "patch", "rms_norm", "rope", "silu_mul", "softmax"]


def __getattr__(name: str) -> Any:
    if name == "patch":  # only this name needs transformers
        from .models.patch import patch

        return patch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
