"""Other kernel libraries as peers, where they are installed: same dtype, same mathematics, nothing copied or converted inside the time.

They are imported when a benchmark first asks for an op's peers. One whose call fails, or whose result is not ours, is named in the row, untimed.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .peers import Inputs, Peer

STRAY = 0.05  # distance of two results, RMS over RMS, from which they are not the same computation; fp8 products differ by 0.01
LIBRARIES = {
    "tilegym": "tilegym",
    "liger": "liger_kernel",
    "flashinfer": "flashinfer",
    "quack": "quack",
    "deepgemm": "deep_gemm",
}


def library_peers(op: str, inputs: Inputs) -> list[Peer]:
    """Peers of installed libraries that compute this op for these inputs."""
    return [Peer(name, call) for (name, of), (call, applies) in _CALLS.items() if of == op and _module(name) and applies(inputs)]


@cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(LIBRARIES[name])
    except (ImportError, OSError):  # not installed, or built for another CUDA
        return None


def backend_of(name: str) -> str:
    """Library, version and, where one has several, backend of a peer."""
    if name in LIBRARIES:
        distributions = packages_distributions().get(LIBRARIES[name], ())
        found = next((f"{d} {version(d)}" for d in distributions), name)
        return f"{found} (cutile)" if name == "tilegym" else found
    torch_ = f"torch {torch.__version__}"
    if name == "torch.compile":
        try:
            return f"{torch_}, triton {version('triton')}"
        except PackageNotFoundError:
            return torch_
    if name == "cudnn":
        return f"cuDNN {torch.backends.cudnn.version()} through {torch_}"
    return {"cublas": "cuBLAS of ", "sdpa": "FlashAttention of "}.get(name, "") + torch_


def strays(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    """In what the two results differ so much that they are not the same computation; "" if they are."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine.shape != other.shape:
            return f"computes something else: shape {tuple(other.shape)}, ours {tuple(mine.shape)}"
        if mine.dtype != other.dtype:
            return f"computes something else: {other.dtype}, ours {mine.dtype}"
        mine, other = mine.float(), other.float()
        apart = ((mine - other).square().mean().sqrt() / mine.square().mean().sqrt()).item()
        if not apart < STRAY:
            return f"computes something else: {apart:.2g} away from ours"
    return ""


# ------------------------------------------------------------------------------------------------ calls, by library and op
def _has(*none: str, **equal: Any) -> Callable[[Inputs], bool]:
    """Whether every option of `none` is left out or off, and the others have these values."""

    def applies(inputs: Inputs) -> bool:
        return not any(inputs.get(name) is not None and inputs.get(name) is not False for name in none) and all(
            inputs.get(name) == value for name, value in equal.items()
        )

    return applies


def _both(*conditions: Callable[[Inputs], bool]) -> Callable[[Inputs], bool]:
    return lambda inputs: all(condition(inputs) for condition in conditions)


def _half(name: str) -> Callable[[Inputs], bool]:
    """Whether an input has 16 bits: for fp32 libraries take TF32 where we don't."""
    return lambda inputs: isinstance(inputs[name], Tensor) and inputs[name].dtype.itemsize == 2


def _ops(name: str, part: str = "") -> Any:
    return importlib.import_module(LIBRARIES[name] + part)


def _plain_norm(inputs: Inputs) -> bool:
    return inputs.get("residual") is None and not inputs.get("weight_offset") and not inputs.get("round_before_weight")


def _tilegym_rms_norm(x, weight, eps, **unused):
    return _ops("tilegym", ".ops").rms_norm(x, (x.shape[-1],), weight, eps)


def _tilegym_matmul(a, b, *, trans_a=False, trans_b=False, **unused):
    return _ops("tilegym", ".ops").matmul(a, b, trans_a=trans_a, trans_b=trans_b, static_persistent=True)


def _tilegym_bmm(a, b, *, trans_a=False, trans_b=False, **unused):
    return _ops("tilegym", ".ops").bmm(a, b, transpose_a=trans_a, transpose_b=trans_b)


def _tilegym_attention(q, k, v, *, causal=True, scale=None, **unused):
    return _ops("tilegym", ".ops").fmha(q, k, v, scaling=scale or q.shape[-1] ** -0.5, is_causal=causal)


def _tilegym_decode(q, k, v, kv_len=None, *, scale=None, **unused):
    return _ops("tilegym", ".ops").fmha_decode(q, k, v, sm_scale=scale or q.shape[-1] ** -0.5)


def _tilegym_silu_mul(gate, **unused):
    return _ops("tilegym", ".ops").silu_and_mul(gate)


def _liger_rms_norm(x, weight, eps, *, weight_offset=0.0, round_before_weight=False, residual=None):
    function = _ops("liger", ".ops.rms_norm").LigerRMSNormFunction
    return function.apply(x, weight, eps, weight_offset, "llama" if round_before_weight else "gemma", False)


def _flashinfer_attention(q, k, v, *, causal=True, scale=None, **unused):
    out = _ops("flashinfer").single_prefill_with_kv_cache(q[0].transpose(0, 1), k[0], v[0], causal=causal, kv_layout="HND", sm_scale=scale)
    return out.transpose(0, 1)[None]


def _flashinfer_decode(q, k, v, kv_len=None, *, scale=None, **unused):
    return _ops("flashinfer").single_decode_with_kv_cache(q[0, :, 0], k[0], v[0], kv_layout="HND", sm_scale=scale)[None, :, None]


@lru_cache(maxsize=128)
def _tma_scales(scale: Tensor) -> Tensor:
    """Scales of the left operand in the layout that DeepGEMM takes, made once and outside the time."""
    return _ops("deepgemm").get_mn_major_tma_aligned_tensor(scale)


def _deepgemm_matmul(a, b, *, scale_a, scale_b, **unused):
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    _ops("deepgemm").fp8_gemm_nt((a, _tma_scales(scale_a)), (b, scale_b), out, disable_ue8m0_cast=True)
    return out


def _block_scaled(inputs: Inputs) -> bool:
    scale = inputs.get("scale_a")
    plain = _has("bias", "residual", "silu_mul", "out_scale", "out_dtype", trans_b=True)(inputs)
    return plain and inputs["a"].dtype is torch.float8_e4m3fn and scale is not None and scale.dim() == 2 and scale.shape[1] > 1


_PLAIN_MATMUL = _both(_half("a"), _has("bias", "residual", "silu_mul", "out_scale", "out_dtype", "scale_a"))
_PLAIN_BMM = _both(_half("a"), _has("out_dtype", "scale_a"))
_EXTRAS = ("window", "kv_start", "kv_len", "cu_seqlens_q", "return_lse", "sinks", "softcap", "block_table", "indices", "scale_q")
_PLAIN_PREFILL = _both(_half("q"), _has(*_EXTRAS), lambda inputs: inputs["q"].dim() == 4 and inputs["v"] is not None)
_DECODE = _both(
    _half("q"), _has(*(name for name in _EXTRAS if name != "kv_len")), lambda inputs: inputs["q"].shape[2] == 1 and inputs["v"] is not None
)
_FUSED_SILU = _both(_half("gate"), _has("up", "gelu_tanh"))

_Entry = tuple[Callable[..., Any], Callable[[Inputs], bool]]
_CALLS: dict[tuple[str, str], _Entry] = {
    ("tilegym", "rms_norm"): (_tilegym_rms_norm, _plain_norm),
    ("tilegym", "softmax"): (lambda x: _ops("tilegym", ".ops").softmax(x), lambda inputs: True),
    ("tilegym", "silu_mul"): (_tilegym_silu_mul, _FUSED_SILU),
    ("tilegym", "matmul"): (_tilegym_matmul, _PLAIN_MATMUL),
    ("tilegym", "bmm"): (_tilegym_bmm, _PLAIN_BMM),
    ("tilegym", "attention"): (_tilegym_attention, _PLAIN_PREFILL),
    ("tilegym", "attention_decode"): (_tilegym_decode, _DECODE),
    ("liger", "rms_norm"): (_liger_rms_norm, lambda inputs: inputs.get("residual") is None),
    ("liger", "silu_mul"): (
        lambda gate, up, **unused: _ops("liger", ".ops.swiglu").LigerSiLUMulFunction.apply(gate, up),
        lambda inputs: inputs.get("up") is not None and not inputs.get("gelu_tanh"),
    ),
    ("liger", "softmax"): (lambda x: _ops("liger", ".ops.softmax").LigerSoftmaxFunction.apply(x), lambda inputs: True),
    ("flashinfer", "rms_norm"): (lambda x, weight, eps, **unused: _ops("flashinfer").rmsnorm(x, weight, eps), _both(_half("x"), _plain_norm)),
    ("flashinfer", "silu_mul"): (lambda gate, **unused: _ops("flashinfer").silu_and_mul(gate), _FUSED_SILU),
    ("flashinfer", "attention"): (_flashinfer_attention, _both(_PLAIN_PREFILL, lambda inputs: len(inputs["q"]) == 1)),
    ("flashinfer", "attention_decode"): (_flashinfer_decode, _both(_DECODE, lambda inputs: len(inputs["q"]) == 1)),
    ("quack", "rms_norm"): (lambda x, weight, eps, **unused: _ops("quack").rmsnorm(x, weight, eps=eps), _plain_norm),
    ("quack", "softmax"): (lambda x: _ops("quack").softmax(x), lambda inputs: True),
    ("deepgemm", "matmul"): (_deepgemm_matmul, _block_scaled),
}
