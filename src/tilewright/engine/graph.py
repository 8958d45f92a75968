"""A program run call by call, or captured once in a CUDA graph and replayed."""

from collections.abc import Callable
from typing import Any

import torch

from .program import Call, distinct

OnCall = Callable[[int, int], None]


def run(calls: list[Call], graph: torch.cuda.CUDAGraph | None = None) -> None:
    """Call by call, or by the graph that has them."""
    if graph is not None:
        graph.replay()
        return
    for call in calls:
        call()


def compile_kernels(calls: list[Call], on_call: OnCall | None = None) -> None:
    """Runs one call for each kernel, so that none is compiled later. The results are not used."""
    first = distinct(calls)
    for done, call in enumerate(first):
        if on_call is not None:
            on_call(done, len(first))
        call()
    if on_call is not None:
        on_call(len(first), len(first))


def capture(calls: list[Call], pool: Any) -> torch.cuda.CUDAGraph:
    """Captures all calls in one graph.

    They must have run before: nothing may compile during capture.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog queries events from its own thread, and must not break the
    # capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run(calls)
    return graph
