"""Configs of `attention_decode` worth timing, of one KV split each, by architecture and kind of
call: data.

heads: query rows (heads x tokens) that a block takes at most; 0: all of a key head. Other fields as
in Config. The cost model orders the rows; of equal ones the first counts. Rows were chosen on
compiled code (no spills, products in flight beside the softmax).
"""

from typing import Any

Row = dict[str, Any]


def _row(tile_n: int, keys_first: bool, latency: int, occupancy: int, num_worker_warps: int | None = None, heads: int = 0, **more: Any) -> Row:
    how = {"latency": latency, "occupancy": occupancy, "num_worker_warps": num_worker_warps, "heads": heads}
    return {"tile_n": tile_n, "keys_first": keys_first, **how, **more}


# Kinds: fp32, fp32_64; few (at most 16 rows of a key head), many, each with wide above 128 columns,
# and then with codes; columns above 256, shared where v is k and both are read in one loop, _few of
# at most 16 rows, _codes of e4m3 latents (not timed).
_ONE_LOOP = {"rows": 64, "late": True, "sliced": True}
_FEW_ROWS = {"rows": 16, "late": True, "sliced": True}
_SINGLE = {
    "fp32": (_row(16, True, 1, 1, heads=16), _row(16, True, 1, 1, heads=8)),
    "fp32_64": (_row(32, True, 1, 1, heads=16), _row(32, True, 1, 1, heads=8)),
}
_SHARED = (
    *(_row(64, False, latency, 1, 8, 64, parts=4, **_ONE_LOOP) for latency in (9, 5, 10)),
    *(_row(64, False, 3, 1, 8, 64, parts=parts, paired=True, **_ONE_LOOP) for parts in (2, 1)),
    _row(64, False, 9, 1, 8, 64, parts=4, rows=64, sliced=True),
    _row(32, False, 2, 1, 8, 64, rows=64),
)
HOPPER = {
    **{kind: tuple({**row, "num_worker_warps": 8} for row in rows) for kind, rows in _SINGLE.items()},
    "few": (
        _row(128, True, 8, 1, 8),
        _row(128, True, 8, 2, 4),
        _row(128, True, 3, 2, 4),
        _row(128, True, 8, 2, 8),
        _row(64, True, 8, 2, 4),
        _row(64, True, 4, 2, 4),
        _row(64, True, 3, 4, 4),
        _row(64, True, 3, 3, 4),
        _row(128, True, 3, 3, 4),
        _row(128, False, 8, 1, 8),
        _row(128, False, 8, 2, 4),
        _row(64, False, 3, 4, 4),
    ),
    "few_codes": (
        _row(128, True, 8, 1, 8),
        _row(128, True, 8, 2, 8),
        _row(128, True, 8, 2, 4),
        _row(128, True, 8, 3, 4),
        _row(128, True, 5, 2, 4),
        _row(64, True, 8, 2, 4),
        _row(64, True, 8, 3, 4),
        _row(64, True, 3, 4, 4),
        _row(256, True, 4, 1, 8),
    ),
    "many_codes": (_row(128, True, 8, 1, 8, 32), _row(64, True, 8, 1, 4, 32), _row(128, False, 2, 1, 8, 128, rows=128)),
    "few_wide_codes": (_row(128, True, 4, 1, 8), _row(128, True, 2, 1, 8), _row(64, True, 2, 2, 4), _row(64, True, 1, 2, 4)),
    "few_wide": (
        _row(128, True, 4, 1, 8),
        _row(64, True, 4, 1, 4),
        _row(128, True, 2, 1, 8),
        _row(64, False, 2, 1, 8),
        _row(64, True, 1, 2, 4),
        _row(64, True, 2, 2, 4),
    ),
    "many": (
        _row(128, True, 8, 1, 8),
        _row(64, False, 4, 1, 4, 64, rows=64),
        _row(64, False, 2, 1, 4, 64, rows=64),
        _row(128, False, 2, 1, 8, 128, rows=128),
    ),
    "many_wide": (_row(64, False, 8, 1, 8, 64, parts=2, **_ONE_LOOP), _row(64, True, 2, 1, 8, 32)),
    "columns": (
        _row(32, False, 5, 1, 8, 64, parts=2, **_ONE_LOOP),
        _row(32, False, 2, 1, 8, 64, rows=64),
        _row(64, False, 6, 1, 8, 64, rows=64, parts=2),
    ),
    "columns_shared": _SHARED,
    "columns_shared_codes": (
        _row(64, True, 2, 1, 8, 16, parts=4),
        _row(64, True, 2, 1, 8, 16, parts=16, late=True, sliced=True),
        *(_row(tile_n, False, 2, 1, 8, 64, rows=64, parts=16) for tile_n in (64, 32)),
    ),
    "columns_shared_few": (
        _row(64, True, 8, 1, 8, parts=2, **_FEW_ROWS),
        _row(64, True, 9, 1, 8, **_FEW_ROWS),
        _row(64, True, 5, 1, 4, parts=2, **_FEW_ROWS),
        _row(64, True, 8, 1, 4, parts=4, **_FEW_ROWS),
        *_SHARED,
    ),
}
_BLACKWELL = {
    **_SINGLE,
    "few": (_row(64, True, 2, 1), _row(32, False, 2, 1)),
    "few_wide": (_row(64, True, 2, 1),),
    "many": (_row(64, True, 2, 1, None, 32),),
    "many_wide": (_row(64, True, 2, 1, 8, 32),),
    "columns": (_row(64, True, 2, 1, 8, 16, parts=2, columns=256),),
    "columns_shared": (_row(64, True, 2, 1, 8, 32),),
    "columns_shared_codes": (_row(64, True, 2, 1, 8, 16, parts=16),),
}
_SMALL = {
    **_SINGLE,
    "few": (_row(64, True, 2, 1), _row(32, False, 2, 1)),
    "few_wide": (_row(32, False, 2, 1),),
    "many": (_row(32, False, 2, 1, None, 32),),
    "many_wide": (_row(32, False, 1, 1, None, 16),),
    "columns": (_row(32, False, 1, 1, None, 16, parts=4, columns=64),),
    "columns_shared": (_row(32, False, 1, 1, None, 16, parts=4, columns=64),),
    "columns_shared_codes": (_row(32, True, 1, 1, None, 16, parts=16, columns=64),),
}
_AMPERE = {
    **_SMALL,
    "many": (_row(32, False, 2, 1, 8, 32),),
    "many_wide": (_row(32, False, 2, 1, None, 16),),
    "columns": (_row(64, False, 2, 1, 8, 16, parts=4, columns=128),),
    "columns_shared": (_row(64, False, 2, 1, 8, 16, parts=4, columns=128),),
    "columns_shared_codes": (_row(32, False, 1, 1, None, 16, parts=16, columns=64),),
}
TABLES = {"sm_80": _AMPERE, "sm_90": HOPPER, "sm_100": _BLACKWELL, "sm_103": _BLACKWELL, "sm_120": _SMALL, "sm_121": _SMALL}
