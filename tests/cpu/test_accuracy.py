"""The accuracy rule sees what a global score does not."""

import pytest
import torch

from tilewright.testing import accuracy, assert_accurate, embed, poisoned_empty


@pytest.fixture
def triple():
    torch.manual_seed(0)
    a, b = torch.randn(128, 256).bfloat16(), torch.randn(256, 512).bfloat16()
    return (a.float() @ b.float()).bfloat16(), a @ b, a.double() @ b.double()


def test_fp32_accumulation_rounded_once_passes(triple):
    assert accuracy(*triple).ok


@pytest.mark.parametrize("size", [1, 8, 16, 24])
def test_one_wrong_tile_fails_and_is_named(triple, size):
    ours, theirs, truth = triple
    ours = ours.clone()
    ours[32 : 32 + size, 64 : 64 + size] = 0
    with pytest.raises(AssertionError, match=r"element \(\d+, \d+\) is 0"):
        assert_accurate(ours, theirs, truth)


def test_nan_fails(triple):
    ours, theirs, truth = triple
    ours = ours.clone()
    ours[3, 5] = torch.nan
    found = accuracy(ours, theirs, truth)
    assert not found.ok
    assert found.worst_index == (3, 5)


def test_a_column_of_noise_above_the_rounding_fails(triple):
    _, theirs, truth = triple
    noisy = (truth + 8 * (theirs.double() - truth).abs().max() * torch.randn_like(truth).sign() * (torch.arange(512) == 7)).bfloat16()
    assert not accuracy(noisy, theirs, truth).ok


def test_bits_equal_to_torch_pass_and_equal_infinities_are_no_error():
    truth = torch.tensor([1.0, -torch.inf, 3.0], dtype=torch.float64)
    assert accuracy(truth.float(), truth.float(), truth).ok
    finite = torch.tensor([1.0, -1e30, 3.0])
    assert not accuracy(finite, truth.float(), truth).ok


def test_one_ulp_is_allowed_and_two_are_not():
    truth = torch.tensor([1.5, 100.0], dtype=torch.float64)
    exact = truth.float()
    eps = torch.finfo(torch.float32).eps
    assert accuracy(exact + torch.tensor([0.0, 64 * eps]), exact, truth).worst_ratio == pytest.approx(1.0)
    assert accuracy(exact + torch.tensor([0.0, 128 * eps]), exact, truth).worst_ratio > 1.5


def test_shapes_and_dtypes_must_agree():
    x = torch.ones(4)
    with pytest.raises(ValueError, match="shapes must agree"):
        accuracy(torch.ones(3), x, x.double())
    with pytest.raises(ValueError, match=r"ours\.dtype must be torch\.float32, got torch\.float16"):
        accuracy(x.half(), x, x.double())


def test_empty_result_is_accurate():
    empty = torch.empty(0, 4)
    assert accuracy(empty, empty, empty.double()).ok


def test_several_roundings_are_judged_together():
    """The one by itself is exact by chance; together they leave twice their RMS error."""
    truth = torch.ones(8, dtype=torch.float64)
    exact, off = truth.float(), truth.float() + 0.01
    assert not accuracy(off, exact, truth).ok
    found = accuracy(off, torch.stack((exact, off)), truth)
    assert found.rms_ratio == pytest.approx(2**-0.5, rel=1e-3)
    assert found.worst_ratio == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(ValueError, match="shapes must agree"):
        accuracy(off, torch.stack((exact, off))[:, :4], truth)


def test_poisoned_empty_is_nan_inside_and_restores_outside():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_empty():
        assert torch.empty(100).isnan().all()
        assert torch.empty_like(torch.ones(10, dtype=torch.bfloat16)).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_embed_keeps_values_and_strides_and_surrounds_with_nan():
    x = torch.arange(12.0).reshape(3, 4).t()
    inside = embed(x)
    assert torch.equal(inside, x)
    assert inside.stride() == x.stride()
    storage = torch.empty(0).set_(inside.untyped_storage())
    assert storage.isnan().sum() == storage.numel() - 12
    assert inside.data_ptr() % 16 == 0
