"""`grouped_gemm` on Python lists: products that share nothing but their dtype and layout, in one
launch.

Nothing is concatenated. The host, which knows every shape, lists the tiles of all products and
copies that list to the device; the kernel takes the lists of tensors as they are and looks up each
tile's operands. Copying makes it a form for outside of graph capture only.
"""

from collections.abc import Sequence
from dataclasses import replace

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Bound, Device, Launch, argument_error, hints, torch_op
from ...select import rates, us
from ..common.gemm_candidates import cpu_tiles, tables, tiles_of
from ..common.gemm_choices import Gemm, Tile, work
from ..common.scaling import BLOCK, GROUP, ROW, TENSOR, Scaling, add_scaled, block_scales, group_scales, known_scaling, scale_view, scaled
from ..common.tiles import ZERO
from .candidates import TABLES
from .kernels import row_scales


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
    """One tile a block.

    tiles: int32 [tiles, 3], of each its product, row and column.
    a_list, b_list, out_list: a [m, k], b [k, n] or [n, k], out [m, n].
    scale_a_list, scale_b_list: [1, groups, rows] as ops/common/scaling.py makes them, read only if
        SCALING asks for them.
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


def list_plan(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, trans_b: bool, scaling: Scaling, device: Device) -> Launch:
    """The launch for products of these (m, n, k): the tile that costs least, were all of the
    largest rows, columns and k.
    """
    rows, cols, depth = (max(shape[axis] for shape in shapes) for axis in range(3))
    products = [Gemm(rows, n, k, dtype, 0, scaling=scaling, trans_b=trans_b) for _, n, k in shapes]
    least_aligned = min(products, key=lambda g: g.pitch)
    g = replace(least_aligned, n=cols, k=depth)

    def count(tile: Tile) -> int:
        return sum(-(-m // tile.tile_m) * -(-n // tile.tile_n) for m, n, _ in shapes)

    def price(tile: Tile) -> float:
        return us(replace(work(g, tile, device)[0], blocks=count(tile)), rates("grouped_gemm", device))

    if device.is_cpu:
        tile = next(cpu_tiles(g, Tile))
    else:
        tile = min((tile for tile, _ in tiles_of(tables(least_aligned, device, TABLES), Tile) if not tile.swap_ab), key=price)
    constants = {
        "tile_m": tile.tile_m,
        "tile_n": tile.tile_n,
        "tile_k": tile.tile_k,
        "trans_b": trans_b,
        "scaling": int(scaling),
        "latency": tile.latency,
    }
    unscaled = {} if scaling else {"scale_a_list": "a_list", "scale_b_list": "b_list"}  # lists that the kernel does not touch
    return Launch(grouped_gemm_list_kernel, (count(tile),), constants, **hints(tile), renames=unscaled)


def tile_list(shapes: Sequence[tuple[int, int, int]], tile_m: int, tile_n: int, device: torch.device) -> Tensor:
    """int32 [tiles, 3]: product, row and column of each tile, product by product."""
    parts = []
    for which, (m, n, _) in enumerate(shapes):
        rows, cols = torch.arange(-(-m // tile_m), dtype=torch.int32), torch.arange(-(-n // tile_n), dtype=torch.int32)
        grid = torch.cartesian_prod(torch.tensor([which], dtype=torch.int32), cols, rows)
        parts.append(grid[:, [0, 2, 1]])
    return torch.cat(parts).to(device)


@torch_op(mutates=("out",))
def grouped_gemm_list_out(a: list[Tensor], b: list[Tensor], scale_a: list[Tensor], scale_b: list[Tensor], trans_b: bool, out: list[Tensor]) -> None:
    """`grouped_gemm_list` into `out`: all products, none of them empty, in one launch. Without
    scales these lists are empty.
    """
    if a[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise argument_error("grouped_gemm_list", "called outside of graph capture: it copies a list of tiles from the host", "a call under capture")
    shapes = [(*o.shape, x.shape[1]) for x, o in zip(a, out, strict=True)]
    scaling = known_scaling(scale_a[0]) if scale_a else Scaling.NONE
    device = Device.of(a[0])
    launch = list_plan(shapes, a[0].dtype, trans_b, scaling, device)
    tiles = tile_list(shapes, launch.constants["tile_m"], launch.constants["tile_n"], a[0].device)
    views = ([scale_view(scale, scaling, False) for scale in scales] or None for scales in (scale_a, scale_b))
    arguments = ("tiles", "a_list", "b_list", "scale_a_list", "scale_b_list", "out_list")
    Bound((launch,), arguments, device).run(tiles, list(a), list(b), *views, list(out))
