"""Tests special to `rms_norm`: equality with other definitions, views, extremes, messages."""

import pytest
import torch
import torch.nn.functional as F

from tilewright import rms_norm
from tilewright.launch import Device, counted, forced_config
from tilewright.ops import rms_norm as op
from tilewright.testing import assert_accurate

BF16 = torch.bfloat16


def test_reference_is_torchs_definition_and_transformers():
    x, weight = torch.randn(5, 64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    torch.testing.assert_close(op.reference(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))

    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(64, eps=1e-5).to(BF16)
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(64, eps=1e-5).to(BF16)
    with torch.no_grad():
        x = torch.randn(7, 64).to(BF16)
        llama.weight.copy_(torch.randn(64))
        gemma.weight.copy_(torch.randn(64))
        assert torch.equal(op.reference(x, llama.weight, 1e-5, round_before_weight=True), llama(x))
        assert torch.equal(op.reference(x, gemma.weight, 1e-5, weight_offset=1.0), gemma(x))


def test_residual_returns_the_rounded_sum_and_leaves_its_inputs_alone():
    x, residual, weight = (torch.randn(s).to(BF16) for s in ((3, 5, 40), (3, 5, 40), (40,)))
    before = x.clone(), residual.clone()
    out, new_residual = rms_norm(x, weight, residual=residual)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(out, rms_norm(x + residual, weight))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("view", ["columns of a wider tensor", "transposed leading axes", "one axis"])
def test_views(view):
    wide = torch.randn(4, 6, 32)
    x = {"columns of a wider tensor": wide[..., :20], "transposed leading axes": wide.transpose(0, 1), "one axis": wide[0, 0]}[view]
    weight = torch.randn(x.shape[-1])
    out = rms_norm(x, weight)
    assert out.shape == x.shape
    assert out.is_contiguous()
    assert_accurate(out, op.reference(x, weight), op.reference(x.double(), weight.double()))


def test_a_nan_stays_in_its_row_and_a_zero_row_is_zero():
    x = torch.randn(8, 70)
    x[3, 69] = torch.nan
    x[5] = 0
    for config in op.space(op.Problem(8, 70, torch.float32), Device.named("CPU")):
        with forced_config(op.plan, config):
            out = rms_norm(x, torch.ones(70))
        assert out[3].isnan().all()
        assert not out[[0, 1, 2, 4, 6, 7]].isnan().any()
        assert (out[5] == 0).all()


def test_squares_beyond_fp16_do_not_overflow():
    x = torch.full((2, 600), 60_000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(600, dtype=torch.float16)), torch.ones_like(x))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (5, 0)])
def test_empty_gives_empty_and_launches_nothing(shape):
    x, weight = torch.empty(shape), torch.empty(shape[-1])
    with counted() as counts:
        assert rms_norm(x, weight).shape == shape
        out, new_residual = rms_norm(x, weight, residual=x)
    assert out.shape == new_residual.shape == shape
    assert not counts


X, W = torch.zeros(4, 64), torch.zeros(64)
BAD = [
    ({"x": torch.tensor(1.0)}, ValueError, r"x.dim\(\) must be at least 1, got 0"),
    ({"x": X.int()}, ValueError, r"x.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"x": X.double()}, ValueError, r"x.dtype must be one of .*, got float64"),
    ({"x": torch.zeros(64, 4).T}, ValueError, r"x.stride\(-1\) must be 1, got 4: give x.contiguous\(\), a copy$"),
    ({"x": X.to_sparse()}, ValueError, r"x.layout must be torch.strided, got torch.sparse_coo"),
    ({"x": X.clone().requires_grad_()}, ValueError, r"x.requires_grad must be False, got True: .*no_grad"),
    ({"weight": torch.zeros(32)}, ValueError, r"weight.shape must be \(64,\), got \(32,\)"),
    ({"weight": W[None]}, ValueError, r"weight.shape must be \(64,\), got \(1, 64\)"),
    ({"weight": W.half()}, ValueError, r"weight.dtype must be float32, got float16"),
    ({"weight": None}, TypeError, r"weight must be a torch.Tensor, got NoneType"),
    ({"residual": torch.zeros(5, 64)}, ValueError, r"residual.shape must be .*\(4, 64\).*, got \(5, 64\)"),
    ({"residual": X.half()}, ValueError, r"residual.dtype must be float32, got float16"),
    ({"residual": torch.zeros(64, 4).T}, ValueError, r"residual.stride\(-1\) must be 1, got 4"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        rms_norm(**{"x": X, "weight": W, **change})
    assert not counts
