"""Tile code that makes bf16 numbers of words of small codes, in registers.

All bit work is on 32-bit words. A field of up to 8 bits at the bottom of a bf16 is linear, because
subnormal numbers and the first normal ones are evenly spaced: its value is code * 2**-133. So one
AND takes two codes, and one packed multiply-add makes numbers of them and subtracts the zero point,
exactly. The same operations on tiles of 8 or 16 bits are not packed.
"""

import cuda.tile as ct

from .weight_formats import E2M1, E4M3, INT4, INT8, PLANE, WORDS

SIGNS, E4M3_REST, E2M1_FIELD = 0x80008000 - (1 << 32), 0x07F007F0, 0x81C081C0 - (1 << 32)
SMALL = 2.0**16  # what fp4 weights are short of in the sum: 2**110 of their scale and 2**126 of their codes


def zero_point(zeros, i, CODE):
    """The zero point of the i-th group, in the units of `_planes`: a column, or one for all."""
    if len(zeros) > 0:
        return zeros[i] * (1 / 64)
    return 0.125 if CODE == INT4 else 2.0


def unit(CODE):
    """What a unit of `_planes` stands for."""
    return 1.0 if CODE == E4M3 else 64.0


def _pairs(words):
    """Words whose halves are the bits of bf16 numbers, as those: no instruction, the registers
    stay.
    """
    return ct.unpack_from_bytes(ct.pack_to_bytes(words), ct.bfloat16).reshape((words.shape[0], 2 * words.shape[1]))


def planes(q, zero, CODE):
    """The codes of words as bf16 tiles, a plane of the run each, in the order of k.

    INT4, INT8: (code - zero) / 64 with zero in that unit. E4M3: the value. E2M1: value * 2**-126.
    """
    if CODE == INT4:
        h = q >> 8
        return (
            _pairs(q & 0x000F000F) * 2.0**127 - zero,
            _pairs(q & 0x00F000F0) * 2.0**123 - zero,
            _pairs(h & 0x000F000F) * 2.0**127 - zero,
            _pairs(h & 0x00F000F0) * 2.0**123 - zero,
        )
    if CODE == INT8:
        return _pairs(q & 0x00FF00FF) * 2.0**127 - zero, _pairs((q >> 8) & 0x00FF00FF) * 2.0**127 - zero
    if CODE == E4M3:
        low, high = ((q << 8) & SIGNS) | ((q << 4) & E4M3_REST), (q & SIGNS) | ((q >> 4) & E4M3_REST)
        return _pairs(low) * 2.0**120, _pairs(high) * 2.0**120
    last = (q >> 6) & 0x01800180 | (q >> 4) & 0x00400040 | (q << 4) & SIGNS
    return _pairs(q & E2M1_FIELD), _pairs((q << 3) & E2M1_FIELD), _pairs((q << 6) & E2M1_FIELD), _pairs(last)


def joined(p):
    """The planes of a run side by side."""
    if len(p) == 2:
        return ct.cat(p, 1)
    return ct.cat((ct.cat((p[0], p[1]), 1), ct.cat((p[2], p[3]), 1)), 1)


def scaled(q, scales, zeros, i, RUN, CODE, GROUP):
    """[rows, k of a run]: the weights of a step's i-th run, bf16. A group is several planes of the
    run, one, half of one, or all of it.
    """
    PLANES, HALVES = RUN // PLANE, 2 if GROUP < PLANE else 1
    found: tuple = ()
    for j in ct.static_iter(range(PLANES)):
        parts: tuple = ()
        for half in ct.static_iter(range(HALVES)):
            group = (i * RUN + j * PLANE + half * WORDS) // GROUP
            words = ct.extract(q, (0, half), (q.shape[0], WORDS // HALVES)) if HALVES > 1 else q
            parts = (*parts, planes(words, zero_point(zeros, group, CODE), CODE)[j] * _scale(scales[group], CODE))
        found = (*found, ct.cat(parts, 1) if HALVES > 1 else parts[0])
    return joined(found)


def _scale(scale, CODE):
    """bf16: what a unit of `_planes` is multiplied by."""
    if scale.dtype == ct.uint8:  # e8m0: the exponent of a bf16
        scale = ct.bitcast(scale.astype(ct.uint16) << 7, ct.bfloat16)
    return scale.astype(ct.bfloat16) * (2.0**110 if CODE == E2M1 else unit(CODE))
