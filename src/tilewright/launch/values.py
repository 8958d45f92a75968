"""Claims of ops about the values in their device tensors. A call does not check them by default,
because it would have to wait for the device. With TILEWRIGHT_CHECK=1 it does
(docs/architecture.md).

An op states a function of some arguments of its `_out` that yields `Claim`s, made of the helpers
below, and names it in `torch_op(claims=...)`.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .check import LARGEST, argument_error
from .environment import warn_of_value

VARIABLE = "TILEWRIGHT_CHECK"
KEY = os.fsencode(VARIABLE) if os.name == "posix" else VARIABLE


@dataclass(frozen=True, slots=True)
class Claim:
    """A condition on the values of one tensor.

    name: of the tensor. values: the tensor. right: bool of its shape. be: what each value must be.
    """

    name: str
    values: Tensor
    right: Tensor
    be: str


Claims = Iterator[Claim]


def within(name: str, values: Tensor | None, low: int, high: int) -> Claims:
    """Each is in low..high."""
    if values is not None:
        yield Claim(name, values, (values >= low) & (values <= high), f"in {low}..{high}")


def rising(name: str, values: Tensor | None, most: int) -> Claims:
    """They are in 0..most, and none is less than the one before."""
    yield from within(name, values, 0, most)
    if values is not None:
        first = torch.ones_like(values[:1], dtype=torch.bool)
        yield Claim(name, values, torch.cat((first, values.diff() >= 0)), "at least the one before it")


def positive(name: str, values: Tensor | None) -> Claims:
    """Each is positive and finite."""
    if values is not None:
        yield Claim(name, values, (values > 0) & (values <= LARGEST), "positive and finite")


def finite(name: str, values: Tensor | None) -> Claims:
    """Each is neither a NaN nor an infinity."""
    if values is not None:
        yield Claim(name, values, values.isfinite(), "finite")


def no_nan(name: str, values: Tensor | None) -> Claims:
    """Each is a number."""
    if values is not None:
        yield Claim(name, values, ~values.isnan(), "a number")


def spans(kv_start: Tensor | None, kv_len: Tensor | None, max_len: int) -> Claims:
    """The keys of each sequence lie in its cache."""
    yield from within("kv_len", kv_len, 0, max_len)
    yield from within("kv_start", kv_start, 0, max_len)  # one behind kv_len means no key


def pages(block_table: Tensor | None, kv_len: Tensor | None, pool: int, page_size: int) -> Claims:
    """The entries of a block table in front of kv_len are pages of the pool."""
    if block_table is not None:
        first = torch.arange(block_table.shape[1], device=block_table.device) * page_size
        used = torch.ones_like(block_table, dtype=torch.bool) if kv_len is None else first < kv_len[:, None]
        yield Claim("block_table", block_table, ~used | ((block_table >= 0) & (block_table < pool)), f"in 0..{pool - 1}, the pages of the cache")


def wanted(x: Tensor) -> bool:
    """Whether TILEWRIGHT_CHECK asks for checks, and a call with x can wait for them."""
    # `os.environ` itself takes 20 times as long to say that there is no such variable.
    values: Any = getattr(os.environ, "_data", os.environ)
    value = values.get(KEY)
    if value in (None, b"0", "0", b"", ""):
        return False
    if value not in (b"1", "1"):
        warn_of_value(VARIABLE, os.fsdecode(value))
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        warnings.warn(f"{VARIABLE} checks no value under graph capture, nor when the graph is replayed", RuntimeWarning, stacklevel=4)
        return False
    return x.device.type != "meta"


def check_values(claims: Iterable[Claim]) -> None:
    """Raises ValueError naming the first tensor and index of which a claim is not so.

    Waits once for the device if all are.
    """
    made = list(claims)
    if not made or bool(torch.stack([claim.right.all() for claim in made]).all()):
        return
    wrong = next(claim for claim in made if not claim.right.all())
    index = (~wrong.right).nonzero()[0].tolist()
    place = f"[{', '.join(map(str, index))}]" if index else ""
    raise argument_error(wrong.name + place, wrong.be, wrong.values[tuple(index)].item())
