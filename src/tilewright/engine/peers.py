"""What a decode step exchanges with GPUs whose memory it can access, each in one small launch.

Each rank publishes its words in a mailbox of every other rank and polls its own mailbox. Mailbox
words are those of the megakernel (mega/words.py): a value and its epoch. So they cross the link
once, and no flag follows them.

All ranks create the same exchanges and call them in the same order, on one stream.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import Bound, Device, Launch, next_pow2
from .peer_kernels import peer_gather_kernel, peer_sum_kernel

MOST_RANKS = 8
# At most 128 blocks, so that all are resident, with at least two words for each thread.
MOST_BLOCKS, FEWEST_WORDS, WARPS = 128, 256, 4
GATHERED_WORDS = 1024  # of a tile
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the kernels' dtypes, in their order

MAILBOX = ("mail", "epochs", "others")
SUM = ("y", *MAILBOX)
GATHER = ("part", "whole", *MAILBOX)


def fits(y: Tensor, ranks: int) -> bool:
    """Whether the kernels can exchange y: contiguous, rows of whole words, a dtype that they
    know.
    """
    return y.dtype in DTYPES and y.is_contiguous() and y.shape[-1] * y.itemsize % 4 == 0 and 1 < ranks <= MOST_RANKS


def sum_launch(y: Tensor, rank: int, ranks: int) -> Launch:
    words = y.nbytes // 4
    tile = max(FEWEST_WORDS, next_pow2(-(-words // MOST_BLOCKS)))
    constants = {"rank": rank, "ranks": ranks, "tile": tile, "dtype": DTYPES.index(y.dtype)}
    return Launch(peer_sum_kernel, (-(-words // tile),), constants, num_worker_warps=WARPS, pdl=True)


def gathered_tiles(part: Tensor) -> int:
    """Tiles of a rank's rows, none of which hold words of two."""
    rows, cols = part.shape
    return rows * -(-cols * part.itemsize // (4 * GATHERED_WORDS))


def gather_launch(part: Tensor, rank: int, ranks: int) -> Launch:
    blocks = min(MOST_BLOCKS, gathered_tiles(part))
    constants = {"rank": rank, "ranks": ranks, "tile": GATHERED_WORDS, "blocks": blocks}
    return Launch(peer_gather_kernel, (blocks,), constants, num_worker_warps=WARPS, pdl=True)


@dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
    """Of one exchange: what the others send here, the epochs of its blocks, the others' mailboxes.

    handle: keeps these mapped.
    """

    mail: Tensor
    epochs: Tensor
    others: tuple[Tensor, ...]
    handle: Any

    @staticmethod
    def of(launch: Launch, tiles: int, device: torch.device, process_group: Any) -> "Mailbox":
        """For so many tiles of each rank.

        process_group: NCCL, with 2 to 8 ranks on this host whose GPUs can access each other's
            memory.
        """
        import torch.distributed._symmetric_memory as symmetric

        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        shape = (2, ranks, tiles * launch.constants["tile"])
        mail = symmetric.empty(shape, dtype=torch.int64, device=device).zero_()
        handle = symmetric.rendezvous(mail, process_group.group_name)
        torch.cuda.synchronize(device)
        dist.barrier(process_group)  # until then, another rank's mailbox may not be zeroed
        others = tuple(handle.get_buffer(other, shape, torch.int64) for other in range(ranks) if other != rank)
        return Mailbox(mail, torch.zeros(launch.grid, dtype=torch.int32, device=device), others, handle)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.mail, self.epochs, self.others


def words_of(x: Tensor) -> Tensor:
    """The 32-bit words of rows, int32."""
    return x.view(torch.int32)


class PeerSum:
    """A callable that replaces y by the sum of all ranks' y, added in rank order, so that all get
    equal bits.

    y: this rank's term, on its GPU; `fits(y)` is true.
    """

    def __init__(self, y: Tensor, process_group: Any) -> None:
        launch = sum_launch(y, dist.get_rank(process_group), dist.get_world_size(process_group))
        (tiles,) = launch.grid
        self._mailbox = Mailbox.of(launch, tiles, y.device, process_group)
        self._launch = Bound([launch], SUM, Device.of(y))

    def __call__(self, y: Tensor) -> None:
        self._launch.run(words_of(y.view(-1)), *self._mailbox.arguments)


class PeerGather:
    """A callable that puts the ranks' rows side by side.

    part: [rows, cols] of this rank, on its GPU; `fits(part)` is true.
    """

    def __init__(self, part: Tensor, process_group: Any) -> None:
        launch = gather_launch(part, dist.get_rank(process_group), dist.get_world_size(process_group))
        self._mailbox = Mailbox.of(launch, gathered_tiles(part), part.device, process_group)
        self._launch = Bound([launch], GATHER, Device.of(part))

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        """whole: [rows, cols of all ranks], contiguous."""
        ranks = whole.shape[1] // part.shape[1]
        self._launch.run(words_of(part), words_of(whole).unflatten(1, (ranks, -1)), *self._mailbox.arguments)
