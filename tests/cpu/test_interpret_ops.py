"""Each tile operation, interpreted, against numpy and PyTorch."""

import operator

import cuda.tile as ct
import numpy as np
import pytest
import torch

from tilewright.interpret import KernelError, interpret

N = 64
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32]


def values(dtype: torch.dtype, n: int = N, low: int = -9, high: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    low = max(low, 0) if not dtype.is_signed else low
    return torch.randint(low, high, (n,), generator=generator, dtype=torch.int64).to(dtype)


def unary(function, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    @ct.kernel
    def kernel(x, out, n: ct.Constant[int]):
        ct.store(out, (0,), function(ct.load(x, (0,), (n,))))

    out = torch.empty(x.shape, dtype=out_dtype or x.dtype)
    interpret(kernel, (1,), (x, out, x.numel()))
    return out


def binary(function, x: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    @ct.kernel
    def kernel(x, y, out, n: ct.Constant[int]):
        ct.store(out, (0,), function(ct.load(x, (0,), (n,)), ct.load(y, (0,), (n,))))

    out = torch.empty(x.shape, dtype=out_dtype or x.dtype)
    interpret(kernel, (1,), (x, y, out, x.numel()))
    return out


# -------------------------------------------------------------------------------------- elementwise
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_float_arithmetic_is_rounded_like_torchs(op, dtype):
    x, y = values(dtype), values(dtype, 2 * N)[N:]
    torch.testing.assert_close(binary(op, x, y), op(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul])
def test_integer_arithmetic_wraps(op, dtype):
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, N * dtype.itemsize, dtype=np.uint8)).view(dtype)
    y = torch.from_numpy(x.numpy()[::-1].copy())
    expected = torch.from_numpy(op(x.numpy(), y.numpy()))
    torch.testing.assert_close(binary(op, x, y), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integer_division_rounds_down_and_the_remainder_takes_the_divisors_sign(dtype):
    x = torch.tensor([7, -7, 7, -7, 6, -6, 0, 1], dtype=dtype)
    y = torch.tensor([3, 3, -3, -3, 3, 3, 5, -2], dtype=dtype)
    torch.testing.assert_close(binary(operator.floordiv, x, y), torch.div(x, y, rounding_mode="floor"))
    torch.testing.assert_close(binary(operator.mod, x, y), torch.remainder(x, y))
    torch.testing.assert_close(binary(ct.cdiv, x, y), -torch.div(-x, y, rounding_mode="floor"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_a_power_keeps_the_parity_of_a_large_exponent(dtype):
    x, n = torch.tensor([-1, -1, 2, -2], dtype=dtype), torch.tensor([2**24 + 1, 2**31 - 1, -3, 3], dtype=torch.int32)
    torch.testing.assert_close(binary(ct.pow, x, n), torch.tensor([-1, -1, 0.125, -8], dtype=dtype), rtol=0, atol=0)


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_with_nan(op):
    x = torch.tensor([1.0, 2.0, torch.nan, torch.nan, -0.0, torch.inf, 3.0, 1.0])
    y = torch.tensor([2.0, 1.0, torch.nan, 1.0, 0.0, torch.inf, 3.0, torch.nan])
    function = getattr(operator, op)
    assert torch.equal(binary(function, x, y, torch.bool), function(x, y))


def test_minimum_and_maximum_pass_over_nan():
    x = torch.tensor([1.0, torch.nan, 2.0, torch.nan])
    y = torch.tensor([torch.nan, 5.0, 3.0, torch.nan])
    torch.testing.assert_close(binary(ct.maximum, x, y), torch.fmax(x, y), equal_nan=True)
    torch.testing.assert_close(binary(ct.minimum, x, y), torch.fmin(x, y), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "sqrt", "rsqrt", "floor", "ceil", "abs"])
def test_functions_are_torchs(name, dtype):
    x = values(dtype).abs() + 0.125
    theirs = getattr(torch, name)(x)
    rtol = 2e-7 if name in ("sqrt", "rsqrt") and dtype is torch.float32 else 0  # ours is rounded exactly
    if name == "rsqrt" and dtype is not torch.float32:
        rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(unary(getattr(ct, name), x), theirs, rtol=rtol, atol=0)


def test_bitwise_and_shifts():
    x, y = values(torch.int32, high=1 << 20), values(torch.int32, 2 * N, 0, 31)[:N]
    for op in (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift):
        assert torch.equal(binary(op, x, y), op(x, y)), op
    assert torch.equal(unary(ct.bitwise_not, x), ~x)
    unsigned = torch.tensor([0x80000000, 0xFFFFFFFF, 1, 2], dtype=torch.uint32)
    assert binary(operator.rshift, unsigned, torch.full((4,), 4, dtype=torch.uint32)).tolist() == [0x08000000, 0x0FFFFFFF, 0, 0]


@pytest.mark.parametrize("mode", ["RN", "RZ", "RM", "RP"])
def test_rounding_modes_bracket_the_exact_sum(mode):
    rounding = getattr(ct.RoundingMode, mode)
    x, y = values(torch.float32), values(torch.float32, 2 * N)[N:] * 1e-4

    def add(a, b):
        return ct.add(a, b, rounding_mode=rounding)

    got = binary(add, x, y).double()
    exact = x.double() + y.double()
    if mode == "RN":
        assert torch.equal(got, (x + y).double())
    elif mode == "RZ":
        assert (got.abs() <= exact.abs()).all()
    else:
        assert ((got <= exact) if mode == "RM" else (got >= exact)).all()


def test_flush_to_zero_drops_subnormals():
    def add(a, b):
        return ct.add(a, b, flush_to_zero=True)

    x = torch.tensor([1e-40, -1e-40, 1.0, 2.0**-126])
    got = binary(add, x, torch.zeros(4))
    assert got.tolist() == [0.0, 0.0, 1.0, 2.0**-126]


def test_multiply_add_is_rounded_once():
    def product_less_one(a, b):
        return a * b - 1.0

    x, y = torch.tensor([1 + 2.0**-12] * 4), torch.tensor([1 - 2.0**-12] * 4)
    got = binary(product_less_one, x, y)
    assert got.tolist() == [-(2.0**-24)] * 4  # a * b rounded by itself is 1


# ----------------------------------------------------------------------------------- type promotion
PROMOTED = [
    (torch.int8, torch.int32, torch.int32),
    (torch.int32, torch.float16, torch.float16),
    (torch.float16, torch.float32, torch.float32),
    (torch.int64, torch.float32, torch.float32),
    (torch.float32, torch.float64, torch.float64),
    (torch.uint8, torch.uint32, torch.uint32),
]


@pytest.mark.parametrize(("a", "b", "result"), PROMOTED, ids=str)
def test_promotion_is_torchs(a, b, result):
    x, y = values(a), values(b)
    torch.testing.assert_close(binary(operator.add, x, y, result), torch.from_numpy(x.to(result).numpy() + y.to(result).numpy()), rtol=0, atol=0)


def test_literals_take_the_tiles_type():
    def tenth(a):
        return a * 0.1

    def and_a_hundred(a):
        return a + 100

    half = values(torch.float16)
    torch.testing.assert_close(unary(tenth, half), half * torch.tensor(0.1, dtype=torch.float16), rtol=0, atol=0)
    assert torch.equal(unary(and_a_hundred, torch.full((4,), 100, dtype=torch.int8)), torch.full((4,), -56, dtype=torch.int8))


def test_a_literal_carried_by_a_loop_has_the_loops_type():
    @ct.kernel
    def kernel(out):
        s = 2147483647
        for _ in range(1):
            s = s + 1
        ct.store(out, (0,), ct.full((1,), s, ct.int32))

    out = torch.zeros(1, dtype=torch.int32)
    interpret(kernel, (1,), (out,))
    assert out.item() == -2147483648


# -------------------------------------------------------------------------------------- tile shapes
def test_shape_operations():
    @ct.kernel
    def kernel(x, out):
        t = ct.load(x, (0, 0), (4, 8))
        t = ct.permute(t, (1, 0))
        t = ct.reshape(t, (2, 4, 4))
        t = ct.cat((t, t), 0)
        part = ct.extract(t, (1, 1, 0), (2, 2, 4))
        t = ct.insert(t, (0, 0, 0), part * 10)
        ct.store(out, (0, 0, 0), t)

    x = torch.arange(32.0).reshape(4, 8)
    out = torch.empty(4, 4, 4)
    interpret(kernel, (1,), (x, out))
    t = x.T.reshape(2, 4, 4)
    t = torch.cat((t, t), 0)
    t[0:2, 0:2, :] = t[2:4, 2:4, :] * 10
    assert torch.equal(out, t)


def test_broadcasting_rows_against_columns():
    @ct.kernel
    def kernel(x, y, out):
        a, b = ct.load(x, (0,), (4,)), ct.load(y, (0,), (8,))
        both = a[:, None] * b[None, :]
        ct.store(out, (0, 0), ct.where(both > 3.0, ct.broadcast_to(a[:, None], (4, 8)), 7.0))

    x, y = torch.arange(4.0), torch.arange(8.0)
    out = torch.empty(4, 8)
    interpret(kernel, (1,), (x, y, out))
    assert torch.equal(out, torch.where(x[:, None] * y > 3, x[:, None].expand(4, 8), 7.0))


def test_tiles_that_are_only_broadcasts_are_whole_where_they_must_be():
    @ct.kernel
    def kernel(out, total, product):
        ones = ct.full((8, 4), 2.0, ct.float32)
        row = ct.arange(4, dtype=ct.int32).astype(ct.float32)[None, :] + ct.zeros((8, 4), ct.float32)
        ct.store(total, (0,), ct.sum(ones, axis=1))
        ct.store(product, (0, 0), ct.mma(ct.transpose(ones), ones, ct.full((4, 4), 1.0, ct.float32)))
        t = ones
        for _ in range(2):
            t = t + row
        ct.store(out, (0, 0), t)

    out, total, product = torch.empty(8, 4), torch.empty(8), torch.empty(4, 4)
    interpret(kernel, (1,), (out, total, product))
    assert torch.equal(total, torch.full((8,), 8.0))
    assert torch.equal(product, torch.full((4, 4), 33.0))
    assert torch.equal(out, (2 + 2 * torch.arange(4.0)).expand(8, 4))


# ----------------------------------------------------------------------------------------- products
@pytest.mark.parametrize(
    ("dtype", "acc"), [(torch.float32, ct.float32), (torch.bfloat16, ct.float32), (torch.float16, ct.float16), (torch.int8, ct.int32)], ids=str
)
def test_mma(dtype, acc):
    @ct.kernel
    def kernel(x, y, out):
        ct.store(out, (0, 0), ct.mma(ct.load(x, (0, 0), (16, 32)), ct.load(y, (0, 0), (32, 8)), ct.full((16, 8), 1, acc)))

    x, y = values(dtype, 512).reshape(16, 32), values(dtype, 256).reshape(32, 8)
    out = torch.empty(16, 8, dtype=getattr(torch, acc.name))
    interpret(kernel, (1,), (x, y, out))
    exact = x.double() @ y.double() + 1
    tolerance = 0 if dtype is torch.int8 else 1e-2 if acc is ct.float16 else 1e-5
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_tf32_drops_mantissa_bits():
    @ct.kernel
    def kernel(x, y, out):
        a, b = ct.load(x, (0, 0), (16, 16)).astype(ct.tfloat32), ct.load(y, (0, 0), (16, 16)).astype(ct.tfloat32)
        ct.store(out, (0, 0), ct.mma(a, b, ct.zeros((16, 16), ct.float32)))

    x = torch.full((16, 16), 1 + 2.0**-13)
    out = torch.empty(16, 16)
    interpret(kernel, (1,), (x, torch.eye(16), out))
    assert torch.equal(out, torch.ones(16, 16))


@pytest.mark.parametrize("fill", [1.0, torch.nan])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 20), (13, 11, 7), (16, 5, 32)])
def test_product_of_partial_tiles(m, n, k, fill):
    """Zero padding along the contracted axis may be left out; the result is that of whole tiles,
    NaN outside the arrays or not.
    """

    @ct.kernel
    def kernel(x, y, out):
        zero = ct.PaddingMode.ZERO
        a = ct.load(x, (0, 0, 0), (1, 16, 32), padding_mode=zero).reshape((16, 32))
        b = ct.load(y, (0, 0), (16, 32), padding_mode=zero)
        ct.store(out, (0, 0), ct.mma(a, ct.transpose(b), ct.full((16, 16), 2.0, ct.float32)))

    around = torch.full((2, 40, 40), fill)
    around[0, :m, :k], around[1, :n, :k] = values(torch.float32, m * k).reshape(m, k), values(torch.float32, n * k).reshape(n, k)
    x, y = around[:1, :m, :k], around[1, :n, :k]
    out = torch.zeros(16, 16)
    interpret(kernel, (1,), (x, y, out))
    expected = torch.full((16, 16), 2.0)
    expected[:m, :n] += x[0] @ y.T
    torch.testing.assert_close(out, expected)


def test_partial_tiles_of_different_extents():
    @ct.kernel
    def kernel(x, y, out):
        zero = ct.PaddingMode.ZERO
        a, b = ct.load(x, (0, 0), (4, 16), padding_mode=zero), ct.load(y, (0, 0), (16, 4), padding_mode=zero)
        ct.store(out, (0, 0), ct.mma(a, b, ct.zeros((4, 4), ct.float32)))

    x, y = torch.ones(4, 9), torch.ones(12, 4)
    y[10, 2] = torch.inf
    out = torch.empty(4, 4)
    interpret(kernel, (1,), (x, y, out))
    expected = torch.full((4, 4), 9.0)
    expected[:, 2] = torch.nan  # 0 * inf, as on a GPU
    torch.testing.assert_close(out, expected, equal_nan=True)


# ----------------------------------------------------------------------------- reductions and scans
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions(axis, dtype):
    @ct.kernel
    def kernel(x, sums, products, largest, smallest, at):
        t = ct.load(x, (0, 0), (8, 16))
        ct.store(sums, (0,), ct.sum(t, axis=axis))
        ct.store(products, (0,), ct.prod(t, axis=axis))
        ct.store(largest, (0,), ct.max(t, axis=axis))
        ct.store(smallest, (0,), ct.min(t, axis=axis))
        ct.store(at, (0,), ct.argmax(t, axis=axis))

    x = values(dtype, 128).reshape(8, 16)
    n = x.shape[1 - axis]
    out = [torch.empty(n, dtype=dtype) for _ in range(4)]
    at = torch.empty(n, dtype=torch.int32)
    interpret(kernel, (1,), (x, *out, at))
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out[0], x.sum(axis).to(dtype), **tolerance)
    torch.testing.assert_close(out[1], x.prod(axis).to(dtype), **tolerance)
    assert torch.equal(out[2], x.amax(axis))
    assert torch.equal(out[3], x.amin(axis))
    assert torch.equal(at, torch.from_numpy(x.numpy().argmax(axis)).int())


@pytest.mark.parametrize("reverse", [False, True])
def test_scans(reverse):
    @ct.kernel
    def kernel(x, sums, products):
        t = ct.load(x, (0, 0), (4, 8))
        ct.store(sums, (0, 0), ct.cumsum(t, axis=1, reverse=reverse))
        ct.store(products, (0, 0), ct.cumprod(t, axis=0, reverse=reverse))

    x = values(torch.int32, 32).reshape(4, 8)
    sums, products = torch.empty_like(x), torch.empty_like(x)
    interpret(kernel, (1,), (x, sums, products))
    flip = (lambda t, d: t.flip(d)) if reverse else (lambda t, d: t)
    assert torch.equal(sums, flip(flip(x, 1).cumsum(1), 1).int())
    assert torch.equal(products, flip(flip(x, 0).cumprod(0), 0).int())


def test_reduction_and_scan_with_a_function_of_several_tiles():
    def larger(a, i, b, j):
        take = (b > a) | ((b == a) & (j < i))
        return ct.where(take, b, a), ct.where(take, j, i)

    @ct.kernel
    def kernel(x, best, at, running):
        t = ct.load(x, (0,), (16,))
        value, index = ct.reduce((t, ct.arange(16, dtype=ct.int32)), 0, larger, (-float("inf"), 0))
        ct.scatter(best, 0, value)
        ct.scatter(at, 0, index)
        ct.store(running, (0,), ct.scan(t, 0, lambda a, b: ct.maximum(a, b), -float("inf")))

    x = values(torch.float32, 16)
    best, at, running = torch.empty(1), torch.empty(1, dtype=torch.int32), torch.empty(16)
    interpret(kernel, (1,), (x, best, at, running))
    assert best.item() == x.max()
    assert at.item() == x.argmax()
    assert torch.equal(running, x.cummax(0).values)


# ------------------------------------------------------------------------------------- control flow
def test_loops_branches_and_early_ends():
    @ct.kernel
    def kernel(x, out, n):
        total = 0
        for i in range(n):
            v = ct.gather(x, i)
            if v < 0:
                continue
            if v > 100:
                break
            total += v
        else_ = 0
        k = n
        while k > 1:
            k = k // 2 if k % 2 == 0 else 3 * k + 1
            else_ += 1
        ct.scatter(out, 0, total)
        ct.scatter(out, 1, else_)

    x = torch.tensor([1, -5, 2, 3, 101, 50], dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    interpret(kernel, (1,), (x, out, 6))
    assert out.tolist() == [6, 8]


def test_nested_loops_carry_tiles():
    @ct.kernel
    def kernel(x, out):
        acc = ct.zeros((4,), ct.float32)
        for i in range(3):
            row = ct.zeros((4,), ct.float32)
            for j in range(i + 1):
                row = row + ct.load(x, (j,), (4,))
            acc = acc + row
        ct.store(out, (0,), acc)

    x = values(torch.float32, 16)
    out = torch.empty(4)
    interpret(kernel, (1,), (x, out))
    rows = x.reshape(4, 4)
    torch.testing.assert_close(out, 3 * rows[0] + 2 * rows[1] + rows[2])


def test_helpers_closures_tuples_and_constants():
    def twice(f, t):
        return f(f(t))

    @ct.kernel
    def kernel(x, out, pair, scale: ct.Constant[float], flag: ct.Constant[bool]):
        t = ct.load(x, (0,), (4,))
        a, b = pair
        t = twice(lambda u: u * scale + a, t)
        if flag:
            t = t - b
        ct.store(out, (0,), t)

    x = values(torch.float32, 4)
    out = torch.empty(4)
    interpret(kernel, (1,), (x, out, (2, 0.5), 3.0, True))
    torch.testing.assert_close(out, (x * 3 + 2) * 3 + 2 - 0.5)
    interpret(kernel, (1,), (x, out, (2, 0.5), 3.0, False))
    torch.testing.assert_close(out, (x * 3 + 2) * 3 + 2)


def test_a_range_must_step_forward():
    @ct.kernel
    def kernel(x, n):
        for i in range(0, 4, n):
            ct.scatter(x, i, 1.0)

    with pytest.raises(KernelError, match="step must be positive, got 0"):
        interpret(kernel, (1,), (torch.zeros(4), 0))
