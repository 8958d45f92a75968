"""`run_ranks(function, ...)`: one process for each rank, on this host; when one fails or is interrupted, none is left behind."""

import datetime
import pickle
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from ..launch import must
from .parallel import Group

# A rank may load, compile or run the comparison of the command line for so long while the others wait for it.
PATIENCE = datetime.timedelta(minutes=20)


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
        context = start_processes(_rank, (ranks, device, direct, folder, function, args), ranks, join=False, start_method=start)
        try:
            # The others wait for the one that failed, on a GPU without end: they get a moment, not a signal they could answer.
            while not context.join(grace_period=1.0):
                pass
        except ProcessException:
            if (folder / "error").is_file():
                raise pickle.loads((folder / "error").read_bytes()) from None
            raise
        finally:
            for process in context.processes:
                process.kill()  # Ctrl-C: they have had it too; this is for signals sent to us alone
                process.join()
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
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
        dist.barrier()  # none leaves while another still needs it
    except Exception as error:
        _report(folder, error)
        raise
    dist.destroy_process_group()


def _report(folder: Path, error: Exception) -> None:
    """The first failure is the cause: what follows in other ranks is a lost connection."""
    try:
        with (folder / "error").open("xb") as file:
            file.write(pickle.dumps(error))
    except FileExistsError:
        pass
