"""Entry point of vLLM's plugins: offers our RMSNorm as a provider.

Never run with all of vLLM. Written against its public documentation (`vllm.ir` in 0.23 to 0.33:
`register_impl`, the names of the arguments), tested against a stand-in of that shape, and run with
the `vllm.ir` of vLLM 0.33 (tools/wheel_plugins.py). vLLM 0.34 drops `vllm.ir`;
examples/vllm_plugin.py has the form that stays. Registering changes nothing: a provider runs only
if vLLM's `ir_op_priority` names it.
"""

import logging

from torch import Tensor

from ..ops.rms_norm import rms_norm
from .plugin_rows import norm_takes

PROVIDER = "tilewright"


def register() -> None:
    """Offers vLLM our kernels. vLLM calls it in each of its processes, maybe several times."""
    try:
        from vllm import ir
    except ImportError as error:
        logging.getLogger(__name__).warning("tilewright offers vLLM nothing: it has no vllm.ir (%s)", error)
        return
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(PROVIDER, supported=True, supports_args=_norm_fits)(_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=True, supports_args=_sum_norm_fits)(_sum_norm)


# The names of the arguments are vLLM's, which checks them.


def _norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return weight is not None and variance_size is None and norm_takes(x, weight)


def _norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    assert weight is not None
    return rms_norm(x, weight, epsilon, round_before_weight=True)


def _sum_norm_fits(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _norm_fits(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype and x_residual.stride(-1) == 1


def _sum_norm(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> tuple[Tensor, Tensor]:
    assert weight is not None
    return rms_norm(x, weight, epsilon, round_before_weight=True, residual=x_residual)
