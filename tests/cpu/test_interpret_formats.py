"""Number formats of the interpreter, against PyTorch's bit for bit where PyTorch has them."""

import numpy as np
import pytest
import torch

from tilewright.interpret import formats

NATIVE = {name: f for name, f in formats.SMALL.items() if f.native is not None}


def samples(dtype=np.float32) -> np.ndarray:
    """Random bit patterns, ordinary numbers, tiny ones, and the edges of every format."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 40_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    edges = [f.largest * s for f in formats.SMALL.values() for s in (1, 1 + 2**-12, 1 + 2**-9, 1.0625)]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-126, 2.0**-133, 2.0**-149])
    with np.errstate(invalid="ignore"):
        values = np.concatenate([bits, rng.standard_normal(40_000), rng.standard_normal(4_000) * 1e-39, special])
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate([values, np.array(edges), -np.array(edges)]).astype(dtype)


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    nan = np.isnan(a) & np.isnan(b)
    wrong = np.flatnonzero(~nan & ((a != b) | (np.signbit(a) != np.signbit(b))))
    assert wrong.size == 0, (a[wrong[:4]], b[wrong[:4]])


@pytest.mark.parametrize("dtype", sorted(NATIVE))
def test_rounding_to_nearest_is_torchs(dtype):
    x = samples()
    if NATIVE[dtype].bits == 8:
        x = x[~(np.abs(x) > NATIVE[dtype].largest)]
    with np.errstate(all="ignore"):
        ours = formats.round_to(x, dtype)
    assert_same(ours, torch.from_numpy(x.copy()).to(NATIVE[dtype].native).float().numpy())


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("float4_e2m1fn", 6)])
def test_narrow_formats_saturate(dtype, largest):
    x = np.float32([largest, largest * 1.01, 1e9, np.inf])
    np.testing.assert_array_equal(formats.round_to(np.concatenate([x, -x]), dtype), np.float32([largest] * 4 + [-largest] * 4))
    np.testing.assert_array_equal(formats.round_to(x.astype(np.float64), dtype), np.float32([largest] * 4))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float64_is_rounded_once(dtype):
    """Through float32 the second value would round twice, to the wrong side."""
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    x = np.array([1 + eps / 2, 1 + eps / 2 + 2.0**-40, 1 + 3 * eps / 2 - 2.0**-40, 1 + eps / 2 - 2.0**-40])
    np.testing.assert_array_equal(formats.round_to(x, dtype), np.float32([1, 1 + eps, 1 + eps, 1]))


@pytest.mark.parametrize("dtype", sorted(NATIVE))
def test_memory_round_trip_is_torchs(dtype):
    x = torch.from_numpy(samples()).to(NATIVE[dtype].native)
    x = x[~x.float().isnan()]
    held = {1: torch.uint8, 2: torch.uint16}[x.element_size()]
    bits = x.view(torch.float16 if dtype == "float16" else held).numpy()
    values = formats.decode(bits, dtype)
    np.testing.assert_array_equal(values, x.float().numpy())
    np.testing.assert_array_equal(formats.encode(values, dtype).view(f"u{x.element_size()}"), bits.view(f"u{x.element_size()}"))


@pytest.mark.parametrize("dtype", sorted(n for n, f in formats.SMALL.items() if f.bits <= 8))
def test_every_code_of_a_narrow_format_survives(dtype):
    f = formats.SMALL[dtype]
    codes = np.arange(1 << f.bits, dtype=np.uint8)
    values = formats.decode(codes, dtype)
    real = ~np.isnan(values)
    np.testing.assert_array_equal(formats.encode(values, dtype)[real], codes[real])
    assert np.nanmax(values[np.isfinite(values)]) == f.largest


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tfloat32", "float8_e5m2", "float32"])
def test_directed_rounding_brackets_the_value(dtype):
    x = samples(np.float64)
    f = formats.SMALL.get(dtype, formats.FLOAT32)
    x = x[np.isfinite(x) & (np.abs(x) <= f.largest)]
    down, up, zero, near = (formats.round_to(x, dtype, mode).astype(np.float64) for mode in ("RM", "RP", "RZ", "RN"))
    assert (down <= x).all()
    assert (up >= x).all()
    assert (np.abs(zero) <= np.abs(x)).all()
    np.testing.assert_array_equal(np.where(x >= 0, down, up), zero)
    assert ((near == down) | (near == up)).all()
    assert (np.abs(near - x) <= np.abs(np.where(near == down, up, down) - x)).all()


def test_ties_away_from_zero():
    x = np.array([1 + 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-9])
    np.testing.assert_array_equal(formats.round_to(x, "bfloat16", "RA"), np.float32([1 + 2.0**-7, -1 - 2.0**-7, 1]))


def test_directed_overflow():
    x = np.array([1e6, -1e6])
    np.testing.assert_array_equal(formats.round_to(x, "float16", "RZ"), np.float32([65504, -65504]))
    np.testing.assert_array_equal(formats.round_to(x, "float16", "RP"), np.float32([np.inf, -65504]))
    np.testing.assert_array_equal(formats.round_to(x, "float16", "RM"), np.float32([65504, -np.inf]))


def test_pack_and_unpack_are_inverse():
    x = np.float32([0.5, -6, 1, 3, -0.0, 4, 2, 1.5])
    assert formats.pack(x, "float4_e2m1fn").tolist() == [0xF1, 0x52, 0x68, 0x34]
    for dtype in ("float4_e2m1fn", "bfloat16", "float16", "float8_e5m2", "float32"):
        np.testing.assert_array_equal(formats.unpack(formats.pack(x, dtype), dtype), x)


def test_bitcast_moves_bits():
    x = np.float32([1.0, -2.0])
    np.testing.assert_array_equal(formats.bitcast(x, "float32", "int32"), x.view(np.int32))
    np.testing.assert_array_equal(formats.bitcast(x, "bfloat16", "int16"), np.int16([0x3F80, 0xC000 - 0x10000]))
    assert formats.bitcast(np.int16(0x3C00), "int16", "float16") == 1.0


@pytest.mark.parametrize(("source", "target", "value", "expected"), [
    ("float32", "int32", -1.75, -1),
    ("float32", "bool_", 0.25, True),
    ("int64", "int8", 300, 44),
    ("int32", "float16", 2049, 2048),
    ("uint8", "float32", 255, 255),
    ("bool_", "float32", True, 1),
    ("float64", "float32", 1 + 2.0**-30, 1),
])  # fmt: skip
def test_conversion(source, target, value, expected):
    assert formats.astype(formats.constant(value, source), source, target) == expected
