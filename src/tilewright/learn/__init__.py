"""How it got fast: ladders of runnable steps."""

from collections.abc import Sequence

from .ladder import Ladder, Step

__all__ = ["SEQ_LENS", "Ladder", "Step", "ladders"]

SEQ_LENS = (1024, 2048, 4096, 8192, 16384)  # of the published tables


def ladders(subject: str, seq_lens: Sequence[int] = ()) -> tuple[Ladder, ...]:
    """The ladders of a subject.

    Args:
        subject: "attention" or "gemm".
        seq_lens: makes a ladder of attention for each; by default one of 2048, the length in every
            published table.
    Raises: KeyError that names the subjects; ValueError for lengths below 1, or for lengths with
        "gemm".
    """
    if subject == "attention":
        return tuple(map(_attention, seq_lens or (2048,)))
    if subject != "gemm":
        raise KeyError(f"subject must be one of attention, gemm, got {subject!r}")
    if seq_lens:
        raise ValueError(f"seq must be given only with attention, got {','.join(map(str, seq_lens))}")
    from . import gemm

    return gemm.LADDERS


def _attention(seq_len: int) -> Ladder:
    """On the problem of the published tables: batch 4, 32 heads, head_dim 128, fp16."""
    from ..ops import attention as finished
    from . import attention

    if seq_len < 1:
        raise ValueError(f"seq must be lengths of at least 1, got {seq_len}")
    problem, small = attention.Problem(4, 32, 32, seq_len, 128), attention.Problem(1, 4, 2, 300, 64)
    return Ladder("attention", attention, problem, small, attention.STEPS, finished)
