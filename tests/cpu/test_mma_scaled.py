"""Products of block-scaled operands (mxfp8, mxfp4, nvfp4), which Blackwell's tensor cores scale
themselves: interpreted against float64, and compiled. No op has them yet, and none was timed.
"""

import cuda.tile as ct
import pytest
import torch

import tilewright
from tilewright.ops.common.weight_formats import E2M1, FORMATS, values

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def scaled_product(a, scale_a, b, scale_b, out, TILE: Int, TILE_K: Int, GROUP: Int):
    """out [m, n] = (a * scale_a) @ (b * scale_b).T; of 4-bit codes the lower one is first."""
    HALVES = 2 if a.dtype == ct.uint8 else 1

    def codes(X, i, k):
        x = ct.load(X, (i, k), (TILE, TILE_K // HALVES), padding_mode=ZERO)
        return x if HALVES == 1 else ct.unpack_from_bytes(x.reshape((TILE * TILE_K // 2,)), ct.float4_e2m1fn).reshape((TILE, TILE_K))

    i, j = ct.bid(0), ct.bid(1)
    acc = ct.zeros((TILE, TILE), ct.float32)
    for k in range(ct.cdiv(a.shape[1], TILE_K // HALVES)):
        s = ct.load(scale_a, (i, k), (TILE, TILE_K // GROUP), padding_mode=ZERO)
        t = ct.load(scale_b, (j, k), (TILE, TILE_K // GROUP), padding_mode=ZERO)
        acc = ct.mma_scaled(codes(a, i, k), s, codes(b, j, k).transpose(), t.transpose(), acc)
    ct.store(out, (i, j), acc.astype(out.dtype))


E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
KINDS = {"mxfp8": (1, 32, E8M0), "mxfp4": (2, 32, E8M0), "nvfp4": (2, 16, E4M3)}


def operand(rows, k, halves, group, scale_dtype):
    """Codes, scales and what they stand for, in float64."""
    scale = (2.0 ** torch.randint(-3, 4, (rows, k // group))).to(scale_dtype)
    if halves == 1:
        codes = torch.randn(rows, k).to(E4M3)
        wide = codes.double()
    else:
        fours = torch.randint(0, 16, (rows, k))
        codes = (fours[:, ::2] | fours[:, 1::2] << 4).to(torch.uint8)
        wide = values(fours, FORMATS["mxfp4"], torch.float64)
    return codes, scale, wide * scale.double().repeat_interleave(group, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_products_of_scaled_blocks_are_those_of_float64(kind):
    halves, group, scale_dtype = KINDS[kind]
    torch.manual_seed(0)
    a, scale_a, wide_a = operand(40, 512, halves, group, scale_dtype)
    b, scale_b, wide_b = operand(24, 512, halves, group, scale_dtype)
    out = torch.full((40, 24), torch.nan)
    tilewright.interpret(scaled_product, (2, 1), (a, scale_a, b, scale_b, out, 32, 128, group))
    expected = wide_a @ wide_b.T
    assert (out.double() - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_they_compile_for_blackwell_without_a_spill(kind):
    halves, group, scale_dtype = KINDS[kind]
    m, k = 1024, 4096
    codes = torch.empty(m, k // halves, dtype=E4M3 if halves == 1 else torch.uint8, device="meta")
    scale = torch.empty(m, k // group, dtype=scale_dtype, device="meta")
    out = torch.empty(m, m, dtype=torch.bfloat16, device="meta")
    archs = {"mxfp8": ("sm_100",), "mxfp4": ("sm_103",), "nvfp4": ("sm_121",)}[kind]
    report = tilewright.compile_report(scaled_product, (8, 8), (codes, scale, codes, scale, out, 128, 128 * halves, group), arch=archs)
    for arch in archs:
        assert report[arch].resources.matrix, report
        assert report[arch].resources.stack_bytes == 0


def test_e2m1_codes_are_what_the_formats_say():
    assert values(torch.arange(16), FORMATS["mxfp4"], torch.float64).tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert FORMATS["mxfp4"].code == E2M1
