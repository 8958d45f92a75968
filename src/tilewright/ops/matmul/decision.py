"""What `matmul` decides from (Problem) and what it decides (Config), and the launches that follow."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...launch import Cost, Device, Plan, next_pow2
from ..early import early
from ..scaling import FP8, Scaling, fast_sum, random_codes, random_scales, scale_shapes
from .fused_kernel import matmul_fused_kernel
from .gathered_kernel import matmul_gathered_kernel
from .kernels import matmul_kernel, matmul_reduce_kernel, matmul_uneven_kernel

REDUCE_TILE = 1024  # elements of the output that one block of the reduce kernel sums
REDUCE_PARTS = 8  # partial tiles that it loads at a time


@dataclass(frozen=True, slots=True)
class Problem:
    """out [m, n] = op(a) [m, k] @ op(b) [k, n], where trans_a, trans_b say that the operand is stored transposed.

    out_dtype: None for the dtype of a, bf16 for 8-bit ones. silu_mul: out has n / 2 columns. Scaling: see ops/scaling.py.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    trans_a: bool = False
    trans_b: bool = True
    bias: bool = False
    tf32: bool = False
    scaling: Scaling = Scaling.NONE
    out_dtype: torch.dtype | None = None
    residual: bool = False
    silu_mul: bool = False
    out_scale: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the output."""
        return self.out_dtype or (torch.bfloat16 if self.dtype in FP8 else self.dtype)

    @property
    def fused(self) -> bool:
        """Whether it takes the kernel with scales and epilogues."""
        return self.dtype in FP8 or self.stored is not self.dtype or self.behind

    @property
    def behind(self) -> bool:
        """Whether more than scales and a bias stands behind the product."""
        return self.residual or self.silu_mul or self.out_scale

    @property
    def fast_acc(self) -> bool:
        return fast_sum(self.dtype, self.stored, self.k)

    def cost(self) -> Cost:
        out = self.m * (self.n // 2 if self.silu_mul else self.n)
        written = out * (2 if self.residual else 1) + (self.n if self.bias else 0)
        size = (self.m * self.k + self.k * self.n) * self.dtype.itemsize + written * self.stored.itemsize
        if self.scaling:
            size += 4 * sum(math.prod(shape) for shape in scale_shapes(self.scaling, self.m, self.n, self.k))
        return Cost(size, 2 * self.m * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> torch.Tensor:
            x = random_codes(shape, self.dtype, device)
            if self.tf32 and device.type != "meta":  # exact in TF32, so that the way an input is rounded is not part of the test
                x = x.view(torch.int32).bitwise_and_(-1 << 13).view(torch.float32)
            return x

        def outer(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=self.stored, device=device)

        options: dict[str, Any] = {}
        if self.scaling:
            shapes = scale_shapes(self.scaling, self.m, self.n, self.k)
            options["scale_a"], options["scale_b"] = (random_scales(shape, device, scaling=self.scaling) for shape in shapes)
        if self.residual:
            options["residual"] = outer(self.m, self.n // 2 if self.silu_mul else self.n)
        if self.silu_mul:
            options["silu_mul"] = True
        if self.out_scale:
            options["out_scale"] = torch.full((), 0.37, device=device)
        if self.out_dtype is not None:
            options["out_dtype"] = self.out_dtype
        return {
            "a": randn(*((self.k, self.m) if self.trans_a else (self.m, self.k))),
            "b": randn(*((self.n, self.k) if self.trans_b else (self.k, self.n))),
            "bias": outer(self.n) if self.bias else None,
            "trans_a": self.trans_a,
            "trans_b": self.trans_b,
            "tf32": self.tf32,
            **options,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute it.

    tile_m, tile_n, tile_k: of one step, powers of two; tile_m counts rows of a, tile_n columns of the output.
    extra_n: columns of a second accumulator beside the first, so that a tile need not be a power of two wide; 0 for none.
    group: tile rows in a band of the tile order (L2 reuse).
    weights_first: b's tile is the first operand of the MMA and the accumulator is transposed: for few rows of a. With extra_n the second
        accumulator then widens tile_m.
    dot: multiply and sum on the CUDA cores instead of the MMA: for very few rows of a, not of 8 bits.
    persistent: blocks that fit on the device at once walk over the tiles; else a block has one tile.
    split: blocks that share each tile of the last, incomplete round; a second launch adds their fp32 partial tiles. 1: no split.
    gathered: the threads copy the operands into shared memory in place of the TMA unit: for rows that begin off multiples of 128 bytes.
    latency, num_ctas, occupancy, num_worker_warps: compiler hints (pipeline depth, cluster size, blocks per SM, warps that compute).
    """

    tile_m: int
    tile_n: int
    tile_k: int
    group: int = 8
    extra_n: int = 0
    weights_first: bool = False
    dot: bool = False
    persistent: bool = False
    split: int = 1
    gathered: bool = False
    latency: int = 5
    num_ctas: int | None = None
    occupancy: int = 1
    num_worker_warps: int | None = None

    def tiles(self, p: Problem) -> int:
        extra_m, extra_n = (self.extra_n, 0) if self.weights_first else (0, self.extra_n)
        return -(-p.m // (self.tile_m + extra_m)) * -(-p.n // (self.tile_n + extra_n))

    def whole(self, p: Problem) -> bool:
        """A block has one row's k at once: its weights can come while the launch before ends."""
        return self.dot and p.m == 1 and self.tile_k >= p.k and p.trans_b and not (p.trans_a or self.persistent or self.split > 1 or p.fused)

    def steps(self, p: Problem) -> int:
        return -(-p.k // self.tile_k)

    def resident(self, device: Device) -> int:
        """Blocks that the device holds at once."""
        return max(1, device.sms * self.occupancy // (self.num_ctas or 1))

    def split_tiles(self, p: Problem, device: Device) -> int:
        """Tiles of the last, incomplete round if they are split, else 0."""
        return 0 if self.persistent or self.parts(p) == 1 else self.tiles(p) % self.resident(device)

    def parts(self, p: Problem) -> int:
        """Blocks for a split tile, none of them without a step."""
        return -(-self.steps(p) // -(-self.steps(p) // self.split))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and constants of the product, and of the sum of partial tiles where there are any. Pure: runs without a GPU."""
    tiles, split_tiles, parts = c.tiles(p), c.split_tiles(p, device), c.parts(p)
    blocks = min(tiles, c.resident(device)) if c.persistent else tiles - split_tiles + split_tiles * parts
    hints: dict[str, Any] = {"num_ctas": c.num_ctas, "occupancy": c.occupancy, "num_worker_warps": c.num_worker_warps}
    if c.extra_n:
        first, second = (c.tile_n, c.tile_m) if c.weights_first else (c.tile_m, c.tile_n)
        tile = (first, second, c.extra_n, c.tile_k, c.group)
        operands = (c.weights_first, p.trans_a, p.trans_b, p.bias, int(p.scaling), p.fast_acc)
        return Plan(matmul_uneven_kernel, (blocks,), (*tile, *operands, c.latency), **hints)
    reduce: Plan | None = None
    workspace: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    if split_tiles:
        height, width = (c.tile_n, c.tile_m) if c.weights_first else (c.tile_m, c.tile_n)
        workspace = (((parts, split_tiles, height, width), torch.float32),)
        rows = min(height, max(1, REDUCE_TILE // width))
        constants = (c.tile_m, c.tile_n, c.group, c.weights_first, rows, min(REDUCE_PARTS, next_pow2(parts)))
        reduce = Plan(matmul_reduce_kernel, (split_tiles, height // rows), constants, occupancy=4, early=True)
    if c.gathered:
        gathered = (c.tile_m, c.tile_n, c.tile_k, c.group, split_tiles > 0, p.bias, c.latency)
        return Plan(matmul_gathered_kernel, (blocks,), gathered, workspace=workspace, then=reduce, **hints)
    begins_early = early(p.m, c.persistent)
    if p.fused:
        # Unchecked loads of scales gain a tenth on 8 warps and lose a fifth on 4 (H200, 2026-11-21, notes/LOG.md).
        unchecked = p.scaling is Scaling.BLOCK and c.num_worker_warps == 8
        even = (unchecked and p.m % c.tile_m == 0, unchecked and p.n % c.tile_n == 0)
        shape = (c.tile_m, c.tile_n, c.tile_k, c.group, p.trans_a, p.trans_b, c.weights_first, c.dot, c.persistent, split_tiles > 0)
        epilogue = (int(p.scaling), p.fast_acc, *even, p.bias, p.residual, p.silu_mul, p.out_scale)
        return Plan(matmul_fused_kernel, (blocks,), (*shape, *epilogue, c.latency), workspace=workspace, then=reduce, early=begins_early, **hints)
    how = (p.trans_a, p.trans_b, c.weights_first, c.dot, c.persistent, split_tiles > 0, c.whole(p), p.bias, p.tf32, c.latency)
    return Plan(
        matmul_kernel,
        (blocks,),
        (c.tile_m, c.tile_n, c.tile_k, c.group, *how),
        workspace=workspace,
        then=reduce,
        early=begins_early,
        **hints,
    )
