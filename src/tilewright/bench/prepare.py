"""Checks cases in several processes and makes all first calls there, before anything is timed.

What compilers made stays in their caches on disk, where the process that times finds it.
"""

from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from .. import ops
from ..launch.parent import spawned_pool
from ..testing import check_op, op_name, seeded_inputs
from ..testing.accuracy import Accuracy
from .measure import Setup, all_peers

Found = list[Accuracy] | AssertionError  # of a check, or what it raised


def prepared(tasks: Iterable[tuple[ModuleType, Any, Any]], setup: Setup, jobs: int) -> dict[tuple[str, Any], Found]:
    """What the checks of problems found, by op and problem, each made with a config, None for that
    of a user's call. Without those that could not be made here, as where several processes need
    more memory than the GPU has.

    Raises: BrokenProcessPool where a process is killed.
    """
    wanted = [(op_name(op), problem, config, setup.device, setup.peers) for op, problem, config in tasks]
    with spawned_pool(jobs) as pool:
        found = list(pool.map(_prepare, *zip(*wanted, strict=True))) if wanted else []
    return {task[:2]: of for task, of in zip(wanted, found, strict=True) if of is not None}


def _prepare(name: str, problem: Any, config: Any, device: torch.device, peers: bool) -> Found | None:
    (op,) = ops.named([name])
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        with torch.inference_mode():
            found = check_op(op, problem, device, config)
            for peer in all_peers(op, seeded_inputs(op, problem, device)) if peers else ():
                with suppress(Exception):  # the process that times tells why this peer is absent
                    peer.call(**seeded_inputs(op, problem, device))
    except AssertionError as error:
        return error
    except Exception:  # whatever it is: the process that times meets it again, and tells
        return None
    finally:
        if on_gpu:
            with suppress(RuntimeError):  # where the GPU is lost to this process
                torch.cuda.empty_cache()
    return found
