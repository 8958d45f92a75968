"""`run_ranks(function, ...)`: one process for each rank, on this host; when one fails or is interrupted, none is left behind."""

import contextlib
import datetime
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from ..launch import must
from .parallel import Group

# A rank may load, compile or run the comparison of the command line for so long while the others wait for it.
PATIENCE = datetime.timedelta(minutes=20)
TIDYING_S = 30.0
_KNOWN = (ValueError, TypeError, KeyError, ImportError, OSError, MemoryError, RuntimeError, torch.OutOfMemoryError)  # arrive as they are


def run_ranks(function: Callable[..., Any], *args: Any, ranks: int, device: str = "cuda", direct: bool | None = None, start: str = "spawn") -> Any:
    """Calls `function(group, device, *args)` in `ranks` new processes and returns what rank 0's call returned.

    Args:
        function, args: what pickle takes; device is cuda:RANK, or cpu.
        ranks: processes, on GPUs one for each.
        device: "cuda" (NCCL) or "cpu" (gloo).
        direct: as in `Group.of`.
        start: how processes start, as multiprocessing has it; with GPUs "spawn".
    Raises:
        ValueError: fewer GPUs than ranks.
        Whatever the first rank to fail raised; the others are ended first.
    """
    if ranks < 1:
        raise must("ranks", "at least 1", ranks)
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise must("ranks", f"at most {torch.cuda.device_count()}, the GPUs of this machine", ranks)
    with tempfile.TemporaryDirectory(prefix="tilewright-ranks-") as name:
        folder = Path(name)
        told = (ranks, device, direct, folder, function, args)
        processes = start_processes(_rank, told, ranks, join=False, daemon=True, start_method=start).processes
        try:
            while not any(p.exitcode for p in processes) and (running := [p.sentinel for p in processes if p.exitcode is None]):
                if not wait(running, TIDYING_S) and (folder / "result").is_file():
                    break  # all ranks are done, and what a GPU's library does at the end of a process takes too long
            failed = next(((rank, p.exitcode) for rank, p in enumerate(processes) if p.exitcode), None)
        finally:
            # Not asked to end: after a failure or Ctrl-C in one of them the others wait for it, on a GPU without end.
            for p in processes:
                p.kill()
                p.join()
        if (folder / "error").is_file():
            raise pickle.loads((folder / "error").read_bytes())
        if failed is not None:
            raise RuntimeError(f"rank {failed[0]} ended with exit code {failed[1]}")
        return pickle.loads((folder / "result").read_bytes())


def _rank(rank: int, ranks: int, device: str, direct: bool | None, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once: a handler would run when the GPU is done, which waits for the other ranks
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", rank)
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    backend, meeting = ("nccl" if device == "cuda" else "gloo"), f"file://{folder / 'meeting'}"
    dist.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=ranks, timeout=PATIENCE, device_id=where if device == "cuda" else None
    )
    try:
        result = function(Group.of(direct=direct), where, *args)
        dist.barrier()  # none leaves while another still needs it
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
    except Exception as error:
        _report(folder, rank, error)
        sys.exit(1)
    dist.destroy_process_group()


def _report(folder: Path, rank: int, error: Exception) -> None:
    """Notes the first failure, the cause: what follows in other ranks is a lost connection."""
    told = error if type(error) in _KNOWN else RuntimeError(f"{type(error).__name__}: {error}")
    told.add_note(f"in rank {rank}:\n{''.join(traceback.format_exception(error))}")
    written = folder / f"error.{rank}"
    written.write_bytes(pickle.dumps(told))
    with contextlib.suppress(FileExistsError):
        (folder / "error").hardlink_to(written)
