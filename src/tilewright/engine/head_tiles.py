"""What the kernels of one token do with a head before it attends or is kept: norm and rotation.

A head is two tiles of HALF columns, because the rotation turns one half against the other.
"""

import cuda.tile as ct


def summed(load, SHARES, DTYPE):
    """The tile that load(i) finds of each of SHARES shares, summed and rounded; of one as it is."""
    x = load(0)
    for i in ct.static_iter(range(1, SHARES)):
        x = x + load(i)
    return x.astype(DTYPE) if SHARES > 1 else x


def norm_weight(A, HALF):
    """A norm's weight [2 HALF] as two rows, in fp32."""
    first = ct.load(A, (0,), (HALF,), check_bounds=False, allow_tma=False)
    second = ct.load(A, (1,), (HALF,), check_bounds=False, allow_tma=False)
    return first.astype(ct.float32).reshape((1, HALF)), second.astype(ct.float32).reshape((1, HALF))


def rotation(COS, SIN, position, HALF):
    """Cosines and sines of a position, clamped to the tables' rows, in fp32."""
    row = max(0, min(position, COS.shape[0] - 1))
    cos = ct.load(COS, (row, 0), (1, HALF), check_bounds=False, allow_tma=False).astype(ct.float32)
    sin = ct.load(SIN, (row, 0), (1, HALF), check_bounds=False, allow_tma=False).astype(ct.float32)
    return cos, sin


def turned(x, weight, cos, sin, eps, NORMS, ROUND, HALF, DTYPE):
    """Heads, two tiles [heads, HALF], in DTYPE: with NORMS normed by `weight`, and rotated. ROUND:
    round_before_weight as in `rms_norm`.
    """
    a, b = x[0].astype(ct.float32), x[1].astype(ct.float32)
    if NORMS:
        rstd = 1.0 / ct.sqrt(ct.sum(a * a + b * b, axis=1, keepdims=True) * (0.5 / HALF) + eps)
        a, b = a * rstd, b * rstd
        if ROUND:
            a, b = a.astype(DTYPE).astype(ct.float32), b.astype(DTYPE).astype(ct.float32)
        a, b = a * weight[0], b * weight[1]
    return (a * cos - b * sin).astype(DTYPE), (b * cos + a * sin).astype(DTYPE)
