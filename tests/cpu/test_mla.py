"""Tests special to `mla`."""

import math

import pytest
import torch

from tilewright.launch import Device, counted
from tilewright.ops.attention import attention
from tilewright.ops.mla import Problem, mla, plan, reference, space

NOPE, ROPE, VALUE = 128, 64, 128


pytestmark = pytest.mark.usefixtures("inference")


def inputs(batch=2, heads=3, q_len=20, kv_len=50, dtype=torch.bfloat16):
    """Views of projections' results, as in a model."""
    q = torch.randn(batch, q_len, heads, NOPE + ROPE).to(dtype).transpose(1, 2)
    kv = torch.randn(batch, kv_len, heads, NOPE + VALUE).to(dtype).transpose(1, 2)
    k_rope = torch.randn(batch, 1, kv_len, ROPE).to(dtype)
    return {"q_nope": q[..., :NOPE], "q_rope": q[..., NOPE:], "k_nope": kv[..., :NOPE], "k_rope": k_rope, "v": kv[..., NOPE:]}


def test_it_is_attention_of_the_concatenated_parts():
    x = inputs()
    found, lse = mla(**x, return_lse=True)
    q = torch.cat((x["q_nope"], x["q_rope"]), -1)
    k = torch.cat((x["k_nope"], x["k_rope"].expand(-1, 3, -1, -1)), -1)
    whole, whole_lse = attention(q, k, x["v"], return_lse=True)
    torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    assert found.transpose(1, 2).is_contiguous()


def test_the_scale_is_that_of_both_parts():
    x = inputs()
    assert torch.equal(mla(**x), mla(**x, scale=(NOPE + ROPE) ** -0.5))
    lite = (NOPE + ROPE) ** -0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2  # DeepSeek-V2-Lite's, with YaRN's mscale
    assert lite == pytest.approx(0.11472, abs=1e-5)
    torch.testing.assert_close(mla(**x, scale=lite).float(), reference(**x, scale=lite).float(), rtol=2e-2, atol=2e-2)


def test_memory_behind_the_keys_may_hold_anything():
    x, length = inputs(), torch.tensor([31, 0], dtype=torch.int32)
    expected = mla(**x, kv_len=length, return_lse=True)
    for name in ("k_nope", "k_rope", "v"):
        x[name] = x[name].clone()
        x[name][0, :, 31:], x[name][1] = torch.nan, torch.nan
    found = mla(**x, kv_len=length, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (found[0][1] == 0).all()
    assert (found[1][1] == -torch.inf).all()


def test_without_keys_the_output_is_zero_and_nothing_is_launched():
    with counted() as counts:
        out, lse = mla(**inputs(kv_len=0), return_lse=True)
    assert not counts
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(("shape", "name"), [((70_000, 1), "batch"), ((1, 70_000), "heads")])
def test_batches_and_heads_beyond_the_grid_are_refused(shape, name):
    x = torch.zeros(*shape, 1, 16, dtype=torch.bfloat16)
    with counted() as counts, pytest.raises(ValueError, match=rf"^{name} of mla must be smaller .* got 70000$"):
        mla(x, x, k_nope=x, k_rope=x[:, :1], v=x)
    assert not counts


def test_a_length_of_the_moment_is_no_part_of_a_kernel():
    device = Device.named("H200")

    def constants(kv_len: int) -> tuple:
        p = Problem(1, 16, 100, kv_len, torch.bfloat16, has_len=True)
        launches = plan(p, space(p, device)[0], device)
        return tuple((name, value) for launch in launches for name, value in launch.constants.items())

    assert len({constants(n) for n in range(1030, 1060)}) == 1


ONES = {"q_scale": torch.ones(3), "k_scale": torch.ones(()), "v_scale": torch.ones(3)}
BAD = [
    ({"q_nope": None}, TypeError, r"q_nope must be a torch.Tensor, got NoneType"),
    ({"q_nope": torch.zeros(2, 3, 20, NOPE)}, ValueError, r"q_nope.dtype must be one of bfloat16, float16, float8_e4m3fn, got float32"),
    ({"q_rope": torch.zeros(2, 3, 19, ROPE).bfloat16()}, ValueError, r"q_rope.shape must be \(2, 3, 20, 64\), got \(2, 3, 19, 64\)"),
    ({"k_nope": torch.zeros(2, 1, 50, NOPE).bfloat16()}, ValueError, r"k_nope.shape must be \(2, 3, 50, 128\), got \(2, 1, 50, 128\)"),
    ({"k_rope": torch.zeros(2, 3, 50, ROPE).bfloat16()}, ValueError, r"k_rope.shape must be \(2, 1, 50, 64\), got \(2, 3, 50, 64\)"),
    ({"v": torch.zeros(2, 3, 49, 128).bfloat16()}, ValueError, r"v.shape must be \(2, 3, 50, 128\), got \(2, 3, 49, 128\)"),
    ({"v": torch.zeros(2, 3, 50, 192).bfloat16()}, ValueError, r"v.shape\[-1\] must be in 1..128, got 192"),
    ({"scale": -1.0}, ValueError, r"scale must be positive, got -1.0"),
    ({"kv_len": torch.zeros(3, dtype=torch.int32)}, ValueError, r"kv_len.shape must be \(2,\), got \(3,\)"),
    (ONES, ValueError, r"q_scale must be None for bfloat16, got Tensor"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        mla(**{**inputs(), **change})
    assert not counts


def test_codes_need_their_scales():
    x = {name: t.to(torch.float8_e4m3fn) for name, t in inputs().items()}
    assert mla(**x, **ONES).dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"k_scale.device must be cpu, got meta"):
        mla(**x, **{**ONES, "k_scale": torch.ones((), device="meta")})
    with pytest.raises(ValueError, match=r"k_scale.shape must be \(\), got \(3,\)"):
        mla(**x, **{**ONES, "k_scale": torch.ones(3)})
