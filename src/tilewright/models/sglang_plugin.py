"""Entry point of SGLang's plugins: wraps its layers' RMSNorm and SiLU-mul with ours.

Never run with all of SGLang. Written against its public source (`sglang.srt.plugins`:
`HookRegistry`, and `forward_cuda` of its layers), tested against a stand-in of that shape, and run
with the registry of SGLang 0.5.23 (tools/wheel_plugins.py). SGLang runs the plugins of every
installed package; ours acts only if SGLANG_PLUGINS names it.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..launch import FLOATS
from ..ops.rms_norm import rms_norm
from ..ops.silu_mul import silu_mul
from .plugin_rows import norm_takes

NAME = "tilewright"
LAYERS = "sglang.srt.layers"


def register() -> None:
    """Puts our kernels around SGLang's layers. SGLang calls it in each of its processes."""
    log = logging.getLogger(__name__)
    if NAME not in (name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")):
        log.info("tilewright leaves SGLang alone: SGLANG_PLUGINS does not name it")
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        log.warning("tilewright offers SGLang nothing: it has no sglang.srt.plugins (%s)", error)
        return
    HookRegistry.register(f"{LAYERS}.layernorm.RMSNorm.forward_cuda", _norm, HookType.AROUND)
    HookRegistry.register(f"{LAYERS}.activation.SiluAndMul.forward_cuda", _silu_mul, HookType.AROUND)


# The first argument is SGLang's own method, for what our kernels do not compute.


def _norm(theirs: Callable[..., Any], layer: Any, x: Tensor, residual: Tensor | None = None, *rest: Any, **more: Any) -> Any:
    asked = (getattr(layer, name, None) for name in ("variance_size_override", "_quant_linear"))  # part of a row; an 8-bit result
    plain = all(value is None for value in (*rest, *more.values(), *asked))
    plain = plain and not getattr(layer, "fp32_residual", False) and getattr(layer, "override_orig_dtype", None) is None
    if not plain or not _fits(x, layer.weight) or (residual is not None and not _fits(residual, layer.weight)):
        return theirs(layer, x, residual, *rest, **more)
    how: dict[str, Any] = {"round_before_weight": bool(getattr(layer, "cast_x_before_out_mul", False)), "residual": residual}
    return rms_norm(x, layer.weight.detach(), layer.variance_epsilon, **how)


def _silu_mul(theirs: Callable[..., Any], layer: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    if rest or more or x.dtype not in FLOATS or x.stride(-1) != 1:
        return theirs(layer, x, *rest, **more)
    return silu_mul(x)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return x.shape[-1:] == weight.shape and norm_takes(x, weight)
