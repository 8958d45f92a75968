"""An op in a package of your own: out = x + factor * y

The pattern is that of tilewright's own ops (docs/writing-an-op.md): a plan that is data, a kernel,
a registered torch op without checks, a public function with them. It needs only what is public.

pip install -e examples/own_op && pytest examples/own_op
"""

from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from tilewright.launch import Decision, Device, Launch, check_tensor, torch_op


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a decision may look at."""

    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Config:
    tile: int


def space(p: Problem, device: Device) -> list[Config]:
    """The configs worth timing, the default first: large tiles for the interpreter."""
    return [Config(4096), Config(1024)] if device.is_cpu else [Config(1024), Config(4096)]


@ct.kernel
def scaled_add_kernel(X, Y, OUT, factor: float, TILE: ct.Constant[int]):
    i = ct.bid(0)
    x = ct.load(X, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    y = ct.load(Y, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(OUT, (i,), (x + factor * y).astype(OUT.dtype))


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    return (Launch(scaled_add_kernel, (-(-p.numel // c.tile),), {"tile": c.tile}),)


DECISION = Decision("my_scaled_add", problem=Problem, arguments=("x", "y", "out", "factor"), space=space, plan=plan)


@torch_op(mutates=("out",))  # torch.ops.tilewright.my_scaled_add_out: graphs and torch.compile see one op
def my_scaled_add_out(x: Tensor, y: Tensor, factor: float, out: Tensor) -> None:
    DECISION.launches(Device.of(x), numel=x.numel(), dtype=x.dtype).run(x, y, out, factor)


def scaled_add(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """x + factor * y, in fp32, rounded once.

    Args:
        x, y: contiguous, of one shape, dtype and device.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=(torch.float32, torch.bfloat16, torch.float16), contiguous=True)
    check_tensor(y, "y", shape=tuple(x.shape), like=x, contiguous=True)
    out = torch.empty_like(x)
    if x.numel():
        my_scaled_add_out(x.view(-1), y.view(-1), factor, out.view(-1))
    return out
