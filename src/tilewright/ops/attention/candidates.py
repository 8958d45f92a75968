"""Configs of `attention` worth timing, by architecture and head_dim: data.

Rows were chosen on compiled code. The cost model orders them; of equal ones the first counts.
"""

from ..common.prefill import Row

Table = dict[str, dict[int, tuple[Row, ...]]]

HALF: Table = {
    "sm_80": {
        64: ((64, 64, 0, 1, 2, False, None, 1, 8), (64, 32, 0, 1, 2, False, None, 1, None)),
        96: ((64, 32, 0, 1, 2, False, None, 1, 8),),  # head_dim is two tiles
        128: ((64, 64, 0, 1, 3, False, None, 2, None),),
        256: ((64, 16, 0, 1, 2, False, None, 1, 8), (32, 32, 0, 1, 2, False, None, 1, 8)),
    },
    "sm_90": {
        64: (
            (128, 64, 0, 1, 2, False, 1, 2, 8),
            (64, 64, 0, 2, 2, False, 1, 3, 4),
            (64, 128, 64, 2, 2, False, 1, 2, 4),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (128, 128, 64, 1, 2, False, 1, 1, 8),
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 128, 0, 2, 2, True, 1, 1, 8),
        ),
        128: (
            (128, 128, 0, 2, 4, False, 1, 1, 8),
            (64, 128, 0, 2, 2, False, 1, 2, 4),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (64, 64, 0, 2, 2, False, 1, 2, 4),
            (64, 128, 64, 2, 2, False, 1, 2, 4),
            (64, 128, 64, 2, 6, False, 1, 2, 4),
            (128, 128, 64, 2, 4, False, 1, 1, 8),
            (128, 128, 64, 2, 6, False, 1, 1, 8),
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 64, 0, 1, 2, False, 1, 1, 8),
            (256, 128, 0, 2, 2, False, 2, 1, 8),
        ),
        192: (
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 128, 64, 2, 2, False, 1, 1, 8),
            (128, 128, 0, 1, 2, False, 1, 1, 8),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (128, 64, 0, 1, 2, False, 1, 1, 8),
            (128, 128, 0, 2, 2, True, 1, 1, 8),
        ),
        256: (
            (128, 64, 0, 1, 2, False, 1, 1, 8),
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 128, 64, 2, 2, False, 1, 1, 8),
            (64, 64, 0, 1, 2, False, 1, 1, 4),
            (128, 128, 0, 2, 2, True, 1, 1, 8),
        ),
    },
    "sm_100": {
        64: (
            (128, 128, 0, 1, 2, False, None, 2, None),
            (256, 128, 0, 1, 2, False, None, 1, None),
            (128, 128, 0, 1, 2, False, None, 1, None),
            (128, 64, 0, 1, 2, False, None, 2, None),
            (64, 64, 0, 1, 2, False, None, 2, None),
        ),
        128: (
            (128, 128, 0, 1, 2, False, None, 2, None),
            (256, 128, 0, 1, 2, False, None, 1, None),
            (128, 128, 0, 1, 2, False, None, 1, None),
            (128, 64, 0, 1, 2, False, None, 2, None),
            (64, 64, 0, 1, 2, False, None, 2, None),
        ),
        256: ((128, 128, 0, 2, 2, False, None, 1, None), (64, 64, 0, 1, 2, False, None, 1, None)),
    },
    "sm_120": {
        64: ((64, 64, 0, 1, 2, False, None, 2, None), (128, 64, 0, 1, 2, False, None, 1, None), (64, 32, 0, 1, 2, False, None, 1, None)),
        128: (
            (64, 64, 0, 1, 2, False, None, 1, None),
            (64, 64, 0, 1, 2, False, None, 2, None),
            (64, 32, 0, 1, 2, False, None, 1, None),
        ),
        256: ((32, 64, 0, 1, 2, False, None, 1, 8), (16, 32, 0, 1, 2, False, None, 1, None)),
    },
}
SINGLE: Table = {
    "sm_80": {
        64: ((64, 32, 0, 1, 2, False, None, 1, 8), (32, 32, 0, 1, 2, False, None, 1, None)),
        128: ((32, 32, 0, 1, 1, False, None, 1, 8),),
        256: ((16, 16, 0, 1, 2, False, None, 1, 8),),
    },
    "sm_90": {
        64: ((64, 64, 0, 1, 2, False, 1, 1, 8),),
        128: ((64, 16, 0, 1, 2, False, 1, 1, 8),),
        256: ((64, 16, 0, 1, 2, False, 1, 1, 8),),
    },
    "sm_100": {
        64: ((64, 64, 0, 1, 2, False, None, 1, 8), (64, 32, 0, 1, 2, False, None, 1, 8)),
        128: ((64, 16, 0, 1, 2, False, None, 1, 8),),
        256: ((64, 16, 0, 1, 2, False, None, 1, 8),),
    },
    "sm_120": {
        64: ((32, 32, 0, 1, 2, False, None, 1, 8), (32, 32, 0, 1, 2, False, None, 1, None)),
        128: ((64, 16, 0, 1, 2, False, None, 1, 8),),  # 40 bytes of stack: least of 30
        256: ((16, 16, 0, 1, 2, False, None, 1, 8),),
    },
}
EIGHT: Table = {
    "sm_90": {
        128: (
            (128, 256, 64, 2, 2, False, 1, 1, 8),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (128, 128, 0, 1, 2, False, 1, 1, 8),
            (64, 256, 0, 2, 2, False, 1, 1, 4),
            (128, 128, 0, 1, 2, True, 1, 1, 8),
            (64, 128, 64, 2, 6, False, 1, 2, 4),
        ),
    },
    "sm_100": {128: ((64, 128, 0, 1, 2, False, None, 1, None),)},
    "sm_120": {128: ((64, 64, 0, 1, 1, False, None, 1, None), (64, 32, 0, 1, 2, False, None, 1, None))},
}
TABLES = {16: HALF, 32: SINGLE, 8: EIGHT}  # by bits of the dtype
# Bytes of stack: arch, head_dim up to, tile_m, tile_n, occupancy. A cost and no ban; what is not
# named here has none or was not compiled.
SPILLS: dict[tuple[str, int, int, int, int | None], int] = {
    ("sm_100", 64, 256, 128, 1): 8,
    ("sm_100", 64, 128, 128, 1): 104,
    ("sm_100", 128, 256, 128, 1): 8,
    ("sm_100", 128, 128, 128, 1): 8,
    ("sm_120", 64, 128, 64, 1): 40,
    ("sm_120", 128, 64, 64, 2): 32,
}
