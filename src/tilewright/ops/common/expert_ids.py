"""Which experts tokens go to: what ops on mixtures check of it, and what their Problems draw."""

from functools import lru_cache

import torch
from torch import Tensor

from ...launch import argument_error, check_finite, check_positive, check_tensor
from ...launch.values import Claims, within
from .routing import MOST_EXPERTS, MOST_TOP_K


def check_choice(x: Tensor, weights: Tensor, ids: Tensor) -> None:
    """weights [tokens, top_k] fp32 and ids of the same shape, on x's device."""
    for name, tensor, dtypes in (("weights", weights, (torch.float32,)), ("ids", ids, (torch.int32, torch.int64))):
        check_tensor(tensor, name, ndim=2, dtypes=dtypes, like=x)
    if weights.shape[0] != len(x) or not 1 <= weights.shape[1] <= MOST_TOP_K:
        raise argument_error("weights.shape", f"({len(x)}, top_k) with top_k from 1 to {MOST_TOP_K}", tuple(weights.shape))
    check_tensor(ids, "ids", shape=tuple(weights.shape))


def checked_activation(alpha: float, limit: float | None, up_offset: float) -> tuple[float, float | None, float]:
    """Numbers of act(gate, up), as Python's: numpy's compare to its own bools."""
    check_positive(alpha, "alpha")
    if limit is not None:
        check_positive(limit, "limit")
    check_finite(up_offset, "up_offset")
    return float(alpha), limit if limit is None else float(limit), float(up_offset)


def claims(ids: Tensor) -> Claims:
    """What an op of this argument relies on."""
    yield from within("ids.view(-1)", ids, 1 - MOST_EXPERTS, MOST_EXPERTS - 1)  # other ranks' experts are legal


def routed(tokens: int, experts: int, top_k: int, foreign: int, only: tuple[int, ...] = ()) -> Tensor:
    """int32 [tokens, top_k] on the CPU: distinct experts for each token, the same on every run;
    twice the same only if `only` has too few.

    foreign: how many of each token's choices are another rank's, with ids outside of 0 to experts -
        1. only: the experts that tokens go to, all of them if empty.
    """
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    among = torch.tensor(only or range(experts), dtype=torch.int32)
    order = torch.rand(tokens, len(among), generator=generator).argsort(-1)
    ids = among[order[:, torch.arange(top_k) % len(among)]]
    if foreign:
        ids[:, :foreign] = torch.where(ids[:, :foreign] % 2 == 0, -1 - ids[:, :foreign], experts + ids[:, :foreign])
    return ids


@lru_cache(maxsize=1024)
def used(tokens: int, experts: int, top_k: int, foreign: int, only: tuple[int, ...] = ()) -> tuple[int, int]:
    """How many experts `routed` tokens go to, and how many rows they have together."""
    ids = routed(tokens, experts, top_k, foreign, only)
    known = ids[(ids >= 0) & (ids < experts)]
    return int(known.unique().numel()), int(known.numel())
