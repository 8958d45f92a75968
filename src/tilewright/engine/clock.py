"""Times of events, without waiting for them."""

import time
from typing import Any

import torch


class Clock:
    """Times between marks; on a GPU by events, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._steps: list[int] = []
        self.mark()

    def mark(self, steps: int = 1) -> None:
        """steps: how many equally long steps lie between the last mark and this one."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        self._steps.append(steps)

    def seconds(self) -> list[float]:
        """The time of each step."""
        if self._cuda:
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        else:
            times = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [each / steps for each, steps in zip(times, self._steps[1:], strict=True) for _ in range(steps)]
