"""What a launch of `attention` or `mla` asks of a machine: their configs share tiles and loops."""

from typing import Any

from ...launch import Device
from ...select import Work

RESCALE = 1 / 8  # time of scaling a running sum, in exponentials
SAMPLES = 32  # tiles of queries of a sequence whose keys are counted; those between are like them


def seen_keys(q_len: int, n: int, tile_m: int, tail_n: int, causal: bool, window: int | None) -> tuple[int, float, int]:
    """Tiles of queries of a sequence, and the keys that the mean and the longest one compute."""
    tiles = -(-q_len // tile_m)
    found = []
    for i in range(0, tiles, max(1, tiles // SAMPLES)):
        first = i * tile_m + n - q_len  # the last key that the first query sees
        end = min(n, max(0, first + tile_m)) if causal else n
        begin = 0 if window is None else max(0, first - window + 1) // tail_n * tail_n
        found.append(max(0, -(-end // tail_n) * tail_n - begin))
    return tiles, sum(found) / len(found), max(found)


def prefill_work(
    p: Any, c: Any, device: Device, heads: int, columns: tuple[int, int], kinds: tuple[str, ...], window: int | None = None, spill: int = 0
) -> Work:
    """p, c: a Problem and a Config. heads: of the queries. columns: of k and of v, as they are
    padded.

    The keys of a step that a mask touches are computed in full, and so is a tile of queries that is
    not full.
    """
    tail_n, lengths = c.tail_n or c.tile_n, p.lengths()
    each = {pair: seen_keys(pair[0], pair[1], c.tile_m, tail_n, p.causal, window) for pair in set(lengths)}
    tiles = max(1, sum(each[pair][0] for pair in lengths))
    keys = max(1.0, sum(each[pair][0] * each[pair][1] for pair in lengths) / tiles)
    masked = (p.causal or window is not None) * -(-c.tile_m // tail_n)  # steps of a tile of queries, one behind the other
    size, per_sm, ctas = p.dtype.itemsize, c.occupancy or 1, c.num_ctas or 1
    rescales = RESCALE * (2 if size == 1 else 1)  # 8-bit products are added to the sums outside the tensor cores
    return Work(
        blocks=tiles * heads,
        resident=max(1, device.sms * per_sm // ctas),
        per_sm=per_sm,
        steps=keys / c.tile_n + (1.0 if masked else 0.5),  # the first scores and the last sums have nothing beside them
        flops=2 * c.tile_m * c.tile_n * sum(columns) / ctas,
        kinds=kinds,
        serial=1 / c.parts,  # softmax of one part beside the products of the other
        exponentials=c.tile_m * (c.tile_n + rescales * columns[1]) / ctas,
        fill=c.tile_n * sum(columns) * size,
        dram=p.size_bytes(),
        out=c.tile_m * columns[1],
        # Of persistent blocks under a mask nothing is gained: tiles of unlike length in a fixed
        # order.
        persistent=c.persistent and not masked,
        chain=masked * (2 if c.persistent else 1),
        ragged=max(1.0, max(longest for *_, longest in each.values()) / keys),
        spill=spill,
    )
