"""Tile code to find the largest element and where it comes first; shared by argmax and sample."""

import math

import cuda.tile as ct

NOWHERE = 2**31 - 1


def empty_best(shape):
    """The state of lanes that have seen nothing: the largest element, and in which step it came (0
    where all are -inf).
    """
    return ct.full(shape, -math.inf, ct.float32), ct.zeros(shape, ct.int32)


def take_better(best, when, x, step):
    """The state after x, which came in `step`, later than all before.

    NaN is the largest, as in torch; of equals the first stays.
    """
    take = (x > best) | (ct.isnan(x) & ~ct.isnan(best))
    return ct.where(take, x, best), ct.where(take, step, when)


def first_best(best, columns):
    """Over axis 1 of all lanes: the largest element and its first column, both [rows, 1]."""
    top = ct.max(best, axis=1, keepdims=True, propagate_nan=True)
    return top, ct.min(ct.where((best == top) | ct.isnan(best), columns, NOWHERE), axis=1, keepdims=True)  # a lane is NaN only if the top is
