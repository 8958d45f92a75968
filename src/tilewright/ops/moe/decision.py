"""What `moe` decides from (Problem) and what it decides (Config), and the launches that follow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from ..mma_tiles import loads_wide
from ..scaling import GROUP, Scaling, random_codes, scale_shapes
from .kernels import moe_few_kernel, moe_kernel
from .lists import moe_count_kernel, moe_permute_kernel, moe_quantize_kernel, moe_sum_kernel
from .one import moe_one_down_kernel, moe_one_up_kernel

E4M3 = torch.float8_e4m3fn
MOST_FEW = 64  # tokens that the kernels for few of them take at once
MAP_WIDTH = 128  # panels that a block writes at once
MOST_CONFIGS = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """scaling: of the weights; NONE for weights in x's dtype, else e4m3. bias, alpha, limit, up_offset: as `moe` has them; limit 0 for none.

    only, foreign: of `inputs` alone: the experts that tokens go to (all of them if empty), and how many of each token's choices are another
    rank's, with ids outside of 0 to experts - 1.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int
    dtype: torch.dtype = torch.bfloat16
    scaling: Scaling = Scaling.NONE
    shared: int = 0
    bias: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    up_offset: float = 0.0
    only: tuple[int, ...] = ()
    foreign: int = 0

    @property
    def weight_dtype(self) -> torch.dtype:
        return E4M3 if self.scaling else self.dtype

    @property
    def activation(self) -> tuple[float, float, float]:
        return self.alpha, self.limit, self.up_offset

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def cost(self) -> Cost:
        each = 3 * self.hidden * self.inter
        distinct, pairs = _used(self)
        distinct, pairs = distinct + self.shared, pairs + self.tokens * self.shared
        read = distinct * each * self.weight_dtype.itemsize
        return Cost(read + 2 * self.tokens * self.hidden * self.dtype.itemsize, 2 * pairs * each)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        weights = torch.rand(self.tokens, self.top_k, device=device) + 0.1
        scales: dict[str, Tensor | None] = {"scale_gate_up": None, "scale_down": None}
        shapes = {"gate_up": (self.experts, 2 * self.inter, self.hidden), "down": (self.experts, self.hidden, self.inter)}
        for name, (_, n, k) in shapes.items():
            if self.scaling:
                shape = scale_shapes(self.scaling, 1, n, k, batch_a=1, batch_b=self.experts)[1]
                scales[f"scale_{name}"] = torch.exp2(torch.rand(shape, device=device) - 1) * k**-0.5
        return {
            "x": torch.randn(self.tokens, self.hidden, dtype=self.dtype, device=device),
            **{name: self._matrices(shape, device) for name, shape in shapes.items()},
            "weights": weights / weights.sum(-1, keepdim=True),
            "ids": _routed(self).to(device),
            **scales,
            **(self._biases(device) if self.bias else {}),
            "alpha": self.alpha,
            "limit": self.limit or None,
            "up_offset": self.up_offset,
            **(self._shared(device) if self.shared else {}),
        }

    def _biases(self, device: torch.device) -> dict[str, Tensor]:
        shapes = {"bias_gate_up": (self.experts, 2 * self.inter), "bias_down": (self.experts, self.hidden)}
        return {name: torch.randn(shape, dtype=self.dtype, device=device) for name, shape in shapes.items()}

    def _shared(self, device: torch.device) -> dict[str, Tensor]:
        """As one MLP's matrices hold several experts: rows of gate and up that take turns, columns of one expert behind those of another."""
        shared, wide = self.shared, self.shared * self.inter
        gate_up = torch.randn(wide, 2, self.hidden, dtype=self.dtype, device=device).mul_(self.hidden**-0.5)
        down = torch.randn(self.hidden, wide, dtype=self.dtype, device=device).mul_(self.inter**-0.5)
        return {
            "shared_gate_up": gate_up.view(shared, self.inter, 2, self.hidden).transpose(1, 2),
            "shared_down": down.view(self.hidden, shared, self.inter).transpose(0, 1),
        }

    def _matrices(self, shape: tuple[int, int, int], device: torch.device) -> Tensor:
        if self.scaling:
            return torch.cat([random_codes((1, *shape[1:]), E4M3, device) for _ in range(shape[0])])
        return torch.randn(shape, dtype=self.dtype, device=device).mul_(shape[-1] ** -0.5)


def _routed(p: Problem) -> Tensor:
    """int32 [tokens, top_k] on the CPU: distinct experts for each token, the same on every run; twice the same only if `only` has too few."""
    generator = torch.Generator().manual_seed(p.tokens * 1000 + p.experts)
    among = torch.tensor(p.only or range(p.experts), dtype=torch.int32)
    order = torch.rand(p.tokens, len(among), generator=generator).argsort(-1)
    ids = among[order[:, torch.arange(p.top_k) % len(among)]]
    if p.foreign:
        ids[:, : p.foreign] = torch.where(ids[:, : p.foreign] % 2 == 0, -1 - ids[:, : p.foreign], p.experts + ids[:, : p.foreign])
    return ids


@lru_cache(maxsize=1024)
def _used(p: Problem) -> tuple[int, int]:
    """How many experts tokens go to, and how many rows they have together."""
    ids = _routed(p)
    known = ids[(ids >= 0) & (ids < p.experts)]
    return int(known.unique().numel()), int(known.numel())


@dataclass(frozen=True, slots=True)
class Product:
    """How one of the two products is computed.

    tile_n, tile_k: of one step, powers of two; the first product has a tile of gate and one of up, tile_n columns each.
    group: panels in a band of the tile order (L2 reuse).
    persistent: blocks that fit on the device at once walk over the tiles; else there is a block for each that there could be.
    store_tma: let the TMA unit write the result.
    scales_ahead: of a single token's first product with block scales: fetch a step's scales during the step before.
    latency, num_ctas, occupancy, num_worker_warps: compiler hints.
    """

    tile_n: int
    tile_k: int
    group: int = 8
    persistent: bool = False
    store_tma: bool = True
    scales_ahead: bool = False
    latency: int = 5
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute it.

    tile_m: rows of a panel, a power of two; with few at least the tokens.
    up, down: the two products.
    few: no lists; every chosen expert's weights meet all tokens. For a single token the second product adds up the experts as well.
    weights_first: the weights' rows are on the long side of the MMA; always so with few of two tokens or more.
    quantized: with 8-bit weights, activations become 8-bit codes too; else the weights are widened on the way to the MMA.
    """

    tile_m: int
    up: Product
    down: Product
    few: bool = False
    weights_first: bool = False
    quantized: bool = False


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grids and constants of all launches, in order."""
    return _many_plan(p, c, device) if not c.few else _one_plan(p, c, device) if p.tokens == 1 else _few_plan(p, c, device)


def _sum_plan(p: Problem, device: Device) -> Plan:
    tile_n = next_pow2(p.hidden) if device.is_cpu or p.hidden <= 512 else 512 if p.tokens < 2 * device.sms else 1024
    return Plan(moe_sum_kernel, (p.tokens, -(-p.hidden // tile_n)), (p.top_k, p.hidden, tile_n, 8), num_worker_warps=4, early=True)


def _one_plan(p: Problem, c: Config, device: Device) -> Plan:
    def sizes(how: Product) -> tuple[int, ...]:
        return (how.tile_n, how.tile_k, int(p.scaling))

    def hints(how: Product) -> dict[str, Any]:
        return {"num_ctas": how.num_ctas, "occupancy": how.occupancy, "num_worker_warps": how.num_worker_warps}

    columns = (p.top_k, p.shared, next_pow2(p.top_k), *sizes(c.down), c.down.latency, p.bias)
    down = Plan(moe_one_down_kernel, (-(-p.hidden // c.down.tile_n),), columns, early=True, **hints(c.down))
    slots = p.top_k + p.shared
    h = (((slots, p.inter), p.dtype),)
    walk = (p.top_k, p.shared, next_pow2(p.top_k), c.up.persistent)
    constants = (*sizes(c.up), *walk, c.up.latency, c.up.scales_ahead, p.bias, *p.activation)
    tiles = -(-p.inter // c.up.tile_n)
    grid = (min(slots * tiles, device.sms * (c.up.occupancy or 1)), 1) if c.up.persistent else (tiles, slots)
    # Blocks that walk fill an SM each: they may be placed early.
    return Plan(moe_one_up_kernel, grid, constants, workspace=h, then=down, early=True, **hints(c.up))


def _few_plan(p: Problem, c: Config, device: Device) -> Plan:
    def product(n: int, parts: int, how: Product, then: Plan, workspace: tuple = ()) -> Plan:
        constants = (p.top_k, c.tile_m, how.tile_n, how.tile_k, parts, next_pow2(p.pairs), int(p.scaling), how.latency, p.bias, *p.activation)
        grid = (-(-n // how.tile_n), p.pairs)
        return Plan(moe_few_kernel, grid, constants, how.num_ctas, how.occupancy, how.num_worker_warps, workspace, then, early=True)

    rows, h, y = ((p.pairs,), torch.int32), ((p.pairs, c.tile_m, p.inter), p.dtype), ((p.pairs, c.tile_m, p.hidden), p.dtype)
    return product(p.inter, 2, c.up, product(p.hidden, 1, c.down, _sum_plan(p, device)), (rows, h, y))


def _many_plan(p: Problem, c: Config, device: Device) -> Plan:
    panels = p.pairs // c.tile_m + min(p.experts, p.pairs)  # that there could be, whoever chooses what
    rows = panels * c.tile_m

    def product(n: int, parts: int, how: Product, then: Plan) -> Plan:
        tiles = panels * -(-n // how.tile_n)
        blocks = min(tiles, max(1, device.sms * (how.occupancy or 1) // (how.num_ctas or 1))) if how.persistent else tiles
        sizes = (c.tile_m, how.tile_n, how.tile_k, parts, how.group)
        constants = (*sizes, c.weights_first, int(p.scaling), c.quantized, how.persistent, how.store_tma, how.latency, p.bias, *p.activation)
        return Plan(moe_kernel, (blocks,), constants, how.num_ctas, how.occupancy, how.num_worker_warps, then=then)

    then = product(p.hidden, 1, c.down, _sum_plan(p, device))
    if c.quantized:
        tile_m, tile_n = (min(c.tile_m, 16), GROUP) if not device.is_cpu else (c.tile_m, GROUP)
        strips = (panels * (c.tile_m // tile_m), -(-p.inter // tile_n))
        then = Plan(moe_quantize_kernel, strips, (p.inter, c.tile_m, tile_m, tile_n), num_worker_warps=4, then=then)
    then = product(p.inter, 2, c.up, then)
    # A width that divides the rows of common models: the parts of a padded tile would be moved like data.
    copied = next_pow2(p.hidden) if device.is_cpu else max(GROUP, min(p.hidden & -p.hidden, 4096))
    tiles = (c.tile_m, next_pow2(p.experts), next_pow2(p.top_k), max(GROUP, copied), MAP_WIDTH)
    grid = (max(p.tokens, p.experts),)
    then = Plan(moe_permute_kernel, grid, (p.top_k, p.hidden, c.quantized, *tiles), num_worker_warps=4, then=then)
    ints = tuple(((n,), torch.int32) for n in (p.experts, p.pairs, p.pairs, 1 + panels))
    wide = (((rows, p.hidden), p.dtype), ((rows, p.inter), p.dtype))
    codes: tuple = ()
    if c.quantized:
        codes = tuple(t for n in (p.hidden, p.inter) for t in (((rows, n), E4M3), ((-(-n // GROUP), rows), torch.float32)))
    # Longer steps than 1024 ids are no faster, as a block has one row of threads for them.
    counting = min(next_pow2(p.pairs), 1 << 16 if device.is_cpu else 4096)
    warps = 8 if counting > 1024 else 4
    return Plan(moe_count_kernel, (p.experts,), (counting,), num_worker_warps=warps, workspace=(*ints, *wide, *codes), then=then)


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing on `device`, the one for an untuned call first; all are legal."""
    if p.scaling and not device.has_fp8:
        return []
    if device.is_cpu:
        return list(dict.fromkeys(_cpu_configs(p)))
    few = list(_few_configs(p, device))
    many = list(_many_configs(p, device))
    ordered = few if p.shared else (*few, *many) if p.tokens <= 16 else (*many, *few)
    return list(dict.fromkeys(ordered))[:MOST_CONFIGS]


def _cpu_configs(p: Problem) -> Iterator[Config]:
    """Few, large tiles: each step of the interpreter is a numpy call."""
    deep = GROUP if p.scaling is Scaling.BLOCK else 1024
    wide = GROUP if p.scaling is Scaling.BLOCK else 512

    def product(n: int, k: int) -> Product:
        return Product(min(wide, next_pow2(n)), min(deep, next_pow2(k)) if p.scaling is not Scaling.BLOCK else GROUP)

    up, down = product(p.inter, p.hidden), product(p.hidden, p.inter)
    if p.tokens == 1:
        yield Config(1, up, down, few=True)
        narrow = up if p.scaling is Scaling.BLOCK else replace(up, tile_n=min(16, up.tile_n))
        yield Config(1, replace(narrow, persistent=True), replace(down, tile_k=min(16, down.tile_k)) if p.shared else down, few=True)
        if p.shared:
            return
    elif p.tokens <= 16:
        yield Config(next_pow2(p.tokens), up, down, few=True)
    rows = next_pow2(-(-p.pairs // p.experts))
    yield Config(min(128, max(2, rows)), up, down)
    yield Config(8, replace(up, persistent=True, group=2), down, weights_first=True)
    if p.scaling:
        groups = Config(16, replace(up, tile_k=GROUP), replace(down, tile_k=GROUP, persistent=True), quantized=True)
        yield groups


def _few_configs(p: Problem, device: Device) -> Iterator[Config]:
    """Bound by reading the weights: as many loads in flight as fit."""
    if p.tokens > MOST_FEW:
        return
    if p.tokens == 1:
        for up, down in _vector_shapes(p, device):
            yield Config(1, up, down, few=True)
        return
    tile_m = max(_least_rows(device), next_pow2(p.tokens))
    ups, downs = _reading(p, device, 2), _reading(p, device, 1)
    for up in ups:
        yield Config(tile_m, up, downs[0], few=True, weights_first=True)
    for down in downs[1:]:
        yield Config(tile_m, ups[0], down, few=True, weights_first=True)


def _least_rows(device: Device) -> int:
    """Columns of the smallest MMA; with 8 of them tileiras 13.4 multiplies some shapes on the CUDA cores of sm_80, and spills."""
    return 16 if device.arch == "sm_80" else 8


def _reading(p: Problem, device: Device, parts: int) -> list[Product]:
    """Products with the weights first: `parts` times tile_n rows of them."""
    if not loads_wide(device, p.weight_dtype, p.hidden, p.inter):
        return [Product(32 // parts, GROUP if p.scaling is Scaling.BLOCK else 64, latency=1, store_tma=False)]
    large = device.arch in ("sm_90", "sm_100", "sm_103")
    if p.scaling is Scaling.BLOCK:
        shapes = [(64, 128, 2, 4), (128, 128, 2, 4), (128, 128, 1, 8)]
        if device.arch == "sm_90":  # 77 us in place of 122 with two blocks an SM (4 tokens of DeepSeek-V2-Lite, H200); fails to compile on sm_100
            shapes.insert(0, (64, 128, 4, 4))
    elif p.scaling:
        shapes = [(64, 256, 2, 4), (64, 128, 2, 4), (128, 128, 2, 4)]
        if large:
            shapes.insert(1, (64, 512, 1, 4))
    elif large:
        shapes = [(64, 256, 2, 4), (64, 512, 1, 4), (64, 256, 1, 4), (64, 128, 2, 4), (128, 128, 2, 4), (128, 256, 1, 8)]
    else:
        shapes = [(64, 128, 2, 4), (64, 64, 2, 4), (32, 128, 2, 4)]
    return _products(shapes, parts, device)


def _vector_shapes(p: Problem, device: Device) -> Iterator[tuple[Product, Product]]:
    """The products of a single token, as (rows, tile_k, occupancy, warps) of each part: rows such that all SMs have as many blocks."""
    if not loads_wide(device, p.weight_dtype, p.hidden, p.inter):
        narrow = Product(8, GROUP, latency=1, store_tma=False)
        yield narrow, narrow
        return
    if device.arch != "sm_90":
        ups, downs = [(16, 128, 2, 4), (8, 256, 2, 4)], [(16, 128, 2, 4), (8, 256, 2, 4)]
    else:
        ups, downs = [(32, 128, 2, 4), (16, 128, 3, 4), (16, 256, 2, 4), (8, 512, 2, 4)], [(8, 512, 2, 4), (16, 256, 2, 4), (16, 512, 1, 4)]

        def idle(rows: int, occupancy: int) -> float:
            blocks, slots = (p.top_k + p.shared) * -(-p.inter // rows), device.sms * occupancy
            return -(-blocks // slots) * slots / blocks

        ups.sort(key=lambda shape: (round(idle(shape[0], shape[2]), 1), -shape[0]))
        if p.hidden > 16 * device.sms:
            downs = [downs[1], downs[0], downs[2]]
    pairs = [(up, downs[0]) for up in ups] + [(ups[0], down) for down in downs[1:]]
    found = list(zip(_products([up for up, _ in pairs], 1, device), _products([down for _, down in pairs], 1, device), strict=True))
    if p.scaling is Scaling.BLOCK:
        yield from ((replace(up, scales_ahead=True), down) for up, down in found)
        if device.arch == "sm_90":
            direct = [(8, 512, 2, 4), (8, 256, 2, 4), (8, 512, 1, 4), (16, 512, 1, 4)]
            yield from ((up, found[0][1]) for up in _products(direct, 1, device))
    elif device.arch == "sm_90" and not p.scaling and not p.bias:
        # Walking, a block an SM: the next tile's loads come while one ends. With biases it spills (16 bytes of stack, tileiras 13.4).
        walking = [replace(up, persistent=True) for up in _products([(32, 128, 1, 8), (16, 256, 1, 8)], 1, device)]
        # The wide one is 1.6 us faster than blocks that come and go, of the 27 us of DeepSeek-V2-Lite (H200), where its last round is no problem.
        first = [up for up in walking if idle(up.tile_n, 1) <= 1.15][:1]
        yield from ((up, found[0][1]) for up in first)
        yield from found
        yield from ((up, found[0][1]) for up in walking if up not in first)
    else:
        yield from found


def _products(shapes: list[tuple[int, int, int, int]], parts: int, device: Device) -> list[Product]:
    """From (rows of weights, tile_k, occupancy, num_worker_warps)."""
    hopper = device.arch == "sm_90"
    latency = 8 if device.arch in ("sm_90", "sm_100", "sm_103") else 3
    return [
        Product(n // parts, k, occupancy=occupancy, latency=latency, store_tma=False, num_worker_warps=warps if hopper else None)
        for n, k, occupancy, warps in shapes
    ]


def _many_configs(p: Problem, device: Device) -> Iterator[Config]:
    """Rows of an expert on average decide: below about 48 reading the weights counts, above it the MMAs."""
    rows = p.pairs / p.experts
    tall = [config for config in _tall_configs(p, device) if config.tile_m <= max(64, 2 * rows)]
    short = list(_short_configs(p, device)) if rows <= 256 else []
    yield from (*short, *tall) if rows <= (20 if p.scaling else 48) else (*tall, *short)


def _short_configs(p: Problem, device: Device) -> Iterator[Config]:
    ups, downs = _reading(p, device, 2), _reading(p, device, 1)
    rows = next_pow2(-(-p.pairs * 3 // (2 * p.experts)))  # half of the experts have more than the average
    for tile_m in dict.fromkeys(max(_least_rows(device), min(64, r)) for r in (rows, 2 * rows, rows // 2)):
        # With 64 rows of x the MMAs count too: 128 rows of weights beside them.
        pairs = sorted(zip(ups, downs, strict=True), key=lambda pair: tile_m == 64 and pair[1].tile_n != 128)
        for up, down in pairs:
            yield Config(tile_m, up, down, weights_first=True)


def _tall_configs(p: Problem, device: Device) -> Iterator[Config]:
    if not loads_wide(device, p.weight_dtype, p.hidden, p.inter):
        deep = GROUP if p.scaling is Scaling.BLOCK else 32
        narrow = Product(32, deep, latency=1, store_tma=False)
        yield Config(64, narrow, replace(narrow, tile_n=64), quantized=bool(p.scaling) and deep == GROUP)
        return
    if p.scaling:
        large = device.arch in ("sm_90", "sm_100", "sm_103")
        for tile_m, n, own_warps in ((128, 128, 8), (64, 128, 4), (128, 64, 8)) if large else ((64, 128, 4), (64, 64, 4)):
            # With latency 8 the compiler keeps six steps in flight on sm_90, with any other two.
            how = Product(n, GROUP, latency=8 if device.arch == "sm_90" else 3, num_worker_warps=own_warps if device.arch == "sm_90" else None)
            yield Config(tile_m, replace(how, tile_n=n // 2), how, quantized=True)
        return
    for tile_m, n, k, ctas, warps, latency in _MMA[device.arch]:
        if p.bias and tile_m * n == 256 * 256:
            continue  # the accumulator begins with the biases, and of these 48 bytes spill (sm_100)
        how = Product(n, k, latency=latency, num_ctas=ctas, num_worker_warps=warps)
        if device.arch == "sm_90" and tile_m > 64:  # walking over lower ones it waits for each MMA in turn
            walking = replace(how, persistent=True, occupancy=1)
            yield Config(tile_m, replace(walking, tile_n=n // 2), walking)
        yield Config(tile_m, replace(how, tile_n=n // 2), how)


# tile_m, columns of the accumulator, tile_k, num_ctas, num_worker_warps, latency
_Shapes = tuple[tuple[int, int, int, int | None, int | None, int], ...]
_HOPPER: _Shapes = ((128, 128, 64, 1, 4, 5), (128, 256, 64, 1, 8, 5), (256, 128, 64, 1, 8, 5), (64, 256, 64, 1, 8, 5), (64, 128, 64, 1, 4, 5))
_BLACKWELL: _Shapes = ((256, 256, 64, 2, None, 5), (128, 256, 64, None, None, 5), (128, 128, 64, None, None, 5), (64, 128, 64, None, None, 5))
_SMALL: _Shapes = ((64, 128, 64, None, None, 3), (128, 64, 64, None, None, 3), (128, 128, 32, None, None, 3), (64, 64, 64, None, None, 3))
_MMA = {"sm_80": _SMALL, "sm_90": _HOPPER, "sm_100": _BLACKWELL, "sm_103": _BLACKWELL, "sm_120": _SMALL, "sm_121": _SMALL}
