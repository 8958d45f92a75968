"""How it got fast: ladders of runnable steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .ladder import Ladder, Step

__all__ = ["SEQ_LENS", "Ladder", "Step", "ladders"]

SEQ_LENS = (1024, 2048, 4096, 8192, 16384)  # of the published tables


def ladders(subject: str, seq_lens: Sequence[int] = (), *, batch: int = 0, heads: int = 0, head_dim: int = 0) -> tuple[Ladder, ...]:
    """The ladders of a subject.

    Args:
        subject: "attention", "gemm" or "decode".
        seq_lens: makes a ladder of attention for each; by default one of 2048, the length in every
            published table.
        batch, heads, head_dim: of attention in place of the published 4, 32 and 128; 0 leaves them.
    Raises: KeyError that names the subjects; ValueError for lengths or sizes below 1, for a
        head_dim that the steps do not take, or for any of these with another subject.
    """
    sizes: dict[str, Any] = {
        name: value for name, value in (("batch", batch), ("q_heads", heads), ("kv_heads", heads), ("head_dim", head_dim)) if value
    }
    if subject == "attention":
        return tuple(_attention(seq_len, sizes) for seq_len in seq_lens or (2048,))
    if subject not in ("gemm", "decode"):
        raise KeyError(f"subject must be one of attention, gemm, decode, got {subject!r}")
    if seq_lens or sizes:
        given = ",".join(map(str, seq_lens)) or ", ".join(f"{name.removeprefix('q_')} {value}" for name, value in sizes.items() if name != "kv_heads")
        raise ValueError(f"{'seq' if seq_lens else 'sizes'} must be given only with attention, got {given}")
    from . import decode, gemm

    return gemm.LADDERS if subject == "gemm" else (decode.LADDER,)


def _attention(seq_len: int, sizes: dict[str, Any]) -> Ladder:
    """On the problem of the published tables, batch 4, 32 heads, head_dim 128, fp16, but for
    `sizes`.
    """
    from ..ops import attention as finished
    from . import attention

    if seq_len < 1:
        raise ValueError(f"seq must be lengths of at least 1, got {seq_len}")
    if any(value < 1 for value in sizes.values()):
        raise ValueError(f"batch, heads and head_dim must be at least 1, got {min(sizes.values())}")
    if sizes.get("head_dim", 128) not in attention.HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {', '.join(map(str, attention.HEAD_DIMS))}, got {sizes['head_dim']}")
    problem, small = replace(attention.Problem(4, 32, 32, seq_len, 128), **sizes), attention.Problem(1, 4, 2, 300, 64)
    return Ladder("attention", attention, problem, small, attention.STEPS, finished)
