"""Windows of two sides in `attention`."""

import pytest
import torch

from tilewright import attention

pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize(
    ("sides", "same"),
    [
        ((9, 0), {"window": 10}),
        ((None, 0), {}),
        ((9, None), {"window": 10, "causal": False}),
        ((2**40, 2**40), {"causal": False}),
        ((9, 2**31 - 5), {"window": 10, "causal": False}),
    ],
)
def test_a_window_of_two_sides_is_the_mask_that_sees_the_same_keys(sides, same):
    q, k, v = torch.randn(2, 2, 20, 16), torch.randn(2, 1, 30, 16), torch.randn(2, 1, 30, 16)
    assert torch.equal(attention(q, k, v, causal=False, window=sides), attention(q, k, v, **same))


@pytest.mark.parametrize(
    ("causal", "window", "message"),
    [
        (True, (3, 2), r"window must be one number with causal=True, got \(3, 2\)"),
        (False, (3, -1), r"window must be \(before, behind\), each an integer of at least 0, or None, got"),
        (False, (3,), r"window must be a number, or \(before, behind\), got \(3,\)"),
    ],
)
def test_what_is_no_window_is_refused(causal, window, message):
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, causal=causal, window=window)
