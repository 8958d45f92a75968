"""Which configs of `moe` may be worth timing, which of them the kernels can run, and what each asks
of the machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...launch import Device, next_pow2
from ...select import Choices, Work
from ..common import groups
from ..common.gemm_candidates import tiles_of
from ..common.gemm_choices import Gemm, Tile
from ..common.groups import expected_panels
from ..common.rows import grid_fits
from ..common.scaling import GROUP, Scaling
from .candidates import tables
from .decision import E4M3, Config, Problem, Product

MOST_FEW = 64  # tokens that the kernels for few of them take at once
MOST_SHORT = 256  # rows of an expert on average up to which the weights may be on the long side of the MMA


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """One token on the CUDA cores; few tokens, all with each chosen expert; panels of rows."""
    if device.is_cpu:
        yield from _cpu_configs(p)
        return
    table = tables(p.scaling, p.loads_wide(device), device)
    if p.tokens == 1:
        yield from (Config(1, up, down, few=True) for up, down in product(*(_products(table[f"vector_{part}"], 1) for part in ("up", "down"))))
    ups, downs = (_products(table["reading"], parts) for parts in (2, 1))
    # With 8 columns of an MMA tileiras 13.4 multiplies some shapes on the CUDA cores of sm_80, and
    # spills.
    least = 16 if device.arch == "sm_80" else 8
    if 1 < p.tokens <= MOST_FEW:
        yield from (Config(max(least, next_pow2(p.tokens)), up, down, few=True, swap_ab=True) for up, down in product(ups, downs))
    rows = p.pairs / p.experts
    if rows <= MOST_SHORT:
        about = next_pow2(int(1.5 * rows))
        for tile_m in dict.fromkeys(max(least, min(64, r)) for r in (about, 2 * about, about // 2)):
            yield from (Config(tile_m, up, down, swap_ab=True) for up, down in zip(ups, downs, strict=True))
    for (tile, how), up, down in zip(tiles_of(table["tall"], Tile), *(_products(table["tall"], parts) for parts in (2, 1)), strict=True):
        if tile.tile_m <= max(64, 2 * rows):
            c = Config(tile.tile_m, up, down, quantized=bool(p.scaling) and up.tile_k == GROUP)
            yield c
            if "p" in how or not _fits_grid(p, c):
                yield replace(c, up=replace(up, persistent=True, occupancy=1), down=replace(down, persistent=True, occupancy=1))


def _products(text: str, parts: int) -> list[Product]:
    """How one of the two products may be computed; parts: 2 for the first."""
    return [_product(tile, how, parts) for tile, how in tiles_of(text, Tile)]


def _product(tile: Tile, how: str, parts: int) -> Product:
    tall, narrow = tile.tile_m > 1, tile.latency == 1
    return Product(
        tile.tile_n // parts,
        tile.tile_k,
        persistent="p" in how and not tall,
        store_tma=tall and not narrow,
        scales_ahead="a" in how,
        latency=tile.latency,
        num_ctas=tile.num_ctas if tall and not narrow and tile.tile_k < GROUP else None,
        occupancy=None if tall or narrow else tile.occupancy,
        num_worker_warps=tile.num_worker_warps,
    )


def _cpu_configs(p: Problem) -> Iterator[Config]:
    """Few, large tiles: each step of the interpreter is a numpy call."""
    blocks = p.scaling is Scaling.BLOCK

    def how(n: int, k: int) -> Product:
        return Product(min(GROUP if blocks else 512, next_pow2(n)), GROUP if blocks else min(1024, next_pow2(k)))

    up, down = how(p.inter, p.hidden), how(p.hidden, p.inter)
    if p.tokens == 1:
        yield Config(1, up, down, few=True)
        narrow = up if blocks else replace(up, tile_n=min(16, up.tile_n))
        yield Config(1, replace(narrow, persistent=True), replace(down, tile_k=min(16, down.tile_k)) if p.shared else down, few=True)
        if p.shared:
            return
    elif p.tokens <= 16:
        yield Config(next_pow2(p.tokens), up, down, few=True)
    rows = next_pow2(-(-p.pairs // p.experts))
    yield Config(min(128, max(2, rows)), up, down)
    yield Config(8, replace(up, persistent=True, group=2), down, swap_ab=True)
    if p.scaling:
        yield Config(16, replace(up, tile_k=GROUP), replace(down, tile_k=GROUP, persistent=True), quantized=True)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """8-bit weights need tensor cores for them, shared experts a single token; persistent blocks of
    one token spill with biases. One tile holds all of a few tokens. Scales of blocks: a tile lies
    in one block, a step in one group of k, or has whole groups where the token is single.
    """
    one = c.few and p.tokens == 1
    if (p.scaling and not device.has_fp8) or (p.shared and not one) or (one and p.bias and c.up.persistent and not device.is_cpu):
        return False
    if c.few and (p.tokens > c.tile_m or c.quantized):
        return False
    if c.quantized and not (p.scaling and c.up.tile_k == c.down.tile_k == GROUP):
        return False
    blocks = p.scaling is Scaling.BLOCK
    return _fits_grid(p, c) and not (
        blocks and any(GROUP % how.tile_n or (how.tile_k % GROUP if one else GROUP % how.tile_k) for how in (c.up, c.down))
    )


def _fits_grid(p: Problem, c: Config) -> bool:
    panels = p.most_panels(c.tile_m)
    return c.few or all(how.persistent or grid_fits(panels * -(-n // how.tile_n)) for n, how in ((p.inter, c.up), (p.hidden, c.down)))


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """The two products, and the launches around them; tokens choose at random."""
    one, rows = c.few and p.tokens == 1, p.pairs / p.experts
    used = p.shared + p.experts * (1 - (1 - min(1.0, p.top_k / p.experts)) ** p.tokens)
    panels, most = (used, p.pairs + p.shared) if c.few else (p.experts * expected_panels(rows, rows**0.5, c.tile_m), p.most_panels(c.tile_m))
    held = (p.pairs + p.shared) * (c.tile_m if c.few else 1)  # rows between the launches
    h, y = (held * n * p.dtype.itemsize for n in (p.inter, p.hidden))

    def matrices(parts: int, n: int, k: int, how: Product, left: float) -> tuple[Work, ...]:
        """left: bytes that the launch before left."""
        scaling = Scaling.BLOCK if c.quantized or p.scaling is Scaling.BLOCK else Scaling.NONE
        read = int(used * parts * n * k * p.weight_dtype.itemsize)
        g = Gemm(max(1, round(p.pairs / used)), parts * n, k, E4M3 if c.quantized else p.dtype, read, batch=round(used), scaling=scaling)
        tile = replace(how.tile(c.tile_m, parts), swap_ab=c.swap_ab)
        found, *empty = groups.work(g, tile, panels, most, device)
        if one:  # a block of the second product adds up all experts
            experts = round(used) if parts == 1 else 1
            area = how.tile_k * tile.tile_n
            found = replace(found, kinds=("dot",), flops=2.0 * area, blocks=found.blocks // experts, steps=found.steps * experts)
        fill = how.tile_k * (c.tile_m * g.dtype.itemsize + tile.tile_n * p.weight_dtype.itemsize)
        kinds = (*found.kinds, *(("widened",) if p.scaling and not c.quantized else ()))
        return replace(found, kinds=kinds, fill=fill, partial=2 * left), *empty

    small = Work(1, resident=8 * device.sms, per_sm=8, chain=1.0)
    products = matrices(2, p.inter, p.hidden, c.up, 0.0 if c.few else y)
    if c.quantized:
        products += (replace(small, blocks=max(1, round(panels * c.tile_m / 16)), partial=3.0 * h),)
    products += matrices(1, p.hidden, p.inter, c.down, h)
    if one:
        return products
    products += (replace(small, blocks=p.tokens, partial=2.0 * y),)
    if c.few:
        return products
    count = replace(small, blocks=p.experts, steps=-(-p.pairs // 4096), partial=8.0 * p.pairs)
    permute = replace(small, blocks=max(p.tokens, p.experts), chain=2.0, dram=2.0 * y, partial=8.0 * p.pairs)
    return count, permute, *products


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about: weights, form, and both tiles."""
    form = "one" if c.few and p.tokens == 1 else "few" if c.few else "short" if c.swap_ab else f"tall {c.tile_m}"
    both = (f"{h.tile_n}x{h.tile_k} {h.occupancy or 0}{h.num_worker_warps or 0}{'p' * h.persistent}{'a' * h.scales_ahead}" for h in (c.up, c.down))
    return f"{form} {p.scaling.name}{'+' * p.bias} {' '.join(both)}"


CHOICES = Choices("moe", candidates, legal, work, family)
space = CHOICES.space
