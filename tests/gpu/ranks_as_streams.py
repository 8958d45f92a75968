"""What ranks exchange, with the ranks as streams of one GPU: their kernels run side by side and
wait for each other's words, as they do on several GPUs. A process of its own, which
test_peers_gpu.py starts and ends: kernels that are not run side by side wait for ever.
"""

from typing import Any

import torch

from tilewright.engine.peers import GATHER, SUM, gather_launch, gathered_tiles, sum_launch, words_of
from tilewright.launch import Bound, Device, Launch

CALLS = 7  # both slots, more than once
SUMS = [(2, torch.bfloat16, (1, 4096)), (2, torch.bfloat16, (16, 3584)), (4, torch.float16, (3, 2880)), (3, torch.float32, (5, 1024))]
GATHERS = [(2, (16, 76032)), (4, (3, 38016)), (2, (1, 130))]


def exchange(launches: list[Launch], names: tuple[str, ...], tiles: int, given: list[list[tuple[Any, ...]]]) -> None:
    """Runs the calls of each rank on a stream of its own.

    tiles: of a rank in a mailbox. given: of each rank, what its calls take in turn.
    """
    device, ranks, (blocks,) = given[0][0][0].device, len(launches), launches[0].grid
    mails = torch.zeros(ranks, 2, ranks, tiles * launches[0].constants["tile"], dtype=torch.int64, device=device)
    epochs = torch.zeros(ranks, blocks, dtype=torch.int32, device=device)
    boxes = [(mails[rank], epochs[rank], tuple(mails[other] for other in range(ranks) if other != rank)) for rank in range(ranks)]
    bounds = [Bound([launch], names, Device.of(mails)) for launch in launches]
    # A kernel is compiled and loaded when it is first launched, which may wait for those that run.
    # So each runs once alone, with all that it waits for in its mailbox. Arrays of all calls are
    # aligned alike, so there is no other binary.
    for bound, box, calls in zip(bounds, boxes, given, strict=True):
        mails[:, 1] = 1 << 32
        bound.run(*(x.clone() for x in calls[0]), *box)
    mails.zero_()
    epochs.zero_()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(device) for _ in launches]
    for call in zip(*given, strict=True):
        for bound, box, stream, values in zip(bounds, boxes, streams, call, strict=True):
            with torch.cuda.stream(stream):
                bound.run(*values, *box)
        # A rank's next launches would be resident too, and leave no room for the other ranks.
        torch.cuda.synchronize()


def sums(gpu: torch.device, ranks: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    ys = [[torch.randn(shape, device=gpu).to(dtype) for _ in range(CALLS)] for _ in range(ranks)]
    totals = [sum(y.float() for y in call).to(dtype) for call in zip(*ys, strict=True)]
    launches = [sum_launch(ys[0][0], rank, ranks) for rank in range(ranks)]
    exchange(launches, SUM, launches[0].grid[0], [[(words_of(y.view(-1)),) for y in mine] for mine in ys])
    for mine in ys:
        for y, total in zip(mine, totals, strict=True):
            assert torch.equal(y, total), f"the sum of {ranks} ranks, {dtype}, {shape}"


def gathers(gpu: torch.device, ranks: int, shape: tuple[int, int]) -> None:
    rows, cols = shape
    parts = [[torch.randn(shape, device=gpu).to(torch.bfloat16) for _ in range(CALLS)] for _ in range(ranks)]
    wholes = [[torch.empty(rows, ranks, cols, dtype=torch.bfloat16, device=gpu) for _ in range(CALLS)] for _ in range(ranks)]
    given = [[(words_of(part), words_of(whole)) for part, whole in zip(*each, strict=True)] for each in zip(parts, wholes, strict=True)]
    exchange([gather_launch(parts[0][0], rank, ranks) for rank in range(ranks)], GATHER, gathered_tiles(parts[0][0]), given)
    for mine in wholes:
        for whole, call in zip(mine, zip(*parts, strict=True), strict=True):
            assert torch.equal(whole, torch.stack(call, 1)), f"the rows of {ranks} ranks, {shape}"


def main() -> None:
    gpu = torch.device("cuda", 0)
    with torch.inference_mode():
        for case in SUMS:
            sums(gpu, *case)
        for of in GATHERS:
            gathers(gpu, *of)


if __name__ == "__main__":
    main()
