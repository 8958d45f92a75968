"""LLM kernels in cuTile Python: one source, compiled for NVIDIA GPUs or interpreted on a CPU."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("cuda") is None or find_spec("cuda.tile") is None:
    raise ImportError("tilewright's kernels are written in cuda-tile, with or without a GPU: pip install 'cuda-tile==1.7.*'")

from .ops.argmax import argmax
from .ops.attention import attention
from .ops.attention_decode import attention_decode
from .ops.bmm import bmm
from .ops.dropout import dropout
from .ops.embedding import embedding
from .ops.grouped_gemm import grouped_gemm, grouped_gemm_list
from .ops.kv_append import kv_append
from .ops.layer_norm import layer_norm
from .ops.matmul import matmul
from .ops.merge_states import merge_states
from .ops.mla import mla
from .ops.mla_decode import mla_decode
from .ops.moe import moe
from .ops.moe_route import moe_route
from .ops.quantize_fp8 import quantize_fp8
from .ops.rms_norm import rms_norm
from .ops.rms_norm_matmul import rms_norm_matmul
from .ops.rms_norm_quant import rms_norm_quant
from .ops.rms_norm_route import rms_norm_route
from .ops.rope import rope
from .ops.sample import sample
from .ops.silu_mul import silu_mul
from .ops.silu_mul_quant import silu_mul_quant
from .ops.softmax import softmax
from .ops.sparse_decode import pack_kv, sparse_decode, unpack_kv

if TYPE_CHECKING:
    from .models.patch import patch

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "argmax",
    "attention",
    "attention_decode",
    "bmm",
    "dropout",
    "embedding",
    "grouped_gemm",
    "grouped_gemm_list",
    "kv_append",
    "layer_norm",
    "matmul",
    "merge_states",
    "mla",
    "mla_decode",
    "moe",
    "moe_route",
    "pack_kv",
    "patch",
    "quantize_fp8",
    "rms_norm",
    "rms_norm_matmul",
    "rms_norm_quant",
    "rms_norm_route",
    "rope",
    "sample",
    "silu_mul",
    "silu_mul_quant",
    "softmax",
    "sparse_decode",
    "unpack_kv",
]


def __getattr__(name: str) -> Any:
    if name == "patch":  # only this name needs transformers
        from .models.patch import patch

        return patch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
