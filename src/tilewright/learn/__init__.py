"""How it got fast: ladders of runnable steps."""

from .ladder import Ladder, Step

__all__ = ["Ladder", "Step", "ladders"]


def ladders(subject: str) -> tuple[Ladder, ...]:
    """The ladders of a subject. Raises KeyError naming those that there are."""
    from . import gemm

    known = {"gemm": gemm.LADDERS}
    if subject not in known:
        raise KeyError(f"subject must be one of {', '.join(known)}, got {subject!r}")
    return known[subject]
