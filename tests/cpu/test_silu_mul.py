"""Tests special to `silu_mul`: layouts, extremes, messages."""

import pytest
import torch
import torch.nn.functional as F

from tilewright import silu_mul
from tilewright.launch import Device, counted
from tilewright.ops import silu_mul as op
from tilewright.testing import assert_accurate


def test_reference_is_the_mlp_of_transformers():
    act = pytest.importorskip("transformers.activations").ACT2FN
    gate, up = (torch.randn(3, 50).to(torch.bfloat16) for _ in range(2))
    assert torch.equal(op.reference(gate, up), act["silu"](gate) * up)
    assert torch.equal(op.reference(gate, up, gelu_tanh=True), act["gelu_pytorch_tanh"](gate) * up)


@pytest.mark.parametrize("gelu_tanh", [False, True])
@pytest.mark.parametrize("cols", [33, 64])
def test_fused_and_separate_halves_have_the_same_bits(gelu_tanh, cols):
    both = torch.randn(3, 5, 2 * cols).to(torch.bfloat16)
    fused = silu_mul(both, gelu_tanh=gelu_tanh)
    assert fused.shape == (3, 5, cols)
    gate, up = both.chunk(2, -1)
    assert torch.equal(fused, silu_mul(gate, up, gelu_tanh=gelu_tanh))  # views of one tensor
    assert torch.equal(fused, silu_mul(gate.contiguous(), up, gelu_tanh=gelu_tanh))
    assert torch.equal(fused, silu_mul(gate.contiguous(), up.contiguous(), gelu_tanh=gelu_tanh))
    across = both.transpose(0, 1)  # leading axes that do not fold
    assert torch.equal(fused.transpose(0, 1), silu_mul(across, gelu_tanh=gelu_tanh))


@pytest.mark.parametrize("gelu_tanh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extremes(gelu_tanh, dtype):
    """Far out the gate is 0 or passes; nothing finite becomes NaN; what torch makes NaN is NaN."""
    top = torch.finfo(dtype).max
    gate = torch.tensor([0.0, 1e-6, -1e-6, 20.0, -20.0, 88.0, -88.0, 89.0, -104.0, 3e4, -3e4, top, -top], dtype=dtype)
    out = silu_mul(gate, torch.ones_like(gate), gelu_tanh=gelu_tanh)
    truth = op.reference(gate.double(), torch.ones_like(gate).double(), gelu_tanh=gelu_tanh)
    assert out.isfinite().all()
    torch.testing.assert_close(
        out.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=max(1e-36, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    )
    special = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    assert torch.equal(silu_mul(special, torch.ones_like(special)).isnan(), F.silu(special).isnan())


def test_one_axis():
    gate, up = torch.randn(100), torch.randn(100)
    assert_accurate(silu_mul(gate, up), op.reference(gate, up), op.reference(gate.double(), up.double()))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (5, 0)])
def test_empty_gives_empty_and_launches_nothing(shape):
    with counted() as counts:
        assert silu_mul(torch.empty(shape), torch.empty(shape)).shape == shape
        assert silu_mul(torch.empty(shape)).shape == (*shape[:-1], shape[-1] // 2)
    assert not counts


def test_tiles_of_real_widths_pad_nothing():
    """An activation of many rows should cost only its bytes; padded lanes would add to that."""
    for name in ("H200", "A100", "RTX5090"):
        device = Device.named(name)
        for cols in (896, 1536, 4864, 8960, 14_336, 18_944, 28_672):
            problem = op.Problem(8192, cols, torch.bfloat16)
            assert cols % op.space(problem, device)[0].tile_n == 0, (name, problem)


X = torch.zeros(4, 64)
BAD = [
    ({"gate": torch.tensor(1.0)}, ValueError, r"gate.dim\(\) must be at least 1, got 0"),
    ({"gate": X.int()}, ValueError, r"gate.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"gate": torch.zeros(64, 4).T}, ValueError, r"gate.stride\(-1\) must be 1, got 4"),
    ({"gate": X.clone().requires_grad_()}, ValueError, r"gate.requires_grad must be False"),
    ({"gate": torch.zeros(4, 63), "up": None}, ValueError, r"gate.shape\[-1\] must be even if up is not given, got 63"),
    ({"up": torch.zeros(4, 32)}, ValueError, r"up.shape must be \(4, 64\), got \(4, 32\)"),
    ({"up": X.half()}, ValueError, r"up.dtype must be float32, got float16"),
    ({"up": torch.zeros(64, 4).T}, ValueError, r"up.stride\(-1\) must be 1, got 4"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        silu_mul(**{"gate": X, "up": X, **change})
    assert not counts
