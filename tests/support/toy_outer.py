"""An op for tests of the compile report: out = x @ y, in tiles that fit, spill or fail as Config
says. A call asks with its rows rounded up, as others do with a cache's length.
"""

from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from tilewright.launch import Cost, Decision, Device, Launch, next_pow2

SCALE = 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    m: int
    k: int = 64
    dtype: torch.dtype = torch.bfloat16

    def cost(self) -> Cost:
        return Cost(self.m * self.k * self.dtype.itemsize, self.m * self.m * self.k)

    def inputs(self, device: torch.device) -> dict:
        return {"x": torch.empty(self.m, self.k, dtype=self.dtype, device=device)}


@dataclass(frozen=True, slots=True)
class Config:
    tile: int
    tile_k: int = 32
    num_worker_warps: int | None = None


FITS = Config(64)
SPILLS = Config(256, num_worker_warps=4)  # 256 KiB of fp32 accumulator in the registers of four warps
BROKEN = Config(64, tile_k=48)  # tile sizes must be powers of two
ILLEGAL = Config(0)  # the plan itself raises
SPACES = {64: [FITS], 512: [FITS, SPILLS, BROKEN, ILLEGAL], 1024: [SPILLS], 2048: [BROKEN]}


def space(problem: Problem, device: Device) -> list[Config]:
    return SPACES[problem.m]


def plan(problem: Problem, config: Config, device: Device) -> tuple[Launch, ...]:
    blocks = problem.m // config.tile
    constants = {"tile": config.tile, "tile_k": config.tile_k}
    return (Launch(toy_outer_kernel, (blocks, blocks), constants, num_worker_warps=config.num_worker_warps),)


@ct.kernel
def toy_outer_kernel(X, OUT, alpha: float, TILE: ct.Constant[int], TILE_K: ct.Constant[int]):
    acc = ct.zeros((TILE, TILE), dtype=ct.float32)
    for k in range(ct.num_tiles(X, axis=1, shape=(TILE, TILE_K))):
        a = ct.load(X, index=(ct.bid(0), k), shape=(TILE, TILE_K), padding_mode=ct.PaddingMode.ZERO)
        b = ct.load(X, index=(ct.bid(1), k), shape=(TILE, TILE_K), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(a, b.transpose(), acc)
    ct.store(OUT, index=(ct.bid(0), ct.bid(1)), tile=scaled(acc, alpha).astype(OUT.dtype))


def scaled(tile, alpha):
    return tile * alpha * SCALE


DECISION = Decision("toy_outer", problem=Problem, arguments=("x", "out", "alpha"), space=space, plan=plan)


def toy_outer(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[0])
    DECISION.launches(Device.of(x), m=next_pow2(x.shape[0]), k=x.shape[1], dtype=x.dtype).run(x, out, 0.5)
    return out
