"""Kernels for language models in cuTile Python: compiled for NVIDIA GPUs, or interpreted on a CPU.

Matrix products   matmul, bmm, grouped_gemm, grouped_gemm_list, moe, rms_norm_matmul
Small weights     quantized_matmul, quantized_moe, QuantizedWeight, QuantizedExperts
Block scales      mx_matmul, quantize_mx
Attention         attention, attention_decode, cascade_decode, mla, mla_decode, sparse_decode,
                  sparse_index, merge_states, kv_append, pack_kv, unpack_kv
Norms and rows    rms_norm, layer_norm, rope, silu_mul, softmax, dropout, embedding
Linear attention  gated_delta_rule, ssd, causal_conv1d, rms_norm_gated
8-bit floats      quantize_fp8, rms_norm_quant, silu_mul_quant
Choosing          argmax, sample, adjust_logits, moe_route, rms_norm_route

Models            patch: our kernels in a transformers model; load: a model from a folder or file;
                  Engine: fast decoding
Your own kernels  interpret: run one without a GPU, with race checks; compile_report: its registers
                  on any GPU; testing: the accuracy rule

Ops take tensors on a GPU or on the CPU. They return new tensors unless `out=` is given.
`python -m tilewright -h` lists the commands.
"""

from . import _starting  # first: Ctrl-C may come while the others are imported

# isort: split
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _find_spec("cuda") is None or _find_spec("cuda.tile") is None:
    _starting.refuse("tilewright's kernels are written in cuda-tile, with or without a GPU: pip install 'cuda-tile==1.7.*'")
if __doc__ is None:
    _starting.refuse("Python must keep docstrings, which cuda-tile adds to: take -O or PYTHONOPTIMIZE=1, got -OO or PYTHONOPTIMIZE=2")

from .ops.adjust_logits import adjust_logits
from .ops.argmax import argmax
from .ops.attention import attention
from .ops.attention_decode import attention_decode
from .ops.attention_decode.cascade import cascade_decode
from .ops.bmm import bmm
from .ops.causal_conv1d import causal_conv1d
from .ops.common.expert_weights import QuantizedExperts
from .ops.common.weight_formats import QuantizedWeight
from .ops.dropout import dropout
from .ops.embedding import embedding
from .ops.gated_delta_rule import gated_delta_rule
from .ops.grouped_gemm import grouped_gemm, grouped_gemm_list
from .ops.kv_append import kv_append
from .ops.layer_norm import layer_norm
from .ops.matmul import matmul
from .ops.merge_states import merge_states
from .ops.mla import mla
from .ops.mla_decode import mla_decode
from .ops.moe import moe
from .ops.moe_route import moe_route
from .ops.mx_matmul import mx_matmul
from .ops.quantize_fp8 import quantize_fp8
from .ops.quantize_mx import quantize_mx
from .ops.quantized_matmul import quantized_matmul
from .ops.quantized_moe import quantized_moe
from .ops.rms_norm import rms_norm
from .ops.rms_norm_gated import rms_norm_gated
from .ops.rms_norm_matmul import rms_norm_matmul
from .ops.rms_norm_quant import rms_norm_quant
from .ops.rms_norm_route import rms_norm_route
from .ops.rope import rope
from .ops.sample import sample
from .ops.silu_mul import silu_mul
from .ops.silu_mul_quant import silu_mul_quant
from .ops.softmax import softmax
from .ops.sparse_decode import pack_kv, sparse_decode, unpack_kv
from .ops.sparse_index import sparse_index
from .ops.ssd import ssd

if _TYPE_CHECKING:
    from . import testing
    from .compile import compile_report
    from .engine import Engine
    from .interpret import interpret
    from .models import load, patch

__version__ = "0.1.0"
_LATER = {  # imported when they are asked for: most programs need none of them
    "Engine": "tilewright.engine",
    "compile_report": "tilewright.compile",
    "interpret": "tilewright",  # the package itself, which can be called
    "load": "tilewright.models",
    "patch": "tilewright.models",
    "testing": "tilewright",
}
__all__ = [
    "Engine",
    "QuantizedExperts",
    "QuantizedWeight",
    "__version__",
    "adjust_logits",
    "argmax",
    "attention",
    "attention_decode",
    "bmm",
    "cascade_decode",
    "causal_conv1d",
    "compile_report",
    "dropout",
    "embedding",
    "gated_delta_rule",
    "grouped_gemm",
    "grouped_gemm_list",
    "interpret",
    "kv_append",
    "layer_norm",
    "load",
    "matmul",
    "merge_states",
    "mla",
    "mla_decode",
    "moe",
    "moe_route",
    "mx_matmul",
    "pack_kv",
    "patch",
    "quantize_fp8",
    "quantize_mx",
    "quantized_matmul",
    "quantized_moe",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_matmul",
    "rms_norm_quant",
    "rms_norm_route",
    "rope",
    "sample",
    "silu_mul",
    "silu_mul_quant",
    "softmax",
    "sparse_decode",
    "sparse_index",
    "ssd",
    "testing",
    "unpack_kv",
]


def __getattr__(name: str) -> object:
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f"tilewright.{name}") if home == "tilewright" else getattr(_import_module(home), name)


def __dir__() -> list[str]:
    return __all__
