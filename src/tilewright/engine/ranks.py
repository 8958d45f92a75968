"""`run_ranks(function, ...)`: one process for each rank, on this host.

If one of them fails, is interrupted or killed, all end. If their parent is killed, they end too.
"""

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

from ..launch import argument_error
from ..launch.parent import ended_with_this, ignoring_interrupts
from .parallel import Group

# The others wait so long while one rank loads, compiles or runs the comparison of the command line.
PATIENCE = datetime.timedelta(minutes=20)
TIDYING_S = 30.0
_KNOWN = (ValueError, TypeError, KeyError, ImportError, OSError, MemoryError, RuntimeError, torch.OutOfMemoryError)  # arrive as they are


class RankLostError(RuntimeError, ChildProcessError):
    """A rank was killed, or ended without a word: no error of ours, so a command tells it in one
    line.
    """


def run_ranks(function: Callable[..., Any], *args: Any, ranks: int, device: str = "cuda", direct: bool | None = None, start: str = "spawn") -> Any:
    """Calls `function(group, device, *args)` in `ranks` new processes and returns what rank 0's
    call returned.

    Args:
        function, args: must be picklable; device is cuda:RANK, or cpu.
        ranks: processes; on GPUs one for each GPU.
        device: "cuda" (NCCL) or "cpu" (gloo).
        direct: as in `Group.of`.
        start: multiprocessing's start method; with GPUs "spawn".
    Raises:
        ValueError: fewer GPUs than ranks.
        RankLostError: a rank was killed, or stopped until the others gave it up, after 20 minutes.
        The error of the first rank that failed, after the others have ended.
    """
    if ranks < 1:
        raise argument_error("ranks", "at least 1", ranks)
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise argument_error("ranks", f"at most {torch.cuda.device_count()}, the GPUs of this machine", ranks)
    with tempfile.TemporaryDirectory(prefix="tilewright-ranks-") as name:
        folder = Path(name)
        told = (ranks, device, direct, folder, function, args)
        with ignoring_interrupts():  # else each prints a traceback of its imports
            processes = start_processes(_rank, told, ranks, join=False, daemon=True, start_method=start).processes
        try:
            with ended_with_this(p.pid for p in processes):
                while not any(p.exitcode for p in processes) and (running := [p.sentinel for p in processes if p.exitcode is None]):
                    if not wait(running, TIDYING_S) and (folder / "result").is_file():
                        break  # all ranks are done, and what a GPU's library does at the end of a process takes too long
            failed = sorted((p.exitcode, rank) for rank, p in enumerate(processes) if p.exitcode)
            stopped = [rank for rank, p in enumerate(processes) if failed and _is_stopped(p.pid)]
        finally:
            # Killed, not asked to end: after a failure or Ctrl-C in one rank the others wait for
            # it, on a GPU for ever.
            for p in processes:
                p.kill()
                p.join()
        killed = [rank for code, rank in failed if code == -signal.SIGKILL]
        if killed:  # what the others may have told is a lost connection
            why = "the system does that when its memory is full, and its log says so"
            raise RankLostError(f"rank {killed[0]} was ended by SIGKILL, and so all ranks were: {why}")
        if stopped:  # what the others tell is that they waited too long
            raise RankLostError(f"rank {stopped[0]} was stopped by a signal until the others gave it up, and so all ranks were ended")
        if (folder / "error").is_file():
            raise pickle.loads((folder / "error").read_bytes())
        if failed:
            raise RankLostError(f"rank {failed[0][1]} ended with exit code {failed[0][0]}, and so all ranks were ended")
        return pickle.loads((folder / "result").read_bytes())


def _rank(rank: int, ranks: int, device: str, direct: bool | None, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
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


def _is_stopped(pid: int) -> bool:
    """Whether a process waits for SIGCONT."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or this is no Linux
        return False


def _report(folder: Path, rank: int, error: Exception) -> None:
    """Stores the first failure, which is the cause.

    Failures of other ranks are lost connections.
    """
    told = error if type(error) in _KNOWN else RuntimeError(f"{type(error).__name__}: {error}")
    told.add_note(f"in rank {rank}:\n{''.join(traceback.format_exception(error))}")
    written = folder / f"error.{rank}"
    written.write_bytes(pickle.dumps(told))
    with contextlib.suppress(FileExistsError):
        (folder / "error").hardlink_to(written)
