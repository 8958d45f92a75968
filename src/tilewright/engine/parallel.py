"""Several processes as one engine: the calls of a step that join their parts.

Every rank runs the same calls on its part of the weights (models/shard.py). The calls here join the
parts: a sum after the attention and after the MLP of each layer, and a gather of the logits. Then
every rank has all logits and chooses the same token. A CUDA graph can capture these calls like all
others.

Sums go through NCCL (gloo on CPUs). Those of a decode step have a few hundred kilobytes at most, so
their time is waiting. If the GPUs reach each other's memory, each rank gets all parts itself and
adds them in the order of the ranks, in one launch; another gathers the logits (peers.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import argument_error
from ..models.shard import Shard
from .peers import PeerGather, PeerSum, fits
from .program import Call, Emit, StepBuffers

# Larger sums go through NCCL, because its ranks send less. The limit is an estimate, not measured:
# each of 4 GPUs sends 3 x 1 MiB of words, in 8 us at 400 GB/s, as long as NCCL waits.
MOST_DIRECT_BYTES = 512 * 1024
MOST_GATHERED_BYTES = 4 * 1024 * 1024  # of a rank's logits, likewise: twice as many bytes on the link as NCCL
# torch 2.13 has another name for it and warns of the old one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Group:
    """The processes that share one model.

    All make the same calls in the same order.

    process_group: of torch.distributed, nccl on GPUs, gloo on CPUs. Its ranks are the model's
        shards.
    direct: sum in decode steps by writing into the other GPUs' memory.
    """

    process_group: Any
    direct: bool

    @staticmethod
    def of(process_group: Any = None, *, direct: bool | None = None) -> "Group":
        """The group of processes of torch.distributed.

        Args:
            process_group: None for all processes.
            direct: None: if all ranks are on this host and their GPUs reach each other's memory.
        Raises: ValueError: torch.distributed is not initialised, or `direct` without NCCL.
        """
        if not dist.is_initialized():
            raise argument_error("torch.distributed", "initialised (init_process_group) before Group.of", "not initialised")
        found = process_group if process_group is not None else dist.group.WORLD
        nccl = "nccl" in dist.get_backend(found)
        if direct and not nccl:
            raise argument_error("direct", "False without NCCL", True)
        return Group(found, nccl and _all_reach_each_other(dist.get_world_size(found)) if direct is None else direct)

    @property
    def shard(self) -> Shard:
        """This process's part of the model."""
        return Shard(dist.get_rank(self.process_group), dist.get_world_size(self.process_group))

    def sum_of(self, buffers: StepBuffers, y: Tensor) -> Callable[[Tensor], None]:
        """What, called with y, makes it the sum of all ranks' y, equal bits on each."""
        if self.direct and buffers.q_len == 1 and y.nbytes <= MOST_DIRECT_BYTES and fits(y, self.shard.ranks):
            return PeerSum(y, self.process_group)
        return self._sum

    def gather_calls(self, name: str, buffers: StepBuffers, part: Tensor, whole: Tensor) -> Emit:
        """whole [rows, columns of all ranks]: the parts [rows, columns] side by side."""
        ranks = self.shard.ranks
        if self.direct and buffers.q_len == 1 and part.nbytes <= MOST_GATHERED_BYTES and fits(part, ranks):
            yield Call(f"{name}.gather", PeerGather(part, self.process_group), (part, whole))
            return
        gathered = buffers.tensor(f"{name}.gathered", ranks, *part.shape, dtype=part.dtype)
        yield Call(f"{name}.gather", self._gather, (part, gathered))
        yield Call(f"{name}.arrange", _arrange, (gathered.transpose(0, 1), whole.unflatten(1, (ranks, -1))))

    def _sum(self, y: Tensor) -> None:
        dist.all_reduce(y, group=self.process_group)

    def _gather(self, part: Tensor, gathered: Tensor) -> None:
        _all_gather(gathered.flatten(0, 1), part, group=self.process_group)


def _arrange(parts: Tensor, whole: Tensor) -> None:
    whole.copy_(parts)


def _all_reach_each_other(ranks: int) -> bool:
    gpus = range(torch.cuda.device_count())
    return ranks <= len(gpus) and all(a == b or torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus)
