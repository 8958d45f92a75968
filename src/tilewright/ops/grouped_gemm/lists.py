"""`grouped_gemm` on Python lists: products that share nothing but their dtype and layout, in one launch.

Nothing is concatenated. The host, which knows every shape, lists the tiles of all products and copies that list to the device; the kernel takes
the lists of tensors as they are and looks up each tile's operands. Copying makes it a form for outside of graph capture only.
"""

from collections.abc import Sequence

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Device, Plan, launch, must
from ..mma_tiles import Tile, cpu_tiles, loads_wide, run_us, tiles_for
from ..scaling import BLOCK, GROUP, ROW, TENSOR, ZERO, Scaling, add_scaled, block_scales, group_scales, row_scales, scale_view, scaled


@ct.kernel
def grouped_gemm_list_kernel(
    tiles,
    a_list,
    b_list,
    scale_a_list,
    scale_b_list,
    out_list,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TRANS_B: ct.Constant[bool],
    SCALING: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """One tile a block. tiles: int32 [tiles, 3], of each its product, row and column. The lists: a [m, k], b [k, n] or [n, k], out [m, n].

    scale_a_list, scale_b_list: [1, groups, rows] as ops/scaling.py makes them, read only if SCALING asks for them.
    """
    own = ct.bid(0)
    which, tile_m, tile_n = ct.gather(tiles, (own, 0)), ct.gather(tiles, (own, 1)), ct.gather(tiles, (own, 2))
    a, b, out = a_list[which], b_list[which], out_list[which]
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for step in range(ct.cdiv(a.shape[1], TILE_K)):
        x = ct.load(a, (tile_m, step), (TILE_M, TILE_K), padding_mode=ZERO, latency=LATENCY)
        if TRANS_B:
            w = ct.load(b, (tile_n, step), (TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY).transpose()
        else:
            w = ct.load(b, (step, tile_n), (TILE_K, TILE_N), padding_mode=ZERO, latency=LATENCY)
        if SCALING == BLOCK:
            group = step * TILE_K // GROUP
            rows = group_scales(scale_a_list[which], 0, group, tile_m, TILE_M, LATENCY)
            acc = add_scaled(acc, x, w, rows, block_scales(scale_b_list[which], 0, group, tile_n, TILE_N, LATENCY))
        else:
            acc = ct.mma(x, w, acc)
    if SCALING == ROW or SCALING == TENSOR:
        rows = row_scales(scale_a_list[which], 0, tile_m, TILE_M, SCALING)
        acc = scaled(acc, rows, row_scales(scale_b_list[which], 0, tile_n, TILE_N, SCALING))
    ct.store(out, (tile_m, tile_n), acc.astype(out.dtype))


def list_plan(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, trans_b: bool, scaling: Scaling, device: Device) -> Plan:
    """The launch for products of these (m, n, k): the tile whose rounds cost least."""

    def count(tile: Tile) -> int:
        return sum(-(-m // tile.tile_m) * -(-n // tile.tile_n) for m, n, _ in shapes)

    rows, cols, depth = (max(shape[axis] for shape in shapes) for axis in range(3))
    if device.is_cpu:
        tile = cpu_tiles(rows, cols, depth, scaling)[0]
    else:
        wide = all(loads_wide(device, dtype, k, k if trans_b else n) for _, n, k in shapes)
        fitting = tiles_for(device, dtype, scaling, k_major=trans_b, wide_loads=wide)
        tile = min(fitting, key=lambda t: run_us(t, count(t), depth, dtype, scaling, device))
    constants = (tile.tile_m, tile.tile_n, tile.tile_k, trans_b, int(scaling), tile.latency)
    return Plan(grouped_gemm_list_kernel, (count(tile),), constants, tile.num_ctas, tile.occupancy, tile.num_worker_warps)


def tile_list(shapes: Sequence[tuple[int, int, int]], tile_m: int, tile_n: int, device: torch.device) -> Tensor:
    """int32 [tiles, 3]: product, row and column of each tile, product by product."""
    parts = []
    for which, (m, n, _) in enumerate(shapes):
        rows, cols = torch.arange(-(-m // tile_m), dtype=torch.int32), torch.arange(-(-n // tile_n), dtype=torch.int32)
        grid = torch.cartesian_prod(torch.tensor([which], dtype=torch.int32), cols, rows)
        parts.append(grid[:, [0, 2, 1]])
    return torch.cat(parts).to(device)


def launch_list(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: tuple[Sequence[Tensor], Sequence[Tensor]] | None,
    out: Sequence[Tensor],
    trans_b: bool,
    scaling: Scaling,
) -> None:
    """All products, none of them empty, in one launch."""
    if a[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise must("grouped_gemm_list", "called outside of graph capture: it copies a list of tiles from the host", "a call under capture")
    shapes = [(*o.shape, x.shape[1]) for x, o in zip(a, out, strict=True)]
    plan = list_plan(shapes, a[0].dtype, trans_b, scaling, Device.of(a[0]))
    tiles = tile_list(shapes, plan.constants[0], plan.constants[1], a[0].device)
    # Without scales the kernel does not touch them; the operands stand in.
    views = ([scale_view(s, scaling, False) for s in each] for each in scales) if scales else (list(a), list(b))
    launch(plan, tiles, list(a), list(b), *views, list(out))
