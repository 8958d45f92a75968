"""Tiles of `grouped_gemm` worth timing, by architecture and operands: data for `tiles_of`.

p: blocks may be persistent. n: likewise, but the result may not be written by TMA. With other tiles
tileiras 13.4 fails, spills, or waits for each MMA. y: also where rows of the result are no multiple
of 16 bytes, which TMA can't write (sm_90). w: TMA may not write a result of fp32 (sm_90). m: only
where each group has room of its own for a whole number of tiles. A tile_m of 0: as many rows as a
group has.
"""

from ..common.gemm_tiles import ANY, Tables, TilesByRows

# Groups of up to 32 rows: reading b counts, whose columns are on the long side of the MMA. Of a
# tile of 64 rows, 20 of which count, a block reads as much as of b: 80 % of the memory's rate
# (H200). A TMA store fails to compile above 64 columns a warp group, and spills after long steps on
# 4 warps.
HOPPER_FEW = (
    "0x64x512 4w 8l bny, 0x64x256 4w 2o 8l bpy, 0x128x256 8w 8l bpy, 0x128x128 8w 2o 8l bpy, 0x128x128 4w 4o 8l bny,"
    "0x64x128 4w 4o 8l bpy, 0x256x128 8w 2o 8l bny"
)
HOPPER_FEW_FP8 = (
    "0x64x1024 4w 8l bny, 0x64x512 4w 2o 8l bpy, 0x128x512 8w 8l bpy, 0x128x256 8w 2o 8l bpy, 0x128x256 4w 4o 8l bny,"
    "0x64x256 4w 4o 8l bpy, 0x256x256 8w 2o 8l bny"
)
HOPPER_FEW_BLOCK = "0x64x128 4w 4o 8l bpy, 0x64x128 4w 2o 8l bpy, 0x128x128 8w 8l bpy"
HOPPER = (
    "128x128x64 4w 5l p, 128x128x64 4w 2o 2l p, 256x256x64 8w 2c 5l py, 128x256x64 8w 4l p, 256x128x64 8w 5l py, 128x128x64 8w 5l,"
    "64x256x64 8w 5l p, 64x256x64 4w 4l p, 64x128x64 4w 5l, 64x128x128 8w 8l py, 64x64x128 4w 8l py, 64x32x256 4w 8l"
)
HOPPER_FP8 = (  # for outputs of more bits than bf16, or long k: sums leave the tensor cores
    "128x128x128 8w 6l p, 256x128x128 8w 2c 6l ny, 128x128x128 8w 8l p, 64x256x128 8w 6l p, 64x128x128 4w 6l ny, 64x128x128 4w 2o 6l,"
    "128x64x128 8w 6l p, 64x64x256 4w 8l"
)
_LOW = "64x256x128 8w 6l, 64x128x128 4w 6l, 64x128x128 4w 2o 6l, 128x64x128 8w 6l p, 64x64x256 4w 8l"
HOPPER_FP8_FAST = f"128x256x128 8w 6l p, 128x128x128 4w 6l p, 256x128x128 8w 4l py, {_LOW}"
HOPPER_FP8_ROW = f"128x256x128 8w 6l p, 128x128x128 8w 6l p, 256x128x128 8w 4l py, {_LOW}"  # on 4 warps the scales of rows spill
# Latency 8 keeps six steps in flight; any other leaves two, spills, or waits
# (ops/common/scaling.py).
HOPPER_BLOCK = "128x128x128 8w 8l pm, 256x128x128 8w 2c 8l, 64x128x128 4w 8l ny, 128x64x128 8w 8l pw"
BLACKWELL = "256x256x64 2c 5l n, 128x256x64 5l, 256x128x64 2c 5l n, 128x128x64 5l n, 128x128x128 5l n, 128x64x128 5l p"
BLACKWELL_FP8 = "128x128x128 5l, 256x128x128 2c 5l, 128x64x128 5l n, 64x128x128 5l"
BLACKWELL_BLOCK = "128x128x128 5l p, 256x128x128 2c 5l p, 128x64x128 5l p, 64x128x128 5l"
AMPERE = "128x128x32 3l p, 64x128x64 2o 3l p, 128x64x64 2o 3l p, 64x64x64 2o 3l"
CONSUMER = "128x128x32 3l, 64x128x64 2o 3l, 128x64x64 2o 3l p, 64x64x64 2o 3l p"
CONSUMER_FP8 = "64x128x128 3l, 64x64x128 2o 3l, 128x64x128 3l"
TURNED_FP8 = "64x64x64 3l, 64x32x64 3l"  # operands without k last are transposed on the way to the tensor cores
NARROW = "64x64x32 1l pyw, 32x32x64 1l py"  # rows that begin off 16 bytes: an element at a time
NARROW_FP8 = "64x64x32 1l, 32x32x64 1l"
FEW = 32  # rows of a group


def _table(wide: str, fp8: str = "", block: str = "") -> dict[str, TilesByRows]:
    """Of an architecture that takes the same tiles for few rows."""
    own = {"wide": wide, "fp8": fp8, "block": block or fp8, "turned": TURNED_FP8}
    narrow = {"narrow": NARROW, "narrow fp8": NARROW_FP8, "narrow turned": NARROW_FP8}
    return {kind: ((0, ANY, tiles),) for kind, tiles in (own | narrow).items()}


_HOPPER = {
    **_table(HOPPER),
    "wide": ((0, FEW, HOPPER_FEW), (0, ANY, HOPPER)),
    "fp8": ((0, FEW, HOPPER_FEW_FP8), (0, ANY, HOPPER_FP8_FAST)),
    "row": ((0, FEW, HOPPER_FEW_FP8), (0, ANY, HOPPER_FP8_ROW)),
    "precise": ((0, FEW, HOPPER_FEW_FP8), (0, ANY, HOPPER_FP8)),
    "block": ((0, FEW, HOPPER_FEW_BLOCK), (0, ANY, HOPPER_BLOCK)),
}
_BLACKWELL, _CONSUMER = _table(BLACKWELL, BLACKWELL_FP8, BLACKWELL_BLOCK), _table(CONSUMER, CONSUMER_FP8)
TABLES: Tables = {
    "sm_80": _table(AMPERE, CONSUMER_FP8),
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_103": _BLACKWELL,
    "sm_120": _CONSUMER,
    "sm_121": _CONSUMER,
}
