"""What `moe` decides from (Problem) and what it decides (Config), and the launches that follow."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2
from ..common.expert_ids import routed, used
from ..common.expert_lists import list_launches, moe_quantize_kernel, sum_launch
from ..common.gemm_choices import Gemm, Tile
from ..common.scaling import GROUP, Scaling, random_codes, scale_shapes
from .kernels import moe_few_kernel, moe_kernel
from .one import moe_one_down_kernel, moe_one_up_kernel

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    scaling: of the weights; NONE for weights in x's dtype, else e4m3.
    bias, alpha, limit, up_offset: as `moe` has them; limit 0 for none.
    only, foreign: of `inputs` alone: the experts that tokens go to (all of them if empty), and how
        many of each token's choices are another rank's, with ids outside of 0 to experts - 1.
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
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def most_panels(self, tile_m: int) -> int:
        """Panels of tile_m rows that there could be, whoever chooses what."""
        return self.pairs // tile_m + min(self.experts, self.pairs)

    def loads_wide(self, device: Device) -> bool:
        """Whether rows of the weights can be read 16 bytes at a time."""
        sizes = self.hidden, self.inter
        return all(Gemm(1, 1, k, self.weight_dtype, 0).loads_wide(device) for k in sizes)

    @property
    def _choice(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        return self.tokens, self.experts, self.top_k, self.foreign, self.only

    def cost(self) -> Cost:
        each = 3 * self.hidden * self.inter
        distinct, pairs = used(*self._choice)
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
            "ids": routed(*self._choice).to(device),
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
        """As one MLP's matrices hold several experts: rows of gate and up that take turns, columns
        of one expert behind those of another.
        """
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


# Tiles of shared experts' weights that a block of one token's products loads before the launch in
# front has ended: two launches of DeepSeek-V2-Lite's layer take 43.6 us with none, 41.9 with these,
# a whole step 1.94 ms and 1.83 (H200, 2026-11-30). With 8 and 6 a step takes 2.20: the blocks take
# the SMs' room too early.
UP_AHEAD, DOWN_AHEAD = 4, 4


@dataclass(frozen=True, slots=True)
class Product:
    """How one of the two products is computed.

    tile_n, tile_k: of one step, powers of two; the first product has a tile of gate and one of up,
        tile_n columns each.
    group: panels in a band of the tile order (L2 reuse).
    persistent: as many blocks as the device holds at once take tile after tile; else there is a
        block for each tile that there could be.
    store_tma: let the TMA unit write the result.
    scales_ahead: of a single token's first product with block scales: fetch a step's scales during
        the step before.
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

    def resident(self, device: Device) -> int:
        """Blocks that the device holds at once."""
        return max(1, device.sms * (self.occupancy or 1) // (self.num_ctas or 1))

    def tile(self, tile_m: int, parts: int) -> Tile:
        """The tile of a block, the columns of all parts together."""
        return Tile(
            tile_m,
            parts * self.tile_n,
            self.tile_k,
            self.group,
            persistent=self.persistent,
            latency=self.latency,
            num_ctas=self.num_ctas,
            occupancy=self.occupancy or 1,
            num_worker_warps=self.num_worker_warps,
        )


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute it.

    tile_m: rows of a panel, a power of two; with few at least the tokens.
    up, down: the two products.
    few: no lists; every chosen expert's weights meet all tokens. For a single token the second
        product adds up the experts as well.
    swap_ab: the weights' rows are on the long side of the MMA; always so with few of two tokens or
        more.
    quantized: with 8-bit weights, activations become 8-bit codes too; else the weights are widened
        on the way to the MMA.
    """

    tile_m: int
    up: Product
    down: Product
    few: bool = False
    swap_ab: bool = False
    quantized: bool = False


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """All launches, in order."""
    return _many_plan(p, c, device) if not c.few else _one_plan(p, c, device) if p.tokens == 1 else _few_plan(p, c, device)


def _sources(p: Problem, c: Config, part: str, **others: str) -> dict[str, Any]:
    """What a product of `part` ("gate_up" or "down") takes for its parameters, and which of them it
    leaves untouched.
    """
    renames = {"w": part, "scale_w": f"scale_{part}", "bias": f"bias_{part}", **others}
    used = {"scale_w": bool(p.scaling), "bias": p.bias, "shared": p.shared > 0, "scale_x": c.quantized}
    unused = tuple(name for name in renames if not used.get(name, True))
    return {"renames": {name: source for name, source in renames.items() if name not in unused}, "unused": unused}


def _one_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    constants = {"scaling": int(p.scaling), "tile_p": next_pow2(p.top_k), "add_bias": p.bias}
    slots, tiles = p.top_k + p.shared, -(-p.inter // c.up.tile_n)
    of_up = {**constants, "ahead": min(UP_AHEAD, -(-p.hidden // c.up.tile_k))}
    of_down = {**constants, "ahead": min(DOWN_AHEAD // max(1, p.shared), -(-p.inter // c.down.tile_k))}
    grid = (min(slots * tiles, device.sms * (c.up.occupancy or 1)), 1) if c.up.persistent else (tiles, slots)
    # Persistent blocks fill an SM each, so PDL does them no harm.
    scratch, columns = {"h": ((slots, p.inter), p.dtype)}, -(-p.hidden // c.down.tile_n)
    return (
        Launch.of(moe_one_up_kernel, grid, p, c.up, of_up, pdl=True, scratch=scratch, **_sources(p, c, "gate_up", shared="shared_gate_up")),
        Launch.of(moe_one_down_kernel, (columns,), p, c.down, of_down, pdl=True, **_sources(p, c, "down", shared="shared_down")),
    )


def _few_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    def product(n: int, parts: int, how: Product, scratch: dict[str, Any], **sources: str) -> Launch:
        tile = {"tile_m": c.tile_m, "tile_p": next_pow2(p.pairs)}
        constants = {**tile, "parts": parts, "scaling": int(p.scaling), "add_bias": p.bias}
        grid = (-(-n // how.tile_n), p.pairs)
        return Launch.of(moe_few_kernel, grid, p, how, constants, pdl=True, scratch=scratch, **_sources(p, c, **sources))

    rows, h, y = ((p.pairs,), torch.int32), ((p.pairs, c.tile_m, p.inter), p.dtype), ((p.pairs, c.tile_m, p.hidden), p.dtype)
    flat = {"rows_of_y": ("y", (p.pairs * c.tile_m, p.hidden), (p.hidden, 1))}
    return (
        product(p.inter, 2, c.up, {"rows": rows, "h": h}, part="gate_up", x="batch", out="h"),
        product(p.hidden, 1, c.down, {"y": y}, part="down", x="h", out="y"),
        sum_launch(p, device, views=flat, renames={"y": "rows_of_y"}),
    )


def _many_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    panels = p.most_panels(c.tile_m)
    rows = panels * c.tile_m

    def codes(name: str, cols: int) -> dict[str, Any]:
        return {f"{name}_codes": ((rows, cols), E4M3), f"{name}_scales": ((-(-cols // GROUP), rows), torch.float32)} if c.quantized else {}

    def product(n: int, parts: int, how: Product, scratch: dict[str, Any], **sources: str) -> Launch:
        tiles = panels * -(-n // how.tile_n)
        blocks = min(tiles, how.resident(device)) if how.persistent else tiles
        constants = {
            "tile_m": c.tile_m,
            "parts": parts,
            "group_m": how.group,
            "swap_ab": c.swap_ab,
            "scaling": int(p.scaling),
            "quantized": c.quantized,
            "add_bias": p.bias,
        }
        return Launch.of(moe_kernel, (blocks,), p, how, constants, scratch=scratch, **_sources(p, c, **sources))

    # The rows of the second product go where those of the first came from, unless these are codes.
    sorted_x, h = ("x_codes", "h_codes") if c.quantized else ("y", "h")
    launches = [
        *list_launches(p, c.tile_m, device, codes("x", p.hidden)),
        product(p.inter, 2, c.up, {"h": ((rows, p.inter), p.dtype)}, part="gate_up", x=sorted_x, scale_x="x_scales", out="h"),
    ]
    if c.quantized:
        tile_m = c.tile_m if device.is_cpu else min(c.tile_m, 16)
        constants = {"cols": p.inter, "panel": c.tile_m, "tile_m": tile_m, "tile_n": GROUP}
        grid, renames = (panels * (c.tile_m // tile_m), -(-p.inter // GROUP)), {"codes": "h_codes", "scale": "h_scales"}
        launches.append(Launch(moe_quantize_kernel, grid, constants, num_worker_warps=4, scratch=codes("h", p.inter), renames=renames))
    return *launches, product(p.hidden, 1, c.down, {}, part="down", x=h, scale_x="h_scales", out="y"), sum_launch(p, device)
