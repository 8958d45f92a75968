"""Other kernel libraries as peers, where they are installed.

They compute the same function in the same dtype, and the timed call copies and converts nothing.
A library is imported when a benchmark first asks for an op's peers. If its call fails, or its
result differs from ours, the row names it without a time.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..launch import next_pow2
from . import flashinfer_calls as flashinfer, library_calls as calls, linear_peers as linear
from .inputs import Applies, Inputs, all_of, half, one_token, without
from .peers import Peer

STRAY = 0.05  # distance of two results, RMS over RMS, from which they are not the same computation; fp8 products differ by 0.01
LIBRARIES = {
    "tilegym": "tilegym",
    "liger": "liger_kernel",
    "flashinfer": "flashinfer",
    "quack": "quack",
    "deepgemm": "deep_gemm",
    "fla": "fla",
    "mamba_ssm": "mamba_ssm",
}


def library_peers(op: str, inputs: Inputs) -> list[Peer]:
    """Peers of installed libraries that compute this op for these inputs."""
    return [Peer(name, call) for (name, of), (call, applies) in _CALLS.items() if of == op and _module(name) and applies(inputs)]


@cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(LIBRARIES[name])
    except ModuleNotFoundError as error:
        if error.name != LIBRARIES[name]:
            warnings.warn(f"{name} is no peer: it needs {error.name}", stacklevel=2)
    except Exception as error:  # whatever a library raises on a machine that it is not made for
        warnings.warn(f"{name} is no peer: {type(error).__name__}: {error}", stacklevel=2)
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
    """What differs so much that two results are not of the same computation, or ""."""
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


# ---------------------------------------------------------------------------------- what each takes
def _affine(inputs: Inputs) -> bool:
    return inputs.get("weight") is not None and inputs.get("bias") is not None


def _flashinfer_norm(inputs: Inputs) -> bool:
    return not inputs.get("round_before_weight") and inputs.get("weight_offset", 0.0) in (0.0, 1.0)


def _heads_inside(inputs: Inputs) -> bool:
    """Whether q and k lie in memory as projections leave them: other libraries rotate in place."""
    return all(inputs[name].transpose(1, 2).is_contiguous() for name in ("q", "k"))


def _whole_heads(inputs: Inputs) -> bool:
    """Whether the columns of cosines and of sines, each a power of two, make a head."""
    half = inputs["cos"].shape[-1]
    return bool(2 * half == inputs["q"].shape[3] and half == next_pow2(half))


def _same_dtype_out(inputs: Inputs) -> bool:
    return inputs.get("out_dtype") in (None, inputs["a"].dtype)


def _same_batch(inputs: Inputs) -> bool:
    return bool(inputs["a"].shape[0] == inputs["b"].shape[0])


def _columns(*known: int) -> Applies:
    """Whether keys and values have as many columns as each other, and this many."""
    return lambda inputs: inputs.get("v") is not None and inputs["q"].shape[-1] == inputs["v"].shape[-1] and inputs["q"].shape[-1] in known


def _whole(keys: str) -> Applies:
    """Whether every sequence fills its room for keys."""
    return lambda inputs: inputs.get("kv_len") is None or bool((inputs["kv_len"] == inputs[keys].shape[-2]).all())


def _dense_prefill(inputs: Inputs) -> bool:
    return inputs["q"].dim() == 4 and (not inputs.get("causal", True) or inputs["q"].shape[2] <= inputs["k"].shape[2])


def _square(inputs: Inputs) -> bool:
    return bool(inputs["q_nope"].shape[2] == inputs["k_nope"].shape[2])


def _packed_prefill(inputs: Inputs) -> bool:
    return inputs["q"].dim() == 3 and inputs.get("cu_seqlens_kv") is not None


def _contiguous(*names: str) -> Applies:
    return lambda inputs: all(inputs[name].is_contiguous() for name in names)


def _block_scaled(inputs: Inputs) -> bool:
    scale = inputs.get("scale_a")
    plain = without("bias", "residual", "silu_mul", "out_scale", "out_dtype")(inputs) and inputs.get("trans_b") is True
    return plain and inputs["a"].dtype is torch.float8_e4m3fn and scale is not None and scale.dim() == 2 and scale.shape[1] > 1


_NO_RESIDUAL = without("residual", "round_before_weight")
_COSINES = all_of(lambda inputs: inputs.get("cos") is not None, half("q"), _heads_inside)
_PLAIN_MATMUL = all_of(half("a"), without("bias", "residual", "silu_mul", "out_scale", "scale_a"), _same_dtype_out)
_PLAIN_BMM = all_of(half("a"), without("scale_a"), _same_dtype_out, _same_batch)
_PLAIN_PREFILL = without("window", "kv_start", "return_lse", "sinks", "softcap", "q_scale")
_PLAIN_DECODE = all_of(without("kv_start", "window", "sinks", "return_lse", "v_dim"), lambda inputs: bool(inputs.get("normalize", True)))
_PLAIN_MLA = all_of(half("q_nope"), without("return_lse"))
_PLAIN_MLA_DECODE = all_of(half("q_latent"), without("kv_start", "return_lse"))
_HEADS = (64, 128, 256)  # columns of a head for which FlashInfer has kernels

_CALLS: dict[tuple[str, str], tuple[Callable[..., Any], Applies]] = {
    ("tilegym", "rms_norm"): (calls.tilegym_rms_norm, _NO_RESIDUAL),
    ("tilegym", "layer_norm"): (calls.tilegym_layer_norm, _affine),
    ("tilegym", "softmax"): (calls.tilegym_softmax, lambda inputs: True),
    ("tilegym", "silu_mul"): (calls.tilegym_silu_mul, without("up", "gelu_tanh")),
    ("tilegym", "rope"): (calls.tilegym_rope, all_of(_COSINES, without("interleaved"), _whole_heads)),
    ("tilegym", "matmul"): (calls.tilegym_matmul, _PLAIN_MATMUL),
    ("tilegym", "bmm"): (calls.tilegym_bmm, _PLAIN_BMM),
    ("tilegym", "attention"): (
        calls.tilegym_attention,
        all_of(half("q"), _PLAIN_PREFILL, without("cu_seqlens_q"), _dense_prefill, _columns(*_HEADS), _contiguous("k", "v"), _whole("k")),
    ),
    ("tilegym", "attention_decode"): (
        calls.tilegym_decode,
        all_of(half("q"), _PLAIN_DECODE, without("block_table"), one_token("q"), _columns(*_HEADS), _contiguous("k", "v"), _whole("k")),
    ),
    ("tilegym", "mla"): (
        calls.tilegym_mla,
        all_of(_PLAIN_MLA, _square, _whole("k_nope"), lambda inputs: inputs["causal"] and inputs["q_nope"].shape[-1] == inputs["v"].shape[-1]),
    ),
    ("tilegym", "mla_decode"): (
        calls.tilegym_mla_decode,
        all_of(_PLAIN_MLA_DECODE, without("block_table"), one_token("q_latent"), _whole("cache")),
    ),
    ("liger", "rms_norm"): (calls.liger_rms_norm, lambda inputs: True),
    ("liger", "layer_norm"): (calls.liger_layer_norm, _affine),
    ("liger", "softmax"): (calls.liger_softmax, lambda inputs: True),
    ("liger", "silu_mul"): (calls.liger_silu_mul, lambda inputs: inputs.get("up") is not None or not inputs.get("gelu_tanh")),
    ("liger", "rope"): (calls.liger_rope, all_of(_COSINES, without("interleaved"))),
    ("flashinfer", "rms_norm"): (flashinfer.rms_norm, all_of(half("x"), _flashinfer_norm)),
    ("flashinfer", "layer_norm"): (flashinfer.layer_norm, all_of(_affine, lambda inputs: inputs["x"].dtype is torch.bfloat16)),
    ("flashinfer", "silu_mul"): (flashinfer.silu_mul, all_of(half("gate"), without("up"))),
    ("flashinfer", "rope"): (flashinfer.rope, all_of(_COSINES, lambda inputs: inputs["cos"].shape[0] == 1)),
    ("flashinfer", "attention"): (
        flashinfer.attention,
        all_of(half("q"), _PLAIN_PREFILL, _columns(*_HEADS), lambda inputs: _dense_prefill(inputs) or _packed_prefill(inputs)),
    ),
    ("flashinfer", "attention_decode"): (flashinfer.attention_decode, all_of(half("q"), _PLAIN_DECODE, _columns(*_HEADS), _contiguous("k", "v"))),
    ("flashinfer", "mla"): (
        flashinfer.mla,
        all_of(
            _PLAIN_MLA,
            lambda inputs: (inputs["q_nope"].shape[-1], inputs["q_rope"].shape[-1], inputs["v"].shape[-1]) == (128, 64, 128),
        ),
    ),
    ("flashinfer", "mla_decode"): (
        flashinfer.mla_decode,
        all_of(_PLAIN_MLA_DECODE, _contiguous("cache"), lambda inputs: (inputs["q_latent"].shape[-1], inputs["q_rope"].shape[-1]) == (512, 64)),
    ),
    ("flashinfer", "merge_states"): (
        flashinfer.merge_states,
        all_of(
            half("states"), lambda inputs: bool(inputs.get("base2")) and inputs["states"].dim() == 3 and inputs["states"].shape[2] in (*_HEADS, 512)
        ),
    ),
    ("quack", "rms_norm"): (calls.quack_rms_norm, without("round_before_weight")),
    ("quack", "layer_norm"): (calls.quack_layer_norm, lambda inputs: inputs.get("weight") is not None),
    ("quack", "softmax"): (calls.quack_softmax, lambda inputs: True),
    ("fla", "gated_delta_rule"): (linear.fla, half("q")),
    ("mamba_ssm", "ssd"): (linear.mamba_ssm, all_of(half("x"), without("cu_seqlens", "state_rows"))),
    ("deepgemm", "matmul"): (calls.deepgemm_matmul, _block_scaled),
}
