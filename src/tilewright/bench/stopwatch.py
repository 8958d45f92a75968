"""How long each phase of a run takes."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Seconds by phase, in the order in which the phases first began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a phase, even if the block raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The seconds of each phase, summed over all parts."""
    found: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def told(seconds: Mapping[str, float], whole_s: float) -> str:
    """`took 90.0 s: timing 60.0, check 20.0, other 10.0`: longest first; other is in no phase."""
    phases = sorted(seconds.items(), key=lambda phase: -phase[1])
    parts = [f"{name} {s:.1f}" for name, s in phases] + [f"other {max(0.0, whole_s - sum(seconds.values())):.1f}"]
    return f"took {whole_s:.1f} s: {', '.join(parts)}"
