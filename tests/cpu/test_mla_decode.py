"""Tests special to `mla_decode`: that absorbed is expanded, its scale, and its messages."""

import binaries
import pytest
import torch

from tilewright import quantize_fp8
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, forced_config, traced
from tilewright.ops.attention_decode import Config
from tilewright.ops.mla_decode import mla_decode, plan, reference

HEADS, LATENT, ROPE, NOPE, VALUE = 5, 64, 16, 24, 24


pytestmark = pytest.mark.usefixtures("inference")


def test_absorbed_is_expanded():
    """Against DeepSeek's prefill form in float64, with keys and values of every head expanded.

    The scale is over NOPE + ROPE.
    """
    q_nope, q_rope = torch.randn(2, HEADS, 1, NOPE).double(), torch.randn(2, HEADS, 1, ROPE).double().half().double()
    w_k, w_v = (torch.randn(HEADS, n, LATENT).double() / LATENT**0.5 for n in (NOPE, VALUE))
    cache = torch.randn(2, 70, LATENT + ROPE).half().double()
    scale = (NOPE + ROPE) ** -0.5
    latents, rope = cache[..., :LATENT], cache[..., LATENT:]
    keys = torch.cat((torch.einsum("bnl,hdl->bhnd", latents, w_k), rope[:, None].expand(-1, HEADS, -1, -1)), -1)
    values = torch.einsum("bnl,hdl->bhnd", latents, w_v)
    expected = (torch.cat((q_nope, q_rope), -1) @ keys.mT * scale).softmax(-1) @ values
    q_latent = torch.einsum("bhtd,hdl->bhtl", q_nope, w_k)
    found = mla_decode(q_latent.half(), q_rope.half(), cache.half(), scale=scale)
    torch.testing.assert_close(torch.einsum("bhtl,hdl->bhtd", found.double(), w_v), expected, rtol=1e-2, atol=4e-3)
    wrong = mla_decode(q_latent.half(), q_rope.half(), cache.half(), scale=(LATENT + ROPE) ** -0.5)
    assert (torch.einsum("bhtl,hdl->bhtd", wrong.double(), w_v) - expected).abs().max() > 0.05


WIDE_CODES = Config(64, 2, True, rows=16, parts=16, late=True, sliced=True)  # Hopper's and Blackwell's, of more than 256 columns


@pytest.mark.parametrize(("latent", "config"), [(LATENT, Config(64, 2)), (256, WIDE_CODES)])
def test_codes_with_a_scale_for_each_token_are_the_rows_they_stand_for(latent, config):
    torch.manual_seed(0)
    q_latent, q_rope = torch.randn(2, HEADS, 1, latent).half() / 2, torch.randn(2, HEADS, 1, ROPE).half()
    rows = (torch.randn(2, 70, latent + ROPE) * torch.exp2(torch.randn(2, 70, 1))).half()
    codes, scale = quantize_fp8(rows, block=(1, None))
    kv_len = torch.tensor([70, 3], dtype=torch.int32)
    codes[1, 3:], scale[1, 3:] = torch.nan, torch.nan  # memory that holds no key
    with forced_config(plan, config):
        found = mla_decode(q_latent, q_rope, codes, kv_len, scale=0.1, cache_scale=scale)
    held = torch.nan_to_num(codes.double() * scale.double()[..., None])
    expected = reference(q_latent.double(), q_rope.double(), held, kv_len, scale=0.1)
    assert (found - expected).abs().max() < 2**-9 * expected.abs().max()
    from_16_bits = mla_decode(q_latent, q_rope, rows, kv_len, scale=0.1)
    assert 0.01 < (found - from_16_bits).abs().max() / from_16_bits.abs().max() < 0.1


CODES = torch.zeros(1, 5, 80).to(torch.float8_e4m3fn)
WRONG_CODES = [
    ({"cache": CODES}, ValueError, r"cache_scale must be given for float8_e4m3fn, as fp32 of shape \(1, 5\), got None"),
    ({"cache": CODES.half(), "cache_scale": torch.ones(1, 5)}, ValueError, "cache_scale must be None for float16, got Tensor"),
    ({"cache": CODES, "cache_scale": torch.ones(1, 4)}, ValueError, r"cache_scale.shape must be \(1, 5\), got \(1, 4\)"),
    ({"cache": torch.zeros(1, 5, 90).to(CODES.dtype)[..., 5:85], "cache_scale": torch.ones(1, 5)}, ValueError, "cache's strides and offset must be"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG_CODES)
def test_codes_and_scales_that_do_not_fit_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        mla_decode(torch.zeros(1, 1, 1, 64).half(), torch.zeros(1, 1, 1, 16).half(), scale=1.0, **change)


def test_the_scale_has_no_default():
    """(latent + rope) ** -0.5 would be wrong for every model."""
    with pytest.raises(TypeError, match="scale"):
        mla_decode(torch.zeros(1, 1, 1, 64).half(), torch.zeros(1, 1, 1, 16).half(), torch.zeros(1, 5, 80).half())


@pytest.mark.parametrize("config", [Config(16, 3), Config(32, 2, True), Config(16, 2, heads=2, rows=64), Config(32, 1, parts=2, columns=32)])
def test_pages_are_the_contiguous_cache_and_stale_ones_do_not_matter(config):
    q_latent, q_rope = torch.randn(3, HEADS, 2, LATENT).half(), torch.randn(3, HEADS, 2, ROPE).half()
    cache = torch.randn(3, 64, LATENT + ROPE).half()
    kv_len = torch.tensor([64, 1, 33], dtype=torch.int32)
    table = torch.randperm(12).view(3, 4).int()
    pages = torch.full((12, 16, LATENT + ROPE), torch.nan).half()
    for b in range(3):
        for i in range(4):
            held = max(0, min(16, int(kv_len[b]) - 16 * i))
            pages[table[b, i], :held] = cache[b, 16 * i : 16 * i + held]
    table = torch.where(torch.arange(4) * 16 < kv_len[:, None], table, 2147480000)
    with forced_config(plan, config):
        found = mla_decode(q_latent, q_rope, pages, kv_len, scale=0.1, block_table=table, return_lse=True)
        expected = mla_decode(q_latent, q_rope, cache, kv_len, scale=0.1, return_lse=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert (found[1][1, :, 0] == -torch.inf).all()  # one key, two tokens: the first sees none
    assert torch.equal(found[0][1, :, 0], torch.zeros(HEADS, LATENT).half())


def test_neither_queries_nor_cache_are_copied():
    """One kernel, or two with a merge; no concatenation."""
    with traced(Device.named("H200")) as launches:
        arguments = (torch.empty(1, 16, 1, n, device="meta", dtype=torch.bfloat16) for n in (512, 64))
        mla_decode(*arguments, torch.empty(1, 4096, 576, device="meta", dtype=torch.bfloat16), scale=0.11472)
    assert [launch.launch.name for launch in launches] == ["attention_decode_kernel", "attention_decode_merge_kernel"]


@pytest.mark.parametrize(("heads", "page_size"), [(8, 0), (16, 0), (128, 0), (16, 64), (128, 64)])
def test_hopper_loads_the_next_keys_while_it_multiplies_these(heads, page_size):
    """Two tiles of keys beside the queries, a producer warp, asynchronous products.

    With two loops the compiler keeps one tile.
    """

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device="meta", dtype=dtype)

    device = Device.named("H200")
    with traced(device) as launches:
        table = meta(128, 64, dtype=torch.int32) if page_size else None
        cache = meta(8192, page_size, 576) if page_size else meta(128, 4096, 576)
        queries = meta(128, heads, 1, 512), meta(128, heads, 1, 64)
        mla_decode(*queries, cache, meta(128, dtype=torch.int32), scale=0.1, block_table=table)
    resources = binaries.made(Job.of(launches[0], device.arch)).resources
    assert not resources.spills
    assert resources.shared_bytes > (min(heads, 64) + 2 * 64) * 512 * 2
    assert resources.count("USETMAXREG") > 0
    assert resources.count("WARPGROUP") < resources.count("HGMMA")


Q, R, CACHE = torch.zeros(2, 4, 1, 64).half(), torch.zeros(2, 4, 1, 16).half(), torch.zeros(2, 32, 80).half()
BAD = [
    ({"q_latent": Q.float()}, ValueError, r"q_latent.dtype must be one of bfloat16, float16, got float32"),
    ({"q_latent": torch.zeros(2, 4, 1, 96).half()}, ValueError, r"q_latent.shape\[3\] must be 64, 128, 256 or 512, got 96"),
    ({"q_latent": torch.zeros(2, 4, 5, 64).half()}, ValueError, r"q_latent.shape\[2\] must be in 1..4, got 5"),
    (
        {"q_rope": R[:1]},
        ValueError,
        r"q_rope.shape must be \(2, 4, 1, rope\), rope a power of two, at least 16 and less than 64, got \(1, 4, 1, 16\)",
    ),
    ({"q_rope": R[..., :8]}, ValueError, r"q_rope.shape must be"),
    ({"cache": CACHE[..., :64]}, ValueError, r"cache.shape must be \(2, 32, 80\), got \(2, 32, 64\)"),
    ({"cache": CACHE[:, None]}, ValueError, r"cache.dim\(\) must be 3, got 4"),
    ({"scale": 0.0}, ValueError, r"scale must be positive, got 0.0"),
    ({"kv_len": torch.zeros(3, dtype=torch.int32)}, ValueError, r"kv_len.shape must be \(2,\), got \(3,\)"),
    ({"cache": CACHE[:, :12], "block_table": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, r"the page size must be a power of two"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        mla_decode(**{"q_latent": Q, "q_rope": R, "cache": CACHE, "scale": 0.1, **change})
    assert not counts
