"""The sum of a decode step over GPUs that reach each other's memory: one small launch.

Each rank pushes its term into a mailbox of every other rank, polls its own, and adds the terms in
the order of the ranks, so that all get equal bits. Mailbox words are those of the megakernel
(mega/words.py): a value with its epoch, so a term crosses the link once, with no flag behind it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import Bound, Device, Launch, next_pow2
from .peer_kernels import peer_sum_kernel

MOST_RANKS = 8
# Words of a block: at most 128 blocks, which all run at once, and two words a thread.
MOST_BLOCKS, FEWEST_WORDS, WARPS = 128, 256, 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # those of the kernel, in order
ARGUMENTS = ("y", "mail", "epochs", "others")


def fits(y: Tensor, ranks: int) -> bool:
    """Whether y is whole words, of a dtype that the kernel adds."""
    return y.dtype in DTYPES and y.is_contiguous() and y.nbytes % 4 == 0 and 1 < ranks <= MOST_RANKS


def launch_of(y: Tensor, rank: int, ranks: int) -> Launch:
    words = y.nbytes // 4
    tile = max(FEWEST_WORDS, next_pow2(-(-words // MOST_BLOCKS)))
    constants = {"rank": rank, "ranks": ranks, "tile": tile, "dtype": DTYPES.index(y.dtype)}
    return Launch(peer_sum_kernel, (-(-words // tile),), constants, num_worker_warps=WARPS, pdl=True)


class PeerSum:
    """Called, it makes y the sum of all ranks' y.

    The ranks make the same sums, and call them in the same order on one stream.

    y: of this rank, on its GPU; it `fits`.
    process_group: 2 to 8 ranks of this host, whose GPUs reach each other's memory; NCCL.
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
        dist.barrier(process_group)  # before it, a mailbox may not be empty yet
        others = tuple(self._handle.get_buffer(other, shape, torch.int64) for other in range(ranks) if other != rank)
        self._boxes = mail, torch.zeros(blocks, dtype=torch.int32, device=y.device), others
        self._launch = Bound([launch], ARGUMENTS, Device.of(y))

    def __call__(self, y: Tensor) -> None:
        self._launch.run(y.view(-1).view(torch.int32), *self._boxes)
