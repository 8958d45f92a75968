"""Products that leave the sums over their shares of k to the call behind them: a launch less."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops import quantized_matmul
from ..ops.kv_append import kv_append_out
from ..ops.quantized_matmul import quantized_matmul_out
from .program import Call, StepBuffers

# The arguments of an op that may come in shares, in sets that do so together
READERS: dict[Callable[..., Any], tuple[set[str], ...]] = {
    quantized_matmul_out: ({"residual"}, {"x", "up"}),
    kv_append_out: ({"q", "k", "v"},),
}


def in_shares(calls: Iterable[Call], buffers: StepBuffers) -> list[Call]:
    """A step's calls with sums left to their reader, where that is the next call and no other."""
    found = list(calls)
    for i in range(len(found) - 1):
        if found[i].op is quantized_matmul_out:
            found[i : i + 2] = _joined(found[i], found[i + 1], found[i + 2 :], buffers)
    return found


def _joined(product: Call, reader: Call, rest: list[Call], buffers: StepBuffers) -> tuple[Call, Call]:
    out: Tensor = product.arguments["out"]
    reads = touching(out, reader)
    if set(reads) not in READERS.get(reader.op, ()) or not _last_read(out, reader, reads, rest):
        return product, reader
    how = ("x", "norm", "residual", "up", "bias", "weight_offset", "gelu_tanh", "weight_format", "out")
    launches = quantized_matmul.launches_of(**{name: product.arguments[name] for name in how}, left=True).launches
    shares = max(launch.constants.get("shares", 1) for launch in launches)
    if shares == 1:
        return product, reader
    wide = buffers.tensor(f"shares.{shares}.{out.shape[1]}", shares, *out.shape, dtype=torch.float32)
    given: dict[str, Tensor] = {}
    for name, x in reads.items():
        first = x.storage_offset() - out.storage_offset()
        if reader.op is kv_append_out:  # the shares of a sequence lie among sequences
            shape, strides = (shares * len(x), *x.shape[1:]), (out.numel() // len(x), *x.stride()[1:])
        else:
            shape, strides = (shares, *x.shape), (out.numel(), *x.stride())
        given[name] = wide.as_strided(shape, strides, first)
    if reader.op is kv_append_out:
        given["rotated"] = reads["q"]
    return product.replaced(out=wide), reader.replaced(**given)


def touching(out: Tensor, call: Call) -> dict[Any, Tensor]:
    """The arguments of a call that lie in the memory of `out`, of these ops by their names."""
    arguments: dict[Any, Any] = call.arguments if call.op in READERS else dict(enumerate(call.args))
    memory = out.untyped_storage().data_ptr()
    return {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == memory}


def _last_read(out: Tensor, reader: Call, reads: dict[str, Tensor], rest: list[Call]) -> bool:
    """Whether all of `out` is read by `reader`, and nothing more until it is written again.

    Behind the calls the last addend of the stream is read, which is a `residual`.
    """
    if sum(x.numel() for x in reads.values()) != out.numel() or not out.is_contiguous():
        return False
    for call in rest:
        touched = touching(out, call)
        if reader.op is kv_append_out and all(_same(x, reads["q"]) for x in touched.values()):
            continue  # the rotated queries
        if touched:
            return call.op is quantized_matmul_out and touched.keys() == {"out"} and _same(touched["out"], out)
    return "residual" not in reads


def _same(x: Tensor, other: Tensor) -> bool:
    return x.data_ptr() == other.data_ptr() and x.shape == other.shape
