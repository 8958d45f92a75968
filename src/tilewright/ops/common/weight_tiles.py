"""Tile code that makes bf16 numbers of words of small codes, in registers.

All bit work is on 32-bit words. A field of up to 8 bits at the bottom of a bf16 is linear, because
subnormal numbers and the first normal ones are evenly spaced: its value is code * 2**-133. So one
AND takes two codes, and one packed multiply-add makes numbers of them and subtracts the zero point,
exactly. The same operations on tiles of 8 or 16 bits are not packed.
"""

import cuda.tile as ct

from .weight_formats import E2M1, E4M3, INT4, INT8, PLANE, WORDS

SIGNS, E2M1_REST, E2M1_ALL = 0x80008000 - (1 << 32), 0x01C001C0, 0x81C081C0 - (1 << 32)
E2M1_BYTES, E2M1_MOST, E2M1_BIT = 0x9C9C9C9C - (1 << 32), 0x8C8C8C8C - (1 << 32), 0x10101010
# Of e4m3 in a half-word: by how much its bits without the sign are shifted, and where they are
# then.
E4M3_BFLOAT16, E4M3_FLOAT16 = (4, 0x07F007F0), (1, 0x3F803F80)
SMALL = 2.0**16  # the factor that sums of fp4 weights lack: 2**110 of their scale and 2**126 of their codes


def zero_point(zeros, i, CODE):
    """The zero point of the i-th group, in the units of `_planes`: a column, or one for all."""
    if len(zeros) > 0:
        return zeros[i].astype(ct.bfloat16) * (1 / 64)
    return 0.125 if CODE == INT4 else 2.0


def unit(CODE):
    """What a unit of `_planes` stands for."""
    return 1.0 if CODE == E4M3 else 64.0


def _pairs(words, dtype=ct.bfloat16):
    """Words whose halves are the bits of bf16 or fp16 numbers, as those: no instruction, the
    registers stay.
    """
    return ct.unpack_from_bytes(ct.pack_to_bytes(words), dtype).reshape((words.shape[0], 2 * words.shape[1]))


def e4m3_planes(q, dtype):
    """Words of four e4m3 codes, none of them NaN, as 2**-120 of their value in bf16 or 2**-8 of it
    in fp16, exactly: the even columns, the odd ones.
    """
    SHIFT, REST = E4M3_FLOAT16 if dtype == ct.float16 else E4M3_BFLOAT16
    low, high = ((q << 8) & SIGNS) | ((q << (8 - SHIFT)) & REST), (q & SIGNS) | ((q >> SHIFT) & REST)
    return _pairs(low, dtype), _pairs(high, dtype)


def planes(q, zero, CODE):
    """The codes of words as bf16 tiles, a plane of the run each, in the order of k.

    INT4, INT8: (code - zero) / 64 with zero in that unit. E4M3: the value. E2M1: value * 2**-126.
    """
    if CODE == INT4:
        h = q >> 8
        return (
            _pairs(q & 0x000F000F) * 2.0**127 - zero,
            _pairs(h & 0x000F000F) * 2.0**127 - zero,
            _pairs(q & 0x00F000F0) * 2.0**123 - zero,
            _pairs(h & 0x00F000F0) * 2.0**123 - zero,
        )
    if CODE == INT8:
        return _pairs(q & 0x00FF00FF) * 2.0**127 - zero, _pairs((q >> 8) & 0x00FF00FF) * 2.0**127 - zero
    if CODE == E4M3:
        even, odd = e4m3_planes(q, ct.bfloat16)
        return even * 2.0**120, odd * 2.0**120
    return (*_e2m1_pairs(q), *_e2m1_pairs(_second_bytes(q)))


def _e2m1_pairs(q):
    """Of words whose bytes are e2m1 * 2**-6 in e4m3, under other bits: lower bytes and upper ones.

    A sign at bit 15 and the rest at bits 6 to 8 are value * 2**-126 of a bf16.
    """
    return _pairs((q & 0x009C009C) * 0x110 & E2M1_ALL), _pairs(q & SIGNS | (q >> 4) & E2M1_REST)


def _second_bytes(q):
    """The e2m1 codes that lie between those that a mask finds, as e4m3."""
    return (q << 2) & E2M1_MOST | (q >> 2) & E2M1_BIT


def _fours(words):
    """Words as four e4m3 numbers each: no instruction."""
    return ct.unpack_from_bytes(ct.pack_to_bytes(words), ct.float8_e4m3fn).reshape((words.shape[0], 4 * words.shape[1]))


def bytes_of(q, CODE):
    """The codes of a run as e4m3 [rows, k]: two planes take turns (`ops/common/pieces.py`).

    INT4: code * 2**-9, E2M1: value * 2**-6, E4M3: the value.
    """
    if CODE == INT4:
        return ct.cat((_fours(q & 0x0F0F0F0F), _fours((q >> 4) & 0x0F0F0F0F)), 1)
    if CODE == E2M1:
        return ct.cat((_fours(q & E2M1_BYTES), _fours(_second_bytes(q))), 1)
    return _fours(q)


def joined(p):
    """The planes of a run side by side."""
    if len(p) == 2:
        return ct.cat(p, 1)
    return ct.cat((ct.cat((p[0], p[1]), 1), ct.cat((p[2], p[3]), 1)), 1)


def add_product(acc, q, y, scales, zeros, i, groups, run, SCALE_SUMS):
    """acc [rows, columns] and the product of the words q of a step's i-th run with y [k, columns].

    groups: weights of a group, and groups of a step, 0 for one scale a row, which comes later. run:
        (weights of a run, runs of a step, code).
    SCALE_SUMS: a group's scale multiplies its sum in fp32; else the weights, rounded to bf16.
    """
    (GROUP, GROUPS), (RUN, RUNS, CODE) = groups, run
    if SCALE_SUMS:
        codes = joined(planes(q, zero_point(zeros, i * GROUPS // RUNS, CODE), CODE))
        part = ct.mma(codes, y, ct.zeros(acc.shape, ct.float32))
        return acc + part * (scales[i * GROUPS // RUNS].astype(ct.float32) * unit(CODE))
    if GROUPS == 0:
        return ct.mma(joined(planes(q, zero_point((), 0, CODE), CODE)), y, acc)
    return ct.mma(scaled(q, scales, zeros, i, RUN, CODE, GROUP), y, acc)


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
