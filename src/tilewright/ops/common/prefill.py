"""Configs of `attention` and `mla`, which share tiles and loops: which there are, what is legal,
what a launch asks of a machine, and the launch.

Where a function takes a problem p, it is either op's: their Problems have the same names.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...launch import Device, Launch, next_pow2
from ...select import Work
from .attention_tiles import persistent_grid, transpose_kernel

# tile_m, tile_n, tail_n, parts, latency, persistent, num_ctas, occupancy, num_worker_warps
Row = tuple[int, int, int, int, int, bool, int | None, int | None, int | None]
ALIKE = {"sm_103": "sm_100", "sm_121": "sm_120"}  # architectures that take the rows of a near one
RESCALE = 1 / 8  # time of scaling a running sum, in exponentials
TURNS = "sm_90"  # reads 8-bit values key after key: by rows they pass through registers and shared memory in each step
TRANSPOSED_KEYS = 128  # of a block that transposes values
MOST_SPLITS = 64  # KV splits
LEAST_STEPS = 2  # of a KV split: shorter ones are not worth their block
SAMPLES = 32  # sequences, and tiles of queries of one, whose keys are counted; those between are like them


@dataclass(frozen=True, slots=True)
class Config:
    """How one block goes through the keys.

    tile_m, tile_n: queries of a block, keys of a step; powers of two.
    parts: column parts in which a step's weights are made; 2 halves the registers that they hold,
        which lets the compiler overlap the softmax of one step with the products of another.
    latency: prefetch hint of the k and v loads, 1 to 10.
    persistent: a block takes one tile of queries after the other; else it has one.
    tf32x3: of `attention`: fp32 products on tensor cores, as three TF32 products each.
    num_ctas, occupancy, num_worker_warps: compiler hints.
    pad_values: of `attention`: a v_dim that is no power of two is padded to one; otherwise its sums
        are two tiles, as head_dim always is: 96 = 64 + 32.
    tail_n: keys of a step that a mask touches, a divisor of tile_n; 0 for tile_n. Shorter ones
        compute fewer scores that nobody sees.
    transpose_values: of 8 bits that lie by rows: a launch in front writes them with their keys
        last, as Hopper's tensor cores read them. Otherwise each step turns its own in registers.
    """

    tile_m: int
    tile_n: int
    parts: int = 1
    latency: int = 2
    persistent: bool = False
    tf32x3: bool = False
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None
    pad_values: bool = True
    tail_n: int = 0
    transpose_values: bool = False
    num_kv_splits: int = 1


def least_width(p: Any) -> int:
    """Columns of one step of a product."""
    return 32 if p.scaled else 16


def configs(rows: Iterable[Row], p: Any, device: Device) -> Iterator[Config]:
    """Those of an architecture's rows; on a CPU two, of few and of large tiles. Each with 8-bit
    values as they lie and, where that is by rows, transposed in front. Each in one KV split and, if
    its blocks leave SMs idle, in several.
    """
    for c in _tiles(rows, p, device):
        for way in (c, replace(c, transpose_values=True)) if p.scaled and not p.keys_last else (c,):
            yield way
            yield from _splits(way, p, device)


def _splits(c: Config, p: Any, device: Device) -> Iterator[Config]:
    """A config with KV splits: powers of two, and as many as fill the device once. All lengths up
    to a power of two have the same.
    """
    if not device.is_cpu:
        blocks = -(-p.q_len // c.tile_m) * p.q_heads * p.batch
        most = min(MOST_SPLITS, next_pow2(p.kv_len) // (LEAST_STEPS * c.tile_n), _resident(c, device) // max(1, blocks))
        for n in sorted({1 << i for i in range(1, most.bit_length())} | {max(1, most)} - {1}):
            yield replace(c, num_kv_splits=n)


def _resident(c: Config, device: Device) -> int:
    """Blocks that the device holds at once."""
    return device.sms * (c.occupancy or 1) // (c.num_ctas or 1)


def _tiles(rows: Iterable[Row], p: Any, device: Device) -> Iterator[Config]:
    if device.is_cpu:
        longest_m, longest_n = (max(16, next_pow2(n)) for n in (p.queries, p.kv_len))
        yield Config(min(256, max(64, longest_m)), 512)  # typing costs more than rows that are not there: short prompts share a kernel
        yield Config(
            min(64, longest_m),
            min(128, longest_n),
            parts=2,
            pad_values=False,
            tail_n=min(least_width(p), longest_n),
            num_kv_splits=1 if p.varlen else 2,
        )
        return
    masked = p.causal or p.ragged or p.window is not None
    for tile_m, tile_n, tail_n, parts, latency, persistent, num_ctas, occupancy, warps in rows:
        yield Config(tile_m, tile_n, parts, latency, persistent, False, num_ctas, occupancy, warps, tail_n=tail_n if masked else 0)


def legal(p: Any, c: Config, device: Device) -> bool:
    """Persistent blocks need equal sequences, and KV splits one tile a block. Steps of 256 keys
    leave no register for a mask, a cap or sinks.
    """
    if c.num_kv_splits > 1 and (c.persistent or p.varlen):
        return False
    plain = not (p.ragged or p.window is not None)
    return device.is_cpu or ((plain or not c.persistent) and (c.tile_n < 256 or (plain and p.softcap is None and not p.has_sinks)))


def family(p: Any, c: Config) -> str:
    """Launches that the model errs alike about."""
    mask = "c" * p.causal + "w" * (p.window is not None) + "r" * p.ragged + "s" * (p.softcap is not None)
    options = "p" * c.persistent + "v" * (not c.pad_values) + "t" * c.transpose_values + "s" * (c.num_kv_splits > 1)
    hints = f"{c.num_ctas}{c.occupancy}{c.num_worker_warps}{options}"
    return f"{p.dtype.itemsize}{mask} {next_pow2(p.head_dim)} {c.tile_m}x{c.tile_n}/{c.tail_n} {c.parts}{c.latency}{hints}"


def seen_keys(q_len: int, n: int, tile_m: int, tail_n: int, causal: bool, window: int | None, ahead: int) -> tuple[int, float, int]:
    """Tiles of queries of a sequence, and the keys that the mean and the longest one compute."""
    tiles = -(-q_len // tile_m)
    found = []
    for i in range(0, tiles, max(1, tiles // SAMPLES)):
        first = i * tile_m + n - q_len  # the last key that the first query sees
        end = min(n, max(0, first + tile_m + ahead)) if causal else n
        begin = 0 if window is None else max(0, first - window + 1) // tail_n * tail_n
        found.append(max(0, -(-end // tail_n) * tail_n - begin))
    return tiles, sum(found) / len(found), max(found)


def work(p: Any, c: Config, device: Device, columns: tuple[int, int], kinds: tuple[str, ...], spill: int = 0) -> Work:
    """columns: of k and of v, as they are padded.

    The keys of a step that a mask touches are computed in full, and so is a tile of queries that is
    not full.
    """
    tail_n, lengths = c.tail_n or c.tile_n, p.lengths()
    each = [(*seen_keys(q, n, c.tile_m, tail_n, p.causal, p.window, p.ahead), count) for q, n, count in lengths if count]
    tiles = max(1, sum(count * tiles for tiles, _, _, count in each))
    keys = max(1.0, sum(count * tiles * mean for tiles, mean, _, count in each) / tiles)
    steps = keys / c.tile_n if c.num_kv_splits == 1 else math.ceil(keys / c.tile_n / c.num_kv_splits)
    masked = (p.causal or p.window is not None) * -(-c.tile_m // tail_n)  # steps of a tile of queries, one behind the other
    size, per_sm, ctas = p.dtype.itemsize, c.occupancy or 1, c.num_ctas or 1
    rescales = RESCALE * (2 if size == 1 else 1)  # 8-bit products are added to the sums outside the tensor cores
    if p.scaled and not (p.keys_last or c.transpose_values) and device.arch == TURNS:
        kinds = (*kinds, "turned")
    copied = 2 * math.prod(p.values_shape) * size if c.transpose_values else 0
    if c.num_kv_splits > 1:
        copied += 4 * p.batch * c.num_kv_splits * p.q_heads * p.q_len * (p.values_shape[3] + 2)
    return Work(
        blocks=tiles * p.q_heads * c.num_kv_splits,
        resident=max(1, _resident(c, device)),
        per_sm=per_sm,
        steps=steps + (1.0 if masked else 0.5),  # the first scores and the last sums have nothing beside them
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
        ragged=max(1.0, max(longest for _, _, longest, _ in each) / keys),
        partial=copied,
        spill=spill,
    )


def launch(kernel: Any, p: Any, c: Config, device: Device, given: dict[str, bool], **constants: Any) -> tuple[Launch, ...]:
    """The launches of a config. given: of the arrays that may be absent, which are there.
    constants: those of the op beside what all have.
    """
    tiles, split = -(-p.q_len // c.tile_m), c.num_kv_splits > 1
    grid: tuple[int, ...] = (tiles * c.num_kv_splits, p.q_heads, p.batch)
    if p.varlen:
        grid = p.q_len // c.tile_m + p.batch, p.q_heads  # see packed_tile
    elif c.persistent:
        grid = persistent_grid((tiles, p.q_heads, p.batch), _resident(c, device), p.causal)
    constants |= {
        "keys_last": p.keys_last or c.transpose_values,
        "masked": p.causal or p.ragged or p.window is not None or p.kv_len % c.tile_n != 0,
        "tail_n": c.tail_n or c.tile_n,
        "split_kv": split,
    }
    given = {"lse": p.return_lse and not split, "kv_len": p.has_len, "q_scale": p.scaled, "k_scale": p.scaled, "v_scale": p.scaled} | given
    attend = Launch.of(kernel, grid, p, c, constants, optional=given, renames={"v": "transposed"} if c.transpose_values else {})
    return (_transpose(p), attend) if c.transpose_values else (attend,)


def _transpose(p: Any) -> Launch:
    """Values by rows to `transposed` [batch, kv_heads, v_dim, keys], whose rows begin at multiples
    of 16 bytes; the padding behind the keys is 0.
    """
    batch, heads, keys, dim = p.values_shape
    scratch = {"transposed": ((batch, heads, dim, -(-keys // 16) * 16), p.dtype)}
    constants = {"tile_n": TRANSPOSED_KEYS, "width": max(16, next_pow2(dim))}
    return Launch(transpose_kernel, (-(-keys // TRANSPOSED_KEYS), heads, batch), constants, scratch=scratch)
