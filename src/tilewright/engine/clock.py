"""When things happened, without waiting for them."""

import time
from typing import Any

import torch


class Clock:
    """Times between marks, on a GPU by events: no waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if not self._cuda:
            return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
