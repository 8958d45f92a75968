"""Tiles of products that compile well, by architecture and kind of operands, as text that
`gemm_candidates.tiles_of` reads.

A latency that asks for as many steps as shared memory holds leaves no room for the step that the
tensor cores still read: the compiler then waits for each step's MMAs (`DEPBAR.LE gsb0, 0x0`).
"""

ANY = 1 << 62
FEW = 64  # rows of a up to which the product is bound by reading b
CUT = 193, 768  # rows that several tiles of a sum of powers of two may cover; as many columns at most
# Up to 32 rows. Rows of a that are not there take the room of loads of b: 1.1 TB/s in tiles of 64 x
# 64, 2.5 in these (16 x 2048 x 8192, H200).
HOPPER_FEW = (
    "0x64x512 4w 8l psb, 0x64x256 4w 8l psb, 0x64x256 4w 2o 8l psb, 0x64x128 4w 2o 8l psb, 0x128x256 8w 8l psb, 0x128x128 4w 2o 8l psb,"
    "0x128x128 8w 8l psb, 0x128x64 4w 2o 8l psb, 0x256x128 8w 8l psb, 0x256x64 8w 8l psb, 16x32x256 4w 8l ps, 16x32x256 4w 2o 8l ps,"
    "64x8x512 4w 8l ps, 64x16x512 4w 8l ps, 0x64x128 4w 4o 3l psb, 0x64x64 4w 4o 4l psb, 0x128x64 4w 4o 3l psb,"
    "0x64x128 4w 3o 3l psb"
)
# From 33 to 192 rows, as a sum of two powers of two: 48, 80, 96, 144, 160, 192.
HOPPER_SUMS = (
    "0x64x128 4w 2o 4l sbu +0, 0x64x128 4w 2o 3l sbu +0, 0x64x128 4w 4l sbu +0, 0x64x128 4w 2o 2l sbu +0, 0x128x64 4w 5l psbu +0,"
    "0x128x64 8w 4l psbu +0, 0x128x128 8w 3l sbu +0"
)
# From 193 to 768 rows, in tiles of 144 to 320 rows, where these pad less. No split-K of 256 rows:
# its partial tile leaves room for two steps, and each then waits for its MMAs. No third sum: 208 x
# 128 takes 36 us where 256 x 128 takes 34 (409 x 8192 x 3072, H200).
HOPPER_TALL = "128x128x64 8w 4l psbu +0, 128x128x64 4w 5l psbu +0, 256x128x64 8w 4l pbu +0, 256x128x32 8w 5l pbu +0"
# As many columns, and fewer: 72 pad to 80, 160 to 2 x 80. The wider the tile, the fewer lines of L2
# are read for rows off 128 bytes.
HOPPER_BROAD = (
    "128x128x64 8w 4l pu +0, 128x128x64 4w 5l pu +0, 128x256x64 8w 4l pu +0, 128x256x32 8w 5l pu +0, 256x128x64 8w 4l pu +0,"
    "256x256x64 8w 2c 4l u +0, 128x64x64 4w 6l u +0, 128x64x64 4w 2o 3l u +0, 256x64x64 8w 4l pu +0, 64x128x64 4w 6l u +0"
)
HOPPER_BATCH = (  # up to 64
    "64x64x512 4w 8l psb, 64x64x256 4w 8l psb, 64x64x128 4w 2o 8l psb, 64x128x256 8w 8l psb, 64x128x128 8w 8l psb, 64x64x128 4w 2o 8l ps,"
    "64x16x512 4w 8l ps, 64x32x256 4w 8l ps, 64x32x512 4w 8l ps, 64x32x128 4w 2o 8l ps, 64x64x256 4w 8l ps, 64x64x256 4w 2c 8l ps,"
    "64x64x512 4w 8l ps, 64x128x128 8w 8l ps, 64x128x128 4w 4c 8l ps, 64x256x64 8w 8l ps, 64x64x128 4w 2o 3l sb, 64x64x128 4w 2o 3l s,"
    "64x32x128 4w 2o 3l s, 64x128x128 8w 4l sb"
)
# The last two load a step further ahead than with 5l: 256 x 128 for 193 to 256 rows in one wave,
# 256 x 256 from some 700 rows on (H200, 2026-11-30; notes/LOG.md).
HOPPER = (
    "256x256x64 8w 2c 5l ps, 128x256x64 8w 6l p, 128x256x64 8w 5l ps, 128x256x64 8w 4l ps, 256x128x64 8w 5l ps,"
    "256x128x64 8w 2c 5l s,"
    "128x128x64 8w 5l s, 128x128x128 8w 5l s, 128x128x64 4w 5l ps, 128x128x64 4w 2o 2l s, 64x256x64 8w 5l ps, 256x64x64 8w 5l ps,"
    "64x128x128 8w 5l ps, 128x64x128 8w 5l ps, 128x64x64 4w 2o 5l ps, 64x64x128 4w 2o 5l ps, 64x128x64 4w 5l s, 64x128x64 4w 2o 5l s,"
    "64x64x128 8w 6l s, 64x32x256 4w 8l s, 64x16x256 4w 8l s, 128x128x64 4w 6l +16, 128x128x64 4w 6l +32, 128x128x64 4w 5l +64,"
    "128x128x64 4w 6l b +16, 128x128x64 4w 5l bs +32, 128x128x64 4w 5l bs +64, 64x256x64 8w 4l s, 64x128x128 8w 4l s,"
    "64x128x64 8w 4l +128, 128x128x64 8w 4l +64, 256x128x64 4w 2c 6l, 256x256x64 8w 2c 6l b"
)
# Widths between powers of two, and clusters that read one operand once: where few tiles must fill a
# wave. A second MMA of 16 columns costs as much as one of 40, and while it runs alone the next step
# must start. So most are wider, or beside 256 columns, or in steps of 128.
HOPPER_WAVE = (
    "64x64x128 4w 5l sf +32, 64x64x128 4w 5l bsf +32, 64x128x64 4w 6l bsf +32, 64x128x128 4w 3l bsf +32,"
    "64x128x64 4w 5l sf +64, 64x256x64 4w 4l sf +64, 256x64x64 4w 4l bsf +64, 128x512x64 4w 4c 5l bsf,"
    "64x256x64 4w 4l sf, 256x64x64 4w 4l bsf, 64x256x64 4w 4l sf +32, 256x64x64 4w 4l bsf +32,"
    "128x128x128 4w 2l sf +16, 128x128x128 4w 2l bsf +16, 64x128x64 4w 6l sf +16, 64x64x128 4w 5l sf +16"
)
# Two accumulators, one of 256 rows or columns, in steps of 32: of steps of 64, three fit shared
# memory. The compiler frees a step's first operand a step late, so one of them is under way, and a
# step takes 1.4 to 1.8 times as long (H200). In batches few are timed.
HOPPER_LONG = (
    "128x256x32 8w 6l pfo +32, 128x256x32 8w 6l pfo +64, 256x128x32 8w 6l pfo +16, 256x128x32 8w 6l pfo +32,"
    "256x128x32 8w 6l pbfo +64, 256x128x32 8w 6l pbfo +128"
)
# One warp group, whose next MMA starts before the last one ends: 175 x 2560 x 1024 takes 5.2 us, on
# two 7.0 (H200).
HOPPER_DEEP = "64x64x128 4w 4l s, 128x64x128 4w 3l s, 64x32x256 4w 3l s"
HOPPER_FP8_FEW = (  # up to 192 rows
    "0x64x512 4w 2o 8l sb, 0x64x512 4w 4l sb, 0x64x256 4w 2o 3l sb, 0x128x256 8w 4l sb, 0x64x256 4w 2o 3l sbu +0, 0x64x256 4w 4l sbu +0,"
    "0x128x128 4w 5l sbu +0"
)
HOPPER_FP8_FEWEST = "0x64x256 4w 3o 3l sb, 0x64x128 4w 3o 4l sb"  # up to 64
HOPPER_FP8 = (
    "64x16x512 4w 8l s, 64x32x512 4w 4l s, 64x64x512 4w 4l s, 64x128x256 8w 6l s, 128x64x256 8w 5l s, 64x128x128 4w 4l +64,"
    "64x128x128 4w 2o 2l +64, 128x128x128 4w 6l p, 128x128x128 8w 6l p, 128x128x128 4w 6l +16, 128x128x128 4w 6l +64, 128x256x128 8w 4l p,"
    "128x256x128 8w 6l p, 256x256x128 8w 2c 4l p, 128x256x128 8w 6l b +32, 64x128x128 4w 2o 8l s, 64x64x256 4w 6l s, 64x256x128 8w 6l p,"
    "64x64x512 4w 4l sb, 64x128x256 8w 6l sb, 64x256x128 8w 4l ps, 64x128x256 8w 4l s, 64x128x128 4w 5l s, 128x64x128 8w 5l s,"
    "64x128x128 8w 4l +128, 128x128x128 8w 4l +64, 128x256x128 8w 4l b +64, 128x128x128 4w 5l bs +64,"
    "64x64x256 4w 2o 3l sb, 64x64x256 4w 2o 3l s, 64x32x256 4w 2o 3l s"
)
# As HOPPER_LONG, and a step of twice the length. Precise sums spill there.
HOPPER_FP8_LONG = "128x256x64 8w 6l +64, 128x256x64 8w 6l +128, 256x256x64 8w 2c 8l +64, 64x128x256 4w 3l s"
HOPPER_FP8_WAVE = (
    "64x64x256 4w 5l sf +32, 64x64x256 4w 5l bsf +32, 64x128x128 4w 6l sf +32, 64x128x128 4w 6l bsf +32,"
    "64x256x128 4w 4l sf +64, 128x512x128 8w 4c 5l bsf, 128x256x128 8w 2c 5l bsf"
)
# Sums of more bits than the tensor core's, for fp32 and fp16 outputs; runs of short ones for bf16
# outputs and long k. Around runs the compiler waits for each MMA where a warp has fewer sums: 128 x
# 128 on 8 warps (1.2 to 1.4 times the time, H200), 128 x 64 x 256.
HOPPER_FP8_PRECISE = (
    "64x64x256 4w 6l s, 128x64x128 8w 6l s, 128x128x128 8w 6l p, 64x256x128 8w 6l p, 64x128x128 4w 2o 8l s,"
    "64x64x512 4w 4l sb, 64x128x256 8w 6l sb, 64x256x128 8w 4l s, 64x64x256 4w 2o 3l sb, 128x256x128 8w 6l r, 128x256x128 8w 4l rps,"
    "64x256x128 8w 4l rps, 256x64x128 8w 4l rsb, 256x128x128 8w 4l rsb, 64x128x128 4w 2o 8l rs, 64x64x256 4w 2o 3l rsb, 64x64x512 4w 4l rsb"
)
# Scales inside the loop: two accumulators, and latency 8 (ops/common/scaling.py).
HOPPER_BLOCK = (
    "128x128x128 8w 8l ps, 64x64x128 4w 2o 8l s, 64x64x128 4w 4o 8l s, 64x128x128 4w 2o 8l ps, 64x32x128 4w 2o 8l s, 256x128x128 8w 2c 8l p,"
    "128x64x128 8w 8l s, 128x64x128 8w 5l s +64, 128x64x128 8w 6l s +64, 64x64x128 4w 2o 5l s +64, 64x64x128 4w 2o 6l s +64,"
    "128x128x256 8w 4l s, 128x128x256 8w 8l s"
)
HOPPER_BLOCK_FEW = "0x64x128 4w 4o 8l sb, 0x64x128 4w 2o 8l sb, 0x128x128 8w 8l sb, 0x64x256 4w 4o 3l sb, 0x64x256 4w 2o 4l sb"  # up to 32 rows
BLACKWELL = (
    "256x256x64 2c 5l ps, 128x256x64 5l ps, 256x128x64 2c 5l ps, 128x128x64 5l ps, 128x128x128 5l ps, 128x64x128 5l ps, 256x256x64 4c 5l p,"
    "512x256x64 4c 5l p, 512x256x64 8c 5l p, 256x512x64 4c 5l p, 128x128x32 5l p, 128x64x256 5l p, 64x64x512 3l p, 64x128x128 5l p,"
    "32x128x128 5l p, 128x32x256 5l p"
)
BLACKWELL_FEW = "64x32x256 8l p, 64x64x128 8l p, 16x32x256 2o 8l p"
# tileiras 13.4 can't take pairs of columns out of tensor memory "make_tmem_copy": tiles that stay
# in registers.
BLACKWELL_GATED = "32x128x128 8w 4l, 32x128x64 4l, 16x64x128 4l"
BLACKWELL_FP8 = "128x128x128 5l p, 256x128x128 2c 5l p, 128x64x128 5l p, 64x128x128 5l"
CONSUMER = (
    "128x64x64 2o 3l ps, 64x128x64 2o 3l ps, 128x128x32 3l ps, 64x64x64 2o 3l ps, 256x64x32 8w 3l p, 64x256x32 8w 3l p, 32x64x128 2o 3l p,"
    "64x32x128 2o 3l p, 32x32x256 2o 3l p, 32x32x512 2l p, 64x64x32 4o 3l p, 512x32x32 8w 2l p, 32x512x32 8w 2l p"
)
CONSUMER_FP8 = "64x128x128 3l, 64x64x128 2o 3l, 128x64x128 3l"
AMPERE = "128x128x32 2o 3l ps, 64x128x64 2o 3l ps, 64x64x64 2o 3l ps"
SMALL_FEW = "16x32x256 2o 8l p, 16x64x128 2o 8l p, 64x64x64 2o 8l p"
TURNED_FP8 = "64x64x64 3l p, 64x32x64 3l p"  # operands without k last are transposed on the way to the tensor cores
NARROW = "64x64x32 1l ps, 32x32x64 1l ps"  # rows that begin off 16 bytes: an element at a time
TF32, TF32_HOPPER = "64x64x16 1l ps", "128x128x32 8w 3l ps, 128x64x32 8w 3l ps, 64x64x32 8w 3l ps"
FLOAT32, FLOAT32_HOPPER = "64x64x8 1l ps, 32x32x16 1l ps, 32x32x8 1l ps", "64x128x8 8w 3l ps, 64x64x16 8w 3l ps, 32x64x16 8w 3l ps"

TilesByRows = tuple[tuple[int, int, str], ...]  # tiles for so many rows of a, at least and at most
Tables = dict[str, dict[str, TilesByRows]]  # by architecture and kind of operands
DOT = (
    (1, 1, "1x8x512 4w 2o 8l pd, 1x4x1024 4w 2o 8l pd, 1x8x512 4w 8l pd, 1x16x256 4w 3o 8l pd, 1x8x1024 8w 8l pd"),
    (2, 2, "2x4x1024 8w 8l pd, 2x8x512 4w 2o 8l pd, 2x8x512 8w 8l pd, 2x16x256 4w 2o 8l pd, 4x8x512 8w 8l pd"),
    (3, 4, "4x8x512 8w 8l pd, 4x4x512 8w 2o 8l pd"),
)
_ANY: dict[str, TilesByRows] = {
    "float32": ((0, ANY, FLOAT32),),
    "tf32": ((0, ANY, TF32),),
    "narrow float32": ((0, ANY, FLOAT32),),
    "narrow tf32": ((0, ANY, TF32),),
    "narrow": ((0, ANY, NARROW),),
    "turned": ((0, ANY, TURNED_FP8),),
}
_HOPPER: dict[str, TilesByRows] = {
    **_ANY,
    "float32": ((0, ANY, FLOAT32_HOPPER),),
    "tf32": ((0, ANY, TF32_HOPPER),),
    "wide": (
        *DOT,
        (0, 32, HOPPER_FEW),
        (33, FEW, HOPPER_BATCH),
        (33, ANY, HOPPER_BROAD),
        (*CUT, HOPPER_TALL),
        (33, 192, HOPPER_SUMS),
        (33, ANY, HOPPER),
        (FEW + 1, ANY, HOPPER_WAVE),
        (33, ANY, HOPPER_DEEP),
        (FEW + 1, ANY, HOPPER_LONG),
    ),
    "fp8": (
        (0, FEW, HOPPER_FP8_FEWEST),
        (0, 192, HOPPER_FP8_FEW),
        (0, ANY, HOPPER_FP8),
        (FEW + 1, ANY, HOPPER_FP8_WAVE),
        (FEW + 1, ANY, HOPPER_FP8_LONG),
    ),
    "precise": ((0, FEW, HOPPER_FP8_FEWEST), (0, 192, HOPPER_FP8_FEW), (0, ANY, HOPPER_FP8_PRECISE), (FEW + 1, ANY, HOPPER_FP8_WAVE)),
    "block": ((0, 32, HOPPER_BLOCK_FEW), (0, ANY, HOPPER_BLOCK)),
}
_BLACKWELL: dict[str, TilesByRows] = {
    **_ANY,
    "wide": (*DOT, (0, FEW, BLACKWELL_FEW), (0, ANY, BLACKWELL)),
    "gated": ((0, ANY, BLACKWELL_GATED),),
    "fp8": ((0, ANY, BLACKWELL_FP8),),
}
_CONSUMER: dict[str, TilesByRows] = {**_ANY, "wide": (*DOT, (0, FEW, SMALL_FEW), (0, ANY, CONSUMER)), "fp8": ((0, ANY, CONSUMER_FP8),)}
_AMPERE: dict[str, TilesByRows] = {**_ANY, "wide": (*DOT, (0, FEW, SMALL_FEW), (0, ANY, AMPERE))}
TABLES: Tables = {"sm_80": _AMPERE, "sm_90": _HOPPER, "sm_100": _BLACKWELL, "sm_103": _BLACKWELL, "sm_120": _CONSUMER, "sm_121": _CONSUMER}
