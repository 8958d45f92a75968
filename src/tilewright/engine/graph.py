"""A program run call by call, or captured once in a CUDA graph and replayed."""

from collections.abc import Callable
from typing import Any

import torch

from .program import Call, distinct

OnCall = Callable[[int, int], None]


def run(calls: list[Call]) -> None:
    for call in calls:
        call()


def compile_kernels(calls: list[Call], on_call: OnCall | None = None) -> None:
    """Runs the calls that need kernels of their own, so that none is compiled later. What they write is of no use."""
    first = distinct(calls)
    for done, call in enumerate(first):
        if on_call is not None:
            on_call(done, len(first))
        call()
    if on_call is not None:
        on_call(len(first), len(first))


def capture(calls: list[Call], pool: Any) -> torch.cuda.CUDAGraph:
    """One graph of all calls. They must have run before: nothing may be compiled while capturing."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls may break it: NCCL's watchdog asks after events from a thread of its own.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run(calls)
    return graph
