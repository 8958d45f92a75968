"""What `matmul` decides from (Problem) and what it decides (Config), and the launches that follow."""

from dataclasses import dataclass
from typing import Any

import torch

from ...launch import Cost, Device, Plan, next_pow2
from .kernels import matmul_kernel, matmul_reduce_kernel, matmul_uneven_kernel

REDUCE_TILE = 1024  # elements of the output that one block of the reduce kernel sums
REDUCE_PARTS = 8  # partial tiles that it loads at a time


@dataclass(frozen=True, slots=True)
class Problem:
    """out [m, n] = op(a) [m, k] @ op(b) [k, n], where trans_a, trans_b say that the operand is stored transposed."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    trans_a: bool = False
    trans_b: bool = True
    bias: bool = False
    tf32: bool = False

    def cost(self) -> Cost:
        elements = self.m * self.k + self.k * self.n + self.m * self.n + (self.n if self.bias else 0)
        return Cost(elements * self.dtype.itemsize, 2 * self.m * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> torch.Tensor:
            x = torch.randn(shape, dtype=self.dtype, device=device)
            if self.tf32 and device.type != "meta":  # exact in TF32, so that the way an input is rounded is not part of the test
                x = x.view(torch.int32).bitwise_and_(-1 << 13).view(torch.float32)
            return x

        return {
            "a": randn(*((self.k, self.m) if self.trans_a else (self.m, self.k))),
            "b": randn(*((self.n, self.k) if self.trans_b else (self.k, self.n))),
            "bias": randn(self.n) if self.bias else None,
            "trans_a": self.trans_a,
            "trans_b": self.trans_b,
            "tf32": self.tf32,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute it.

    tile_m, tile_n, tile_k: of one step, powers of two; tile_m counts rows of a, tile_n columns of the output.
    extra_n: columns of a second accumulator beside the first, so that a tile need not be a power of two wide; 0 for none.
    group: tile rows in a band of the tile order (L2 reuse).
    weights_first: b's tile is the first operand of the MMA and the accumulator is transposed: for few rows of a.
    dot: multiply and sum on the CUDA cores instead of the MMA: for very few rows of a.
    persistent: blocks that fit on the device at once walk over the tiles; else a block has one tile.
    split: blocks that share each tile of the last, incomplete round; a second launch adds their fp32 partial tiles. 1: no split.
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
    latency: int = 5
    num_ctas: int | None = None
    occupancy: int = 1
    num_worker_warps: int | None = None

    def tiles(self, p: Problem) -> int:
        return -(-p.m // self.tile_m) * -(-p.n // (self.tile_n + self.extra_n))

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
        tile = (c.tile_m, c.tile_n, c.extra_n, c.tile_k, c.group)
        return Plan(matmul_uneven_kernel, (blocks,), (*tile, p.trans_a, p.trans_b, p.bias, c.latency), **hints)
    reduce: Plan | None = None
    workspace: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    if split_tiles:
        height, width = (c.tile_n, c.tile_m) if c.weights_first else (c.tile_m, c.tile_n)
        workspace = (((parts, split_tiles, height, width), torch.float32),)
        rows = min(height, max(1, REDUCE_TILE // width))
        constants = (c.tile_m, c.tile_n, c.group, c.weights_first, rows, min(REDUCE_PARTS, next_pow2(parts)))
        reduce = Plan(matmul_reduce_kernel, (split_tiles, height // rows), constants, occupancy=4)
    how = (p.trans_a, p.trans_b, c.weights_first, c.dot, c.persistent, split_tiles > 0, p.bias, p.tf32, c.latency)
    return Plan(
        matmul_kernel,
        (blocks,),
        (c.tile_m, c.tile_n, c.tile_k, c.group, *how),
        workspace=workspace,
        then=reduce,
        **hints,
    )
