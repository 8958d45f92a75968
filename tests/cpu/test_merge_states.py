"""Tests special to `merge_states`: its algebra, its bases, and the traps."""

import math

import pytest
import torch

from tilewright.launch import counted
from tilewright.ops.attention_decode import attention_decode
from tilewright.ops.merge_states import merge_states

pytestmark = pytest.mark.usefixtures("inference")


def states(n: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, *shape), 3 * torch.randn(n, *shape[:-1])


def test_parts_of_a_context_merge_into_the_whole():
    q, k, v = torch.randn(2, 6, 1, 32), torch.randn(2, 2, 90, 32), torch.randn(2, 2, 90, 32)
    parts = [attention_decode(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 17), (17, 64), (64, 90))]
    found = merge_states(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    for a, b in zip(found, attention_decode(q, k, v, return_lse=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_order_and_grouping_do_not_matter():
    out, lse = states(4, 5, 16)
    whole = merge_states(out, lse)
    order = torch.tensor([2, 0, 3, 1])
    left, right = merge_states(out[:2], lse[:2]), merge_states(out[2:], lse[2:])
    pairs = merge_states(torch.stack((left[0], right[0])), torch.stack((left[1], right[1])))
    for other in (merge_states(out[order], lse[order]), pairs):
        for a, b in zip(other, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_base_is_that_of_the_logs():
    """Natural logs read as logs to base 2 (FlashInfer's) give errors far beyond rounding."""
    out, lse = states(2, 50, 16)
    natural, natural_lse = merge_states(out, lse)
    base2, base2_lse = merge_states(out, lse / math.log(2), base2=True)
    torch.testing.assert_close(base2, natural, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(base2_lse * math.log(2), natural_lse, rtol=1e-5, atol=1e-5)
    assert (merge_states(out, lse, base2=True)[0] - natural).abs().max() > 0.05


@pytest.mark.parametrize("empty", [-math.inf, math.inf])  # FlashMLA marks an empty set by +inf
def test_an_empty_set_is_left_out_whatever_its_row_holds(empty):
    """-inf - -inf is NaN, and so is 0 * NaN."""
    out, lse = states(3, 4, 16)
    lse[1] = empty
    out[1] = math.nan
    found = merge_states(out, lse)
    expected = merge_states(out[::2].contiguous(), lse[::2].contiguous())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    lse[:, 0] = empty
    none, none_lse = merge_states(out, lse)
    assert torch.equal(none[0], torch.zeros(16))
    assert none_lse[0] == -math.inf
    assert none[1:].isfinite().all()


def test_large_logs_do_not_overflow():
    out, lse = states(2, 3, 16)
    far, far_lse = merge_states(out, lse + 1000)
    near, near_lse = merge_states(out, lse)
    torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(far_lse - 1000, near_lse, rtol=1e-3, atol=1e-3)


def test_states_may_be_strided():
    out, lse = torch.randn(5, 4, 3, 16).transpose(0, 2), torch.randn(4, 3, 5).transpose(0, 1)
    for a, b in zip(merge_states(out, lse), merge_states(out.contiguous(), lse.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_states_may_be_single_rows():
    out, lse = torch.randn(3, 16), torch.randn(3)
    for a, b in zip(merge_states(out, lse), merge_states(out[:, None], lse[:, None]), strict=True):
        assert torch.equal(a, b[0])


def test_no_rows_launch_nothing():
    with counted() as counts:
        out, lse = merge_states(torch.zeros(2, 0, 16), torch.zeros(2, 0))
    assert out.shape == (0, 16)
    assert lse.shape == (0,)
    assert not counts


OUT, LSE = torch.zeros(2, 3, 16), torch.zeros(2, 3)
BAD = [
    ({"states": OUT.double()}, ValueError, r"states.dtype must be one of bfloat16, float16, float32, got float64"),
    ({"states": torch.zeros(65, 3, 16)}, ValueError, r"states.shape must be 1..64 states of 1..512 columns, got \(65, 3, 16\)"),
    ({"states": OUT[0, 0]}, ValueError, r"states.dim\(\) must be at least 2, got 1"),
    ({"states_lse": LSE[:1]}, ValueError, r"states_lse.shape must be \(2, 3\), got \(1, 3\)"),
    ({"states_lse": LSE.half()}, ValueError, r"states_lse.dtype must be float32, got float16"),
    ({"states_lse": None}, TypeError, r"states_lse must be a torch.Tensor, got NoneType"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        merge_states(**{"states": OUT, "states_lse": LSE, **change})
    assert not counts
