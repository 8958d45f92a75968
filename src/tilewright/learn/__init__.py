"""Shows how a kernel got fast: ladders of runnable steps."""

from collections.abc import Sequence

from ..launch import argument_error, one_of
from .ladder import Ladder

SEQ_LENS = (1024, 2048, 4096, 8192, 16384)  # of the published tables


def ladders(
    subject: str,
    seq_lens: Sequence[int] = (),
    *,
    batch: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = True,
) -> tuple[Ladder, ...]:
    """The ladders of a subject.

    Args:
        subject: "attention", "gemm" or "decode".
        seq_lens: makes a ladder of attention for each; by default one of 2048, the length in every
            published table.
        batch, heads, head_dim: sizes of attention instead of the published 4, 32 and 128; None
            keeps these.
        causal: False lets every query of attention see all keys.
    Raises: KeyError that names the subjects; ValueError for lengths or sizes below 1, for a
        head_dim that the steps do not take, or for any of these with another subject.
    """
    sizes = {name: value for name, value in (("batch", batch), ("heads", heads), ("head_dim", head_dim)) if value is not None}
    if subject == "attention":
        return tuple(_attention(seq_len, sizes, causal) for seq_len in seq_lens or (2048,))
    if subject not in ("gemm", "decode"):
        raise KeyError(f"subject must be {one_of(('attention', 'gemm', 'decode'), subject)}, got {subject!r}")
    for name, given in {"seq": seq_lens, **sizes, "non-causal": not causal}.items():
        if given:
            raise argument_error(name, "given only with attention", given)
    from . import decode, gemm

    return gemm.LADDERS if subject == "gemm" else (decode.LADDER,)


def _attention(seq_len: int, sizes: dict[str, int], causal: bool) -> Ladder:
    """On the problem of the published tables, batch 4, 32 heads, head_dim 128, fp16, except for
    `sizes`.
    """
    from ..ops import attention as finished
    from . import attention

    for name, value in {"seq": seq_len, **sizes}.items():
        if not 1 <= value < 1 << 31:
            raise argument_error(name, "1 to 2**31 - 1", value)
    batch, heads, head_dim = (sizes.get(name, default) for name, default in (("batch", 4), ("heads", 32), ("head_dim", 128)))
    if head_dim not in attention.HEAD_DIMS:
        raise argument_error("head_dim", f"one of {', '.join(map(str, attention.HEAD_DIMS))}", head_dim)
    problem = attention.Problem(batch, heads, heads, seq_len, head_dim, causal=causal)
    return Ladder("attention", attention, problem, attention.Problem(1, 4, 2, 300, 64, causal=causal), attention.STEPS, finished)
