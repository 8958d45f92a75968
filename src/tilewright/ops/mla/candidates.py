"""Configs of `mla` worth timing, by architecture: data.

Rows were chosen on compiled code. The cost model orders them; of equal ones the first counts.
"""

from ..common.prefill import Row

_HOPPER: tuple[Row, ...] = (
    (128, 128, 128, 2, 2, False, 1, 1, 8),
    (128, 128, 64, 2, 2, False, 1, 1, 8),
    (128, 128, 128, 1, 2, False, 1, 1, 8),
    (64, 128, 128, 1, 2, False, 1, 2, 4),
    (64, 128, 64, 2, 2, False, 1, 2, 4),
    (128, 128, 128, 2, 2, True, 1, 1, 8),
)
_SMALL: tuple[Row, ...] = ((64, 32, 32, 1, 2, False, None, 1, 8), (32, 32, 32, 1, 2, False, None, 1, None))
HALF = {
    "sm_80": _SMALL[:1],
    "sm_90": _HOPPER,
    "sm_100": (
        (128, 128, 128, 2, 2, False, None, 1, None),
        (128, 64, 64, 1, 2, False, None, 1, None),
        (64, 64, 64, 1, 2, False, None, 2, None),
    ),
    "sm_120": _SMALL,
}
EIGHT = {
    "sm_90": (*_HOPPER, (128, 256, 64, 2, 2, False, 1, 1, 8)),
    "sm_100": ((64, 128, 128, 1, 2, False, None, 1, None), (64, 64, 64, 1, 2, False, None, 2, None)),
    "sm_120": _SMALL,
}
