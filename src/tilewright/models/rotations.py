"""Rotary embeddings of transformers' models: the forms of the function that rotates q and k.

A form is told by calling the function on random angles. q and k are views of fresh projections, so
ours rotate them in place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..launch import argument_error
from ..ops.rope import rope
from . import probe

Pair = tuple[Tensor, Tensor]


def _halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool) -> Pair:
    if unsqueeze_dim not in (1, 2):
        raise argument_error("unsqueeze_dim", "1 or 2", unsqueeze_dim)
    # of heads behind tokens; 1 leaves them
    rope(q.transpose(1, unsqueeze_dim), k.transpose(1, unsqueeze_dim), cos, sin, interleaved=interleaved)
    return q, k


def rotate_half_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
    """Angles are repeated for both halves of a head, and pairs are an element of each."""
    half = cos.shape[-1] // 2
    return _halves(q, k, cos[..., :half], sin[..., :half], unsqueeze_dim, False)


def rotate_by_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
    """The same for angles that are not repeated (gpt-oss)."""
    return _halves(q, k, cos, sin, unsqueeze_dim, False)


def rotate_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
    """Angles as for halves, but neighbours are a pair (GLM)."""
    half = cos.shape[-1] // 2
    return _halves(q, k, cos[..., :half], sin[..., :half], unsqueeze_dim, True)


def rotate_and_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1) -> Pair:
    """Neighbours are a pair, and lie in two halves afterwards (DeepSeek-V3)."""
    q, k = rotate_neighbours(q, k, cos, sin, unsqueeze_dim)
    return torch.cat((q[..., 0::2], q[..., 1::2]), -1), torch.cat((k[..., 0::2], k[..., 1::2]), -1)


def rotate_repeated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
    """Neighbours are a pair and have the same angle side by side (Cohere)."""
    return _halves(q, k, cos[..., ::2].contiguous(), sin[..., ::2].contiguous(), unsqueeze_dim, True)


def rotate_pairs(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
    """Neighbours are a pair; angles [batch or 1, seq_len, pairs] are complex (DeepSeek-V2)."""
    angles = torch.view_as_real(freqs_cis)
    return rope(xq, xk, angles[..., 0].contiguous(), angles[..., 1].contiguous(), interleaved=True)


def rotate_pairs_of_tokens(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
    """The same for [batch, seq_len, heads, head_dim] (Llama 4)."""
    rotate_pairs(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis)
    return xq, xk


def _alone(turn: Callable[..., Pair]) -> Callable[..., Any]:
    """The same of one tensor a call (Gemma 4): its last head takes the place of the keys."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        heads = x.shape[unsqueeze_dim]
        parts = x.split((heads - 1, 1), unsqueeze_dim) if heads > 1 else (x, torch.zeros_like(x))
        turn(*parts, cos, sin, unsqueeze_dim)
        return x

    return rotate


@dataclass(frozen=True, slots=True)
class Rotation:
    """angles: as the function takes them, of cos and sin [batch, seq_len, pairs].

    interleaved: neighbours are a pair. tokens_first: heads stand behind tokens. split: the first of
    each pair of neighbours go to the first half of a head.
    """

    ours: Callable[..., Pair]
    angles: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    interleaved: bool
    tokens_first: bool = False
    split: bool = False
    alone: bool = False


def _each(how: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    return lambda cos, sin: (how(cos), how(sin))


def _complex(cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return (torch.complex(cos, sin),)


ROTATIONS = {
    "half_split": Rotation(rotate_half_split, _each(lambda x: torch.cat((x, x), -1)), False),
    "neighbours": Rotation(rotate_neighbours, _each(lambda x: torch.cat((x, x), -1)), True),
    "split": Rotation(rotate_and_split, _each(lambda x: torch.cat((x, x), -1)), True, split=True),
    "repeated": Rotation(rotate_repeated, _each(lambda x: x.repeat_interleave(2, -1)), True),
    "by_halves": Rotation(rotate_by_halves, _each(lambda x: x), False),
    "pairs": Rotation(rotate_pairs, _complex, True),
    "pairs_of_tokens": Rotation(rotate_pairs_of_tokens, _complex, True, tokens_first=True),
}
ROTATIONS |= {
    f"{name}_alone": replace(ROTATIONS[name], ours=_alone(ROTATIONS[name].ours), alone=True)
    for name in ("half_split", "neighbours", "repeated", "by_halves")
}


@cache
def rotation_of(function: Any) -> str | None:
    """The form of a function that takes queries, keys and angles, or one of both and angles; None
    if it has none of these.
    """
    needed = 4 if len(probe.arguments_of(function) or ()) == 4 else 3
    for name, form in ROTATIONS.items():
        cos, sin = (probe.random(2, 5, 4, dtype=torch.float32, seed=seed) for seed in (1, 2))
        angles = form.angles(cos, sin)
        if 2 - form.alone + len(angles) != needed or not _computes(function, form, angles, cos, sin, 8):
            continue
        if _computes(function, form, angles, cos, sin, 12) is not False:  # of wider heads the other elements stay as they are
            return name
    return None


def _computes(function: Any, form: Rotation, angles: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int) -> bool | None:
    """None if it does not take heads of this size."""
    rows = [probe.random(2, 3 if i else 6, 5, dim, dtype=torch.float32, seed=i) for i in range(2 - form.alone)]
    given = [x.transpose(1, 2).clone() if form.tokens_first else x.clone() for x in rows]
    found = probe.attempt(lambda: function(*given, *angles))
    found = (found,) if form.alone and isinstance(found, Tensor) else found
    if not isinstance(found, tuple) or len(found) != len(rows):
        return None
    back = [x.transpose(1, 2) if form.tokens_first and isinstance(x, Tensor) else x for x in found]
    return all(probe.off(mine, _rotated(x, cos, sin, form).double()) < probe.SHARP for mine, x in zip(back, rows, strict=True))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, form: Rotation) -> Tensor:
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if form.interleaved else turned.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    parts = a * c - b * s, b * c + a * s
    both = torch.stack(parts, -1).flatten(-2) if form.interleaved and not form.split else torch.cat(parts, -1)
    return torch.cat((both, rest), -1)
