"""A decode step's sum over GPUs that can access each other's memory, in one small launch.

Each rank publishes its term in a mailbox of every other rank, polls its own mailbox, and adds the
terms in rank order, so that all ranks get equal bits. Mailbox words are those of the megakernel
(mega/words.py): a value and its epoch. So a term crosses the link once, and no flag follows it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import Bound, Device, Launch, next_pow2
from .peer_kernels import peer_sum_kernel

MOST_RANKS = 8
# At most 128 blocks, so that all are resident, with at least two words for each thread.
MOST_BLOCKS, FEWEST_WORDS, WARPS = 128, 256, 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the kernel's dtypes, in its order
ARGUMENTS = ("y", "mail", "epochs", "others")


def fits(y: Tensor, ranks: int) -> bool:
    """Whether the kernel can sum y: contiguous, whole words, a dtype that it knows."""
    return y.dtype in DTYPES and y.is_contiguous() and y.nbytes % 4 == 0 and 1 < ranks <= MOST_RANKS


def launch_of(y: Tensor, rank: int, ranks: int) -> Launch:
    words = y.nbytes // 4
    tile = max(FEWEST_WORDS, next_pow2(-(-words // MOST_BLOCKS)))
    constants = {"rank": rank, "ranks": ranks, "tile": tile, "dtype": DTYPES.index(y.dtype)}
    return Launch(peer_sum_kernel, (-(-words // tile),), constants, num_worker_warps=WARPS, pdl=True)


class PeerSum:
    """A callable that replaces y by the sum of all ranks' y.

    All ranks create the same sums and call them in the same order, on one stream.

    y: this rank's term, on its GPU; `fits(y)` is true.
    process_group: NCCL, with 2 to 8 ranks on this host whose GPUs can access each other's memory.
    """

    def __init__(self, y: Tensor, process_group: Any) -> None:
        import torch.distributed._symmetric_memory as symmetric

        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        launch = launch_of(y, rank, ranks)
        (blocks,) = launch.grid
        shape = (2, ranks, blocks * launch.constants["tile"])
        mail = symmetric.empty(shape, dtype=torch.int64, device=y.device).zero_()
        self._handle = symmetric.rendezvous(mail, process_group.group_name)
        torch.cuda.synchronize(y.device)
        dist.barrier(process_group)  # until then, another rank's mailbox may not be zeroed
        others = tuple(self._handle.get_buffer(other, shape, torch.int64) for other in range(ranks) if other != rank)
        self._boxes = mail, torch.zeros(blocks, dtype=torch.int32, device=y.device), others
        self._launch = Bound([launch], ARGUMENTS, Device.of(y))

    def __call__(self, y: Tensor) -> None:
        self._launch.run(y.view(-1).view(torch.int32), *self._boxes)
