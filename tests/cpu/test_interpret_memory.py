"""Loads, stores, views, pointers and atomics, interpreted."""

import cuda.tile as ct
import numpy as np
import pytest
import torch

from tilewright.interpret import checking, interpret

Pad = ct.PaddingMode
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.int64, torch.uint8, torch.bool]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))) % 97).reshape(shape).to(dtype)


@ct.kernel
def copy_tiles(x, out, rows: ct.Constant[int], columns: ct.Constant[int]):
    at = (ct.bid(0), ct.bid(1))
    ct.store(out, at, ct.load(x, at, (rows, columns)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_tiles_are_copied_exactly(dtype):
    x = numbers((13, 21), dtype)
    out = torch.zeros_like(x)
    interpret(copy_tiles, (4, 3), (x, out, 4, 8))
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize(
    "strided",
    [lambda t: t.T, lambda t: t[::2, 1::3], lambda t: t[3:, 5:], lambda t: t[:1].expand(16, 32)],
    ids=["transposed", "stepped", "offset", "expanded"],
)
def test_any_strides(strided):
    x = strided(numbers((16, 32)))
    out = torch.zeros(x.shape)
    interpret(copy_tiles, (-(-x.shape[0] // 4), -(-x.shape[1] // 8)), (x, out, 4, 8))
    assert torch.equal(out, x)


def test_stores_leave_what_lies_around_alone():
    whole = torch.full((20, 20), -1.0)
    interpret(copy_tiles, (2, 2), (numbers((5, 7)), whole[2:7, 3:10], 4, 4))
    expected = torch.full((20, 20), -1.0)
    expected[2:7, 3:10] = numbers((5, 7))
    assert torch.equal(whole, expected)


PADDING = {Pad.ZERO: 0.0, Pad.NEG_ZERO: -0.0, Pad.NAN: torch.nan, Pad.POS_INF: torch.inf, Pad.NEG_INF: -torch.inf}


@pytest.mark.parametrize("mode", PADDING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_modes(mode, dtype):
    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0, 0), ct.load(x, (0, 0), (4, 8), padding_mode=mode))

    x = numbers((3, 5), dtype)
    out = torch.empty(4, 8, dtype=dtype)
    interpret(kernel, (1,), (x, out))
    expected = torch.full((4, 8), PADDING[mode], dtype=dtype)
    expected[:3, :5] = x
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    if mode is not Pad.NAN:
        assert torch.equal(out[3].signbit(), expected[3].signbit())


@pytest.mark.parametrize(("dtype", "poison"), [(torch.float32, None), (torch.int32, -0x55), (torch.uint8, 0xAA)], ids=str)
def test_undetermined_padding_is_poison_unless_told_otherwise(dtype, poison):
    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (4,)))

    x, out = numbers((3,), dtype), torch.empty(4, dtype=dtype)
    interpret(kernel, (1,), (x, out))
    assert out[3].isnan() if poison is None else out[3] == poison
    with checking(strict=False):
        interpret(kernel, (1,), (x, out))
    assert out[3] == 0


def test_axis_order():
    @ct.kernel
    def kernel(x, out):
        at = (ct.bid(0), ct.bid(1))
        ct.store(out, at, ct.load(x, at, (4, 2), order=(1, 0)))

    x = numbers((6, 10))
    out = torch.zeros(10, 6)
    with checking(strict=False):
        interpret(kernel, (3, 3), (x, out))
    assert torch.equal(out, x.T)


def test_tiles_that_overlap():
    @ct.kernel
    def kernel(x, out):
        view = x.tiled_view((4,), padding_mode=Pad.ZERO, traversal_steps=(2,))
        i = ct.bid(0)
        ct.store(out, (i, 0), view.load((i,)).reshape((1, 4)))
        ct.scatter(out, (i, 4), view.num_tiles(0).astype(ct.float32))

    x, out = numbers((7,)), torch.zeros(4, 5)
    interpret(kernel, (4,), (x, out))
    padded = torch.cat((x, torch.zeros(3)))
    assert torch.equal(out[:, :4], padded.unfold(0, 4, 2)[:4])
    assert out[:, 4].eq(4).all()


def test_slices_of_arrays():
    @ct.kernel
    def kernel(x, out, start, stop):
        part = x.slice(axis=0, start=start, stop=stop)
        for i in range(ct.cdiv(part.shape[0], 2)):
            ct.store(out, (i, 0), ct.load(part, (i, 0), (2, 4), padding_mode=Pad.ZERO) + part.shape[0])

    x, out = numbers((10, 4)), torch.zeros(6, 4)
    interpret(kernel, (1,), (x, out, 3, 8))
    expected = torch.full((6, 4), 5.0)
    expected[:5] += x[3:8]
    assert torch.equal(out, expected)


def test_gather_and_scatter():
    @ct.kernel
    def kernel(x, rows, columns, out, count):
        r, c = ct.load(rows, (0,), (8,)), ct.load(columns, (0,), (8,))
        t = ct.gather(x, (r, c), mask=r != 2, padding_value=-5.0)
        ct.scatter(out, 7 - ct.arange(8, dtype=ct.int32), t, mask=ct.arange(8, dtype=ct.int32) < count)

    x = numbers((4, 4))
    rows = torch.tensor([0, 3, 2, 1, -1, 4, 3, 0], dtype=torch.int32)
    columns = torch.tensor([0, 3, 1, 2, 0, 0, -1, 1], dtype=torch.int32)
    out = torch.full((8,), -1.0)
    interpret(kernel, (1,), (x, rows, columns, out, 7))
    gathered = [0.0, 15.0, -5.0, 6.0, -5.0, -5.0, -5.0]  # masked, or outside the array
    assert out.tolist() == [-1.0, *reversed(gathered)]


def test_load_with_an_index_tile():
    @ct.kernel
    def kernel(x, rows, out):
        ct.store(out, (0, 0), ct.load_advanced_indexing(x, (ct.load(rows, (0,), (4,)), ct.Slice(0, 4)), padding_mode=Pad.ZERO))

    x, rows, out = numbers((6, 4)), torch.tensor([5, 0, 5, 9], dtype=torch.int32), torch.empty(4, 4)
    interpret(kernel, (1,), (x, rows, out))
    assert torch.equal(out, torch.cat((x[[5, 0, 5]], torch.zeros(1, 4))))


def test_a_load_keeps_its_values_when_the_array_is_overwritten():
    @ct.kernel
    def kernel(x, out):
        before = ct.load(x, (0,), (4,))
        ct.store(x, (0,), before * 2)
        ct.store(out, (0,), before)

    x, out = numbers((4,)) + 1, torch.zeros(4)
    interpret(kernel, (1,), (x, out))
    assert out.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("through", ["the same tensor", "a view", "a list", "an atomic"])
def test_a_load_keeps_its_values_when_an_alias_is_overwritten(through):
    @ct.kernel
    def plain(x, alias, out):
        before = ct.load(x, (0,), (4,))
        ct.store(alias, (0,), before * 2)
        ct.store(out, (0,), before)

    @ct.kernel
    def listed(x, alias, out):
        before = ct.load(x, (0,), (4,))
        ct.store(alias[0], (0,), before * 2)
        ct.store(out, (0,), before)

    @ct.kernel
    def atomic(x, alias, out):
        before = ct.load(x, (0,), (4,))
        ct.atomic_add(alias, ct.arange(4, dtype=ct.int32), before)
        ct.store(out, (0,), before)

    x, out = numbers((4,)) + 1, torch.zeros(4)
    alias = {"a view": x.view(4), "a list": [x[:]]}.get(through, x)
    kernel = {"a list": listed, "an atomic": atomic}.get(through, plain)
    interpret(kernel, (1,), (x, alias, out))
    assert out.tolist() == [1, 2, 3, 4]
    assert x.tolist() == [2, 4, 6, 8]


def test_an_array_that_nothing_writes_is_not_copied():
    seen = []

    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0,), ct.load(x, (1,), (4,)))

    from tilewright.interpret.memory import Machine

    load = Machine.load

    def spy(self, *args):
        seen.append(load(self, *args))
        return seen[-1]

    x, out = numbers((8,)), torch.zeros(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "load", spy)
        interpret(kernel, (1,), (x, out))
    assert np.shares_memory(seen[0], x.numpy())


def of_a_product(x, TRANSPOSED):
    if TRANSPOSED:
        return ct.load(x, (0, 0), (64, 16), padding_mode=Pad.ZERO)
    return ct.load(x, (0, 0), (16, 64), padding_mode=Pad.ZERO)


def test_zeros_that_only_a_product_would_read_are_not_made(monkeypatch):
    """Whether the load stands in the kernel or in a function that returns early."""

    @ct.kernel
    def kernel(x, y, out):
        rows = ct.load(x, (0, 0), (16, 64), padding_mode=Pad.ZERO)
        ct.store(out, (0, 0), ct.mma(rows, of_a_product(y, True), ct.zeros((16, 16), dtype=ct.float32)))

    monkeypatch.setattr("tilewright.interpret.memory.padded", None)
    x, y, out = numbers((16, 40)), numbers((40, 16)), torch.zeros(16, 16)
    interpret(kernel, (1,), (x, y, out))
    assert torch.equal(out, x @ y)


# ------------------------------------------------------------------------------------------ atomics
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_atomic_add_returns_the_value_before(dtype):
    @ct.kernel
    def kernel(x, at, add, before):
        i = ct.load(at, (0,), (8,))
        ct.store(before, (0,), ct.atomic_add(x, i, ct.load(add, (0,), (8,))))

    x = torch.zeros(4, dtype=dtype)
    at = torch.tensor([0, 1, 0, 3, 0, 1, 7, 3], dtype=torch.int32)
    before = torch.zeros(8, dtype=dtype)
    interpret(kernel, (1,), (x, at, torch.arange(1, 9).to(dtype), before))
    assert x.double().tolist() == [9.0, 8.0, 0.0, 12.0]
    assert before.double().tolist()[:6] == [0.0, 0.0, 1.0, 0.0, 4.0, 2.0]
    assert before.double().tolist()[7] == 4.0


def test_the_other_atomics():
    @ct.kernel
    def kernel(x, before):
        ct.scatter(before, 0, ct.atomic_xchg(x, 0, 7))
        ct.scatter(before, 1, ct.atomic_max(x, 1, 9))
        ct.scatter(before, 2, ct.atomic_min(x, 2, -9))
        ct.scatter(before, 3, ct.atomic_and(x, 3, 6))
        ct.scatter(before, 4, ct.atomic_or(x, 4, 8))
        ct.scatter(before, 5, ct.atomic_xor(x, 5, 1))
        ct.scatter(before, 6, ct.atomic_cas(x, 6, 3, 11))
        ct.scatter(before, 7, ct.atomic_cas(x, 7, 4, 12))

    x, before = torch.full((8,), 3, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    interpret(kernel, (1,), (x, before))
    assert before.tolist() == [3] * 8
    assert x.tolist() == [7, 9, -9, 2, 11, 2, 11, 3]


def test_blocks_add_up():
    @ct.kernel
    def kernel(x, total):
        ct.atomic_add(total, 0, ct.sum(ct.load(x, (ct.bid(0),), (16,))))

    x, total = numbers((160,)), torch.zeros(1)
    for order in ("forward", "reverse", 3):
        total.zero_()
        with checking(order=order):
            interpret(kernel, (10,), (x, total))
        assert total.item() == x.sum()


def test_atomic_stores_through_a_view():
    @ct.kernel
    def kernel(x, out):
        out.tiled_view((4, 4)).atomic_store_add((0, 1), ct.load(x, (ct.bid(0), 0), (4, 4)))

    x, out = numbers((8, 4)), torch.zeros(4, 6)
    interpret(kernel, (2,), (x, out))
    expected = torch.zeros(4, 6)
    expected[:, 4:] = (x[:4] + x[4:])[:, :2]
    assert torch.equal(out, expected)


def test_raw_memory():
    @ct.kernel
    def kernel(x, out):
        memory = x.get_raw_memory()
        t = memory.load_offset(ct.arange(4, dtype=ct.int32) * 2)
        out.get_raw_memory().store_offset(ct.arange(4, dtype=ct.int32), t)

    x, out = numbers((2, 4)), torch.zeros(4)
    interpret(kernel, (1,), (x, out))
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0]
