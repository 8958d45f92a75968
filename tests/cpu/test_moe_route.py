"""Tests special to `moe_route`: ties, special numbers, groups, messages."""

import pytest
import torch

from tilewright import moe_route
from tilewright.launch import Device, counted
from tilewright.ops import moe_route as op

pytestmark = pytest.mark.usefixtures("inference")


def test_equal_scores_go_to_the_lower_index():
    logits = torch.zeros(3, 10)
    logits[1, 7] = logits[1, 4] = 1.0
    weights, ids = moe_route(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [4, 7, 0, 1], [0, 1, 2, 3]]
    assert ids.dtype is torch.int32
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def test_the_bias_selects_and_does_not_weigh():
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    weights, ids = moe_route(logits, 2, sigmoid=True, bias=torch.tensor([0.0, 0.0, 5.0]), normalize=False, scale=3.0)
    assert ids.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, 3 * torch.sigmoid(torch.tensor([[-1.0, 1.0]])))


def test_groups_count_by_their_best_expert_or_with_a_bias_by_the_best_two():
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.5, 0.0, 0.0]])
    common = {"sigmoid": True, "groups": 3, "top_groups": 1}
    assert moe_route(logits, 2, **common)[1].tolist() == [[0, 1]]
    assert moe_route(logits, 2, bias=torch.zeros(6), **common)[1].tolist() == [[3, 2]]


@pytest.mark.parametrize("groups", [0, 4])
def test_ids_are_distinct_experts_whatever_the_logits(groups):
    logits = torch.randn(40, 24)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4] = -1e30
    logits[5, :23] = -torch.inf
    for sigmoid in (False, True):
        weights, ids = moe_route(logits, 6, sigmoid=sigmoid, groups=groups, top_groups=2 if groups else 0)
        assert ids.min() >= 0
        assert ids.max() < 24
        assert all(len(set(row)) == 6 for row in ids.tolist())
        assert weights[6:].isfinite().all()
        assert weights[5].isfinite().all()


def test_a_nan_is_the_largest():
    logits = torch.zeros(1, 8)
    logits[0, 6] = torch.nan
    weights, ids = moe_route(logits, 2, sigmoid=True, normalize=False)
    assert ids.tolist() == [[6, 0]]
    assert weights[0, 0].isnan()
    assert weights[0, 1] == 0.5


def test_it_is_what_transformers_computes_for_deepseek_v3():
    """Its masked experts have score 0, so it is compared where all scores are above that."""
    logits, bias = torch.randn(20, 32), torch.rand(32)
    scores = logits.sigmoid()
    chosen_by = scores + bias
    best = chosen_by.view(20, 8, 4).topk(2, -1).values.sum(-1).topk(4, -1).indices
    kept = torch.zeros(20, 8).scatter(1, best, 1.0).bool().repeat_interleave(4, 1)
    ids = chosen_by.masked_fill(~kept, 0.0).topk(5, -1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    found = moe_route(logits, 5, sigmoid=True, bias=bias, scale=2.5, groups=8, top_groups=4)
    assert torch.equal(found[1].long(), ids)
    torch.testing.assert_close(found[0], weights)


def test_a_slice_of_wider_logits_is_read_in_place_and_none_launch_nothing():
    logits = torch.randn(9, 40)[:, 8:24]
    for found, wanted in zip(moe_route(logits, 3), op.reference(logits, 3), strict=True):
        torch.testing.assert_close(found, wanted)
    with counted() as counts:
        weights, ids = moe_route(torch.empty(0, 16), 3)
    assert weights.shape == ids.shape == (0, 3)
    assert not counts


def test_the_number_of_tokens_is_no_constant():
    device = Device.named("H200")
    for tokens in (5, 100, 4096):
        plans = [op.plan(p, op.space(p, device)[0], device) for p in (op.Problem(tokens + i, 128, 8) for i in range(4))]
        assert len({launch.compiled for (launch,) in plans}) == 1


X = torch.zeros(4, 12)
BAD = [
    ({"logits": X.int()}, ValueError, r"logits.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"logits": X[0]}, ValueError, r"logits.dim\(\) must be 2, got 1"),
    ({"logits": torch.zeros(4, 0)}, ValueError, r"logits.shape\[1\] must be 1 to 1024, the number of experts, got 0"),
    ({"top_k": 0}, ValueError, r"top_k must be 1 to 12, got 0"),
    ({"top_k": 13}, ValueError, r"top_k must be 1 to 12, got 13"),
    ({"groups": 5, "top_groups": 1}, ValueError, r"groups must be 0 or a divisor of 12, the number of experts, got 5"),
    ({"groups": 4, "top_groups": 5}, ValueError, r"top_groups must be 1 to 4, the number of groups, got 5"),
    ({"groups": 4, "top_groups": 1, "top_k": 4}, ValueError, r"top_groups must be enough groups of 3 experts for top_k = 4, got 1"),
    ({"top_groups": 1}, ValueError, r"top_groups must be 0 without groups, got 1"),
    ({"bias": torch.zeros(11)}, ValueError, r"bias.shape must be \(12,\), got \(11,\)"),
    ({"bias": torch.zeros(12).half()}, ValueError, r"bias.dtype must be float32, got float16"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        moe_route(**{"logits": X, "top_k": 2, **change})
    assert not counts
