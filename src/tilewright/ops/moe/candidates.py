"""Tiles of `moe` worth timing, by architecture and weights: data for `gemm_candidates.tiles_of`.

Tile rows x rows of weights x k. The first product has half of the rows of weights from the gate's
matrix and half from up's. Kinds:

vector_up, vector_down  one token, on the CUDA cores; each part has so many rows of weights.
reading                 few rows of x, with the weights on the long side of the MMA. A tile_m of 0:
                        as many rows as there are.
tall                    many rows of x.

p: blocks are persistent too (tall), or only so (vector_up: where weights have neither scales nor
biases, else it spills). a: scales are fetched a step ahead.
"""

from ...launch import Device
from ..common.scaling import Scaling

Table = dict[str, str]

_READING = "0x64x256 4w 2o 8l, 0x64x512 4w 8l, 0x64x256 4w 8l, 0x64x128 4w 2o 8l, 0x128x128 4w 2o 8l, 0x128x256 8w 8l"
_READING_ROW = "0x64x256 4w 2o 8l, 0x64x512 4w 8l, 0x64x128 4w 2o 8l, 0x128x128 4w 2o 8l"
# Four blocks an SM: 77 us in place of 122 with two (4 tokens of DeepSeek-V2-Lite, H200).
_READING_BLOCK = "0x64x128 4w 4o 8l, 0x64x128 4w 2o 8l, 0x128x128 4w 2o 8l, 0x128x128 8w 8l"
_VECTOR_UP = "1x32x128 4w 2o 8l, 1x16x128 4w 3o 8l, 1x16x256 4w 2o 8l, 1x8x512 4w 2o 8l"
_VECTOR_DOWN = "1x8x512 4w 2o 8l, 1x16x256 4w 2o 8l, 1x16x512 4w 8l"
# With latency 8 the compiler keeps six steps in flight, with any other two.
_TALL_FP8 = "128x128x128 8w 8l, 64x128x128 4w 8l, 128x64x128 8w 8l"
HOPPER = {
    "": {
        "vector_up": f"1x32x128 8w 8l p, 1x16x256 8w 8l p, {_VECTOR_UP}",
        "vector_down": _VECTOR_DOWN,
        "reading": _READING,
        # Lower ones are not persistent: it waits for each MMA in turn.
        "tall": "128x128x64 4w 5l p, 128x256x64 8w 5l p, 256x128x64 8w 5l p, 64x256x64 8w 5l, 64x128x64 4w 5l",
    },
    "ROW": {"vector_up": _VECTOR_UP, "vector_down": _VECTOR_DOWN, "reading": _READING_ROW, "tall": _TALL_FP8},
    "BLOCK": {
        "vector_up": (
            "1x32x128 4w 2o 8l a, 1x16x128 4w 3o 8l a, 1x16x256 4w 2o 8l a, 1x8x512 4w 2o 8l a, 1x8x512 4w 2o 8l, 1x8x256 4w 2o 8l,"
            "1x8x512 4w 8l, 1x16x512 4w 8l"
        ),
        "vector_down": _VECTOR_DOWN,
        "reading": _READING_BLOCK,
        "tall": _TALL_FP8,
    },
}
_VECTOR = {"vector_up": "1x16x128 2o 8l, 1x8x256 2o 8l", "vector_down": "1x16x128 2o 8l, 1x8x256 2o 8l"}
_VECTOR_BLOCK = {"vector_up": "1x16x128 2o 8l a, 1x8x256 2o 8l a", "vector_down": _VECTOR["vector_down"]}
_BLACKWELL_FP8 = "128x128x128 3l, 64x128x128 3l, 128x64x128 3l"
BLACKWELL = {
    "": {
        **_VECTOR,
        "reading": "0x64x256 2o 8l, 0x64x512 8l, 0x64x256 8l, 0x64x128 2o 8l, 0x128x128 2o 8l, 0x128x256 8l",
        "tall": "256x256x64 2c 5l, 128x256x64 5l, 128x128x64 5l, 64x128x64 5l",
    },
    "ROW": {**_VECTOR, "reading": "0x64x256 2o 8l, 0x64x512 8l, 0x64x128 2o 8l, 0x128x128 2o 8l", "tall": _BLACKWELL_FP8},
    "BLOCK": {**_VECTOR_BLOCK, "reading": "0x64x128 2o 8l, 0x128x128 2o 8l, 0x128x128 8l", "tall": _BLACKWELL_FP8},
}
_SMALL_VECTOR = {"vector_up": "1x16x128 2o 3l, 1x8x256 2o 3l", "vector_down": "1x16x128 2o 3l, 1x8x256 2o 3l"}
_SMALL_VECTOR_BLOCK = {"vector_up": "1x16x128 2o 3l a, 1x8x256 2o 3l a", "vector_down": _SMALL_VECTOR["vector_down"]}
_SMALL_FP8 = "64x128x128 3l, 64x64x128 3l"
SMALL = {
    "": {
        **_SMALL_VECTOR,
        "reading": "0x64x128 2o 3l, 0x64x64 2o 3l, 0x32x128 2o 3l",
        "tall": "64x128x64 3l, 128x64x64 3l, 128x128x32 3l, 64x64x64 3l",
    },
    "ROW": {**_SMALL_VECTOR, "reading": "0x64x256 2o 3l, 0x64x128 2o 3l, 0x128x128 2o 3l", "tall": _SMALL_FP8},
    "BLOCK": {**_SMALL_VECTOR_BLOCK, "reading": "0x64x128 2o 3l, 0x128x128 2o 3l, 0x128x128 3l", "tall": _SMALL_FP8},
}
# Rows that begin off 16 bytes are read an element at a time.
_NARROW_VECTOR = {"vector_up": "1x8x128 1l", "vector_down": "1x8x128 1l"}
NARROW = {
    "": {**_NARROW_VECTOR, "reading": "0x32x64 1l", "tall": "64x64x32 1l"},
    "ROW": {**_NARROW_VECTOR, "reading": "0x32x64 1l", "tall": "64x64x32 1l"},
    "BLOCK": {**_NARROW_VECTOR, "reading": "0x32x128 1l", "tall": "64x64x128 1l"},
}
TABLES = {"sm_90": HOPPER, "sm_100": BLACKWELL, "sm_103": BLACKWELL}


def tables(scaling: Scaling, wide: bool, device: Device) -> Table:
    """The tiles by kind. wide: rows of x and of the weights can be read 16 bytes at a time."""
    found = TABLES.get(device.arch, SMALL) if wide else NARROW
    return found[scaling.name if scaling else ""]
