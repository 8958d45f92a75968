"""What `matmul` decides from (Problem) and what it decides (Config), and the launches that
follow.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ...launch import Cost, Device, Launch, usual
from ..common.gemm_choices import Gemm, Split, use_pdl
from ..common.scaling import FAST_SUM, FP8, Scaling, most_fast, random_codes, random_scales, scale_shapes
from .fused_kernel import matmul_fused_kernel
from .kernels import matmul_kernel, matmul_reduce_kernel, matmul_uneven_kernel, matmul_uneven_persistent_kernel
from .moved_kernel import matmul_moved_kernel

REDUCE_TILE, REDUCE_SIDE = 1024, 32  # elements of the output that one block of the reduce kernel sums, and of a side where it transposes


@dataclass(frozen=True, slots=True)
class Problem:
    """out [m, n] = op(a) [m, k] @ op(b) [k, n], where trans_a, trans_b say that the operand is
    stored transposed.

    out_dtype: None for the dtype of a, bf16 for 8-bit ones. silu_mul: out has n / 2 columns.
        Scaling: see ops/common/scaling.py, and `plain_scales` there.
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
    plain_scales: int = 0

    def __post_init__(self) -> None:
        usual(self, out_dtype=torch.bfloat16 if self.dtype in FP8 else self.dtype)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the output."""
        return self.out_dtype or (torch.bfloat16 if self.dtype in FP8 else self.dtype)

    @property
    def fused(self) -> bool:
        """Whether it takes the kernel with scales and epilogues."""
        return self.dtype in FP8 or self.stored is not self.dtype or self.has_epilogue

    @property
    def has_epilogue(self) -> bool:
        """Whether more than scales and a bias stands behind the product."""
        return self.residual or self.silu_mul or self.out_scale

    @property
    @lru_cache(maxsize=64)  # once for all configs of a problem: they are priced one after the other
    def gemm(self) -> Gemm:
        """What it has in common with other products."""
        options: dict[str, Any] = {"tf32": self.tf32, "gated": self.silu_mul, "scaling": self.scaling}
        options["most_fast"] = most_fast(self.dtype, self.stored)
        return Gemm(self.m, self.n, self.k, self.dtype, self.cost().size_bytes, trans_a=self.trans_a, trans_b=self.trans_b, **options)

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
            scales = [random_scales(shape, device, scaling=self.scaling) for shape in shapes]
            options["scale_a"], options["scale_b"] = (x.contiguous() if self.plain_scales > 1 - i else x for i, x in enumerate(scales))
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
class Config(Split):
    """One way to compute it: a tile, and how it is computed.

    dot: multiply and sum on the CUDA cores instead of the MMA: for very few rows of a, not of 8
        bits.
    fast_runs: the tensor core sums 8-bit products, 8192 of k at a time; fp32 adds these sums. For
        bf16 outputs and longer k.
    moved: the last tiles begin earlier, so that they end with the output. Of 16-bit operands, or of
        8-bit ones with k last in both.
    tma_scales: of scales by blocks: 1: TMA brings those of a; 2: those of b too.
    """

    dot: bool = False
    fast_runs: bool = False
    moved: bool = False
    tma_scales: int = 0

    @property
    def form(self) -> str:
        """See Tile."""
        return "dot" if self.dot else "uneven" if self.extra_n else ""

    @property
    def runs(self) -> bool:
        """See Tile."""
        return self.fast_runs

    @property
    def loads(self) -> str:
        """See Tile."""
        return ("", "t", "tt")[self.tma_scales]

    def whole(self, p: Problem) -> bool:
        """A block has one row's k at once: its weights can come while the launch before ends."""
        return self.dot and p.m == 1 and self.tile_k >= p.k and p.trans_b and not (p.trans_a or self.persistent or self.split_k > 1 or p.fused)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """The product, and the sum of partial tiles where there are any."""
    tiles, split_tiles, parts = p.gemm.tiles(c), c.split_tiles(p.gemm, device), c.parts(p.gemm)
    blocks = min(tiles, c.resident(device)) if c.persistent else tiles - split_tiles + split_tiles * parts
    kernel, constants, optional = _product(p, c, split_tiles > 0, p.gemm.fast(c, device))
    pdl = use_pdl(p.gemm, c, device, blocks, parts if split_tiles else 1)
    product = Launch.of(kernel, (blocks,), p, c, constants, optional=optional, pdl=pdl)
    if not split_tiles:
        return (product,)
    tile_m, tile_n = c.tile_shape
    transposed = c.swap_ab != (c.extra_n > 0)  # the uneven side is the rows: the sum loads powers of two of columns
    height, width = (tile_n, tile_m) if transposed else (tile_m, tile_n)
    scratch = {"partial": ((parts, split_tiles, height, width), torch.float32)}
    columns = min(width & -width, REDUCE_SIDE if transposed else REDUCE_TILE)  # long runs for loads, and transposed for the store too
    rows = min(height & -height, REDUCE_TILE // columns)
    shape = {"tile_m": tile_m, "tile_n": tile_n, "group": c.group, "swap_ab": transposed}
    reduce = {**shape, "rows": rows, "columns": columns, "parts": parts}
    return (
        replace(product, scratch=scratch),
        Launch(matmul_reduce_kernel, (split_tiles, height // rows * (width // columns)), reduce, occupancy=4, pdl=True),
    )


def _product(p: Problem, c: Config, split: bool, fast: bool) -> tuple[Any, dict[str, Any], dict[str, bool]]:
    """The product's kernel, its constants, and which of its optional arrays it reads. fast: a
    block's sums of 8-bit products stay in the tensor core.
    """
    given: dict[str, Any] = {"split_k": split}
    used = {"bias": p.bias, "partial": split}
    scaled = {"scale_a": bool(p.scaling), "scale_b": bool(p.scaling), **used}
    first, second = (c.tile_n, c.tile_m) if c.swap_ab else (c.tile_m, c.tile_n)
    sides = {"first": first, "second": second}
    sums = {"scaling": int(p.scaling), "fast_acc": fast}
    run = FAST_SUM // c.tile_k if c.fast_runs else 0
    if c.moved:
        return matmul_moved_kernel, {**sides, **sums, "run": run}, {"bias": p.bias, "scale_a": bool(p.scaling), "scale_b": bool(p.scaling)}
    if c.extra_n:
        if c.persistent:
            return matmul_uneven_persistent_kernel, sides, {"bias": p.bias}
        return matmul_uneven_kernel, {**given, **sides, **sums, "even": p.m % c.tile_m == 0}, scaled
    if not p.fused:
        return matmul_kernel, {**given, "whole": c.whole(p)}, used
    # Unchecked loads of scales gain a tenth on 8 warps and lose a fifth on 4 (H200, 2026-11-21,
    # notes/LOG.md).
    unchecked = p.scaling is Scaling.BLOCK and c.num_worker_warps == 8
    given |= {"even_m": unchecked and p.m % c.tile_m == 0, "even_n": unchecked and p.n % c.tile_n == 0, "group_m": c.group}
    return matmul_fused_kernel, {**given, **sums, "run": run}, {**scaled, "residual": p.residual, "out_scale": p.out_scale}
