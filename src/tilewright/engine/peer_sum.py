"""The sum of a decode step over GPUs that reach each other's memory: one small launch.

Each rank pushes its term into a mailbox of every other rank, polls its own, and adds the terms in
the order of the ranks, so that all get equal bits. Mailbox words are those of the megakernel
(mega/words.py): a value with its epoch, so a term crosses the link once, with no flag behind it.
Where RMSNorm follows, the same launch norms the rows.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import Bound, Device, Launch, next_pow2
from ..ops.rms_norm import rms_norm_out
from .peer_kernels import peer_sum_kernel, peer_sum_norm_kernel
from .program import Call

MOST_RANKS = 8
# Words of a block: at most 128 blocks, which all run at once, and two words a thread.
MOST_BLOCKS, FEWEST_WORDS, WARPS = 128, 256, 4
# Of a row that is normed.
MOST_ROW_WORDS, ROW_WARPS = 4096, 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # those of the kernels, in order
SUM = ("y", "mail", "epochs", "others")
NORM = (*SUM, "x", "weight", "out", "new_residual", "eps", "weight_offset")


def words_of(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def sum_launch(y: Tensor, rank: int, ranks: int) -> Launch:
    words = y.nbytes // 4
    tile = max(FEWEST_WORDS, next_pow2(-(-words // MOST_BLOCKS)))
    constants = {"rank": rank, "ranks": ranks, "tile": tile, "dtype": DTYPES.index(y.dtype)}
    return Launch(peer_sum_kernel, (-(-words // tile),), constants, num_worker_warps=WARPS, pdl=True)


def norm_launch(y: Tensor, rank: int, ranks: int, *, round_before_weight: bool) -> Launch:
    rows, cols = y.shape
    constants = {"round": round_before_weight, "rank": rank, "ranks": ranks, "tile": next_pow2(words_of(y).shape[1])}
    constants |= {"dtype": DTYPES.index(y.dtype), "cols": cols}
    return Launch(peer_sum_norm_kernel, (rows,), constants, num_worker_warps=ROW_WARPS, pdl=True)


def fits(y: Tensor, ranks: int) -> bool:
    """Whether y [rows, cols] is rows of whole words, of dtypes that these kernels add."""
    return y.dtype in DTYPES and y.is_contiguous() and y.shape[-1] * y.itemsize % 4 == 0 and 1 < ranks <= MOST_RANKS


class Mailbox:
    """Memory that the ranks of a group write into, one tile of words for each block and rank.

    Every rank makes the same mailboxes in the same order.
    """

    def __init__(self, launch: Launch, device: torch.device, process_group: Any) -> None:
        import torch.distributed._symmetric_memory as symmetric

        rank, ranks, (blocks,) = launch.constants["rank"], launch.constants["ranks"], launch.grid
        shape = (2, ranks, blocks * launch.constants["tile"])
        self.mail = symmetric.empty(shape, dtype=torch.int64, device=device).zero_()
        self._handle = symmetric.rendezvous(self.mail, process_group.group_name)
        self.epochs = torch.zeros(blocks, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(process_group)  # before it a mailbox may not be empty
        self.others = tuple(self._handle.get_buffer(other, shape, torch.int64) for other in range(ranks) if other != rank)


class PeerSum:
    """Called, it makes y the sum of all ranks' y. They call it in the same order on one stream.

    y: [rows, cols], on this rank's GPU, that `fits`.
    process_group: of ranks of this host whose GPUs reach each other's memory; NCCL.
    """

    def __init__(self, y: Tensor, process_group: Any) -> None:
        self.y, self._group = y, process_group
        self._ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        launch = sum_launch(y, *self._ranks)
        self._box = Mailbox(launch, y.device, process_group)
        self._launch = Bound([launch], SUM, Device.of(y))

    def __call__(self, y: Tensor) -> None:
        self._launch.run(words_of(y.view(-1)), self._box.mail, self._box.epochs, self._box.others)

    @cached_property
    def _row_box(self) -> Mailbox:
        return Mailbox(norm_launch(self.y, *self._ranks, round_before_weight=True), self.y.device, self._group)

    def normed(self, norm: Call) -> Call:
        """One call in place of this one and of a norm behind it, whose residual is y."""
        given, box = norm.arguments, self._row_box
        launch = norm_launch(self.y, *self._ranks, round_before_weight=given["round_before_weight"])
        bound = Bound([launch], NORM, Device.of(self.y))
        x, out, total = (words_of(given[name]) for name in ("x", "out", "new_residual"))
        weight, how = words_of(given["weight"][None]), (given["eps"], given["weight_offset"])
        args = (words_of(self.y), box.mail, box.epochs, box.others, x, weight, out, total, *how)
        return Call(norm.name, bound.run, args)

    def norms(self, call: Call) -> bool:
        """Whether a call is a norm that `normed` takes."""
        if call.op is not rms_norm_out or (residual := call.arguments["residual"]) is None:
            return False
        same = residual.data_ptr() == self.y.data_ptr() and residual.shape == self.y.shape
        rows = [call.arguments[name] for name in ("x", "out", "new_residual", "weight")]
        fit = all(x.is_contiguous() and x.dtype is self.y.dtype for x in rows)
        return same and fit and len(self.y) <= MOST_BLOCKS and words_of(self.y).shape[1] <= MOST_ROW_WORDS


def with_norms(calls: Iterable[Call]) -> list[Call]:
    """A step's calls, with norms computed by the sum in front of them: a launch less."""
    found: list[Call] = []
    for call in calls:
        before = found[-1] if found else None
        if before is not None and isinstance(before.op, PeerSum) and before.op.norms(call):
            found[-1] = before.op.normed(call)
        else:
            found.append(call)
    return found
