"""Tests special to `rms_norm_route`: the ops that it stands for, its counter, ties, messages."""

import pytest
import torch

from tilewright import interpret, moe_route, rms_norm, rms_norm_route
from tilewright.launch import Device, counted
from tilewright.ops.rms_norm_route import Config, Problem, plan, rms_norm_route_out

BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("experts", [24, 136])
def test_it_is_rms_norm_and_a_product_and_moe_route_in_one_launch(experts):
    x, residual, weight, router = (torch.randn(s).to(BF16) for s in ((2, 96), (2, 96), (96,), (experts, 96)))
    how = {"sigmoid": True, "bias": 0.1 * torch.randn(experts), "scale": 2.5, "groups": 4, "top_groups": 2}
    for choice in ({}, how):
        with counted() as counts:
            weights, ids, normed, total = rms_norm_route(x, weight, router, 5, eps=1e-5, round_before_weight=True, residual=residual, **choice)
        assert counts == {"rms_norm_route_kernel": 1}
        expected, expected_total = rms_norm(x, weight, 1e-5, round_before_weight=True, residual=residual)
        assert torch.equal(normed, expected)
        assert torch.equal(total, expected_total)
        expected_weights, expected_ids = moe_route(normed.float() @ router.float().T, 5, **choice)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights)


def test_equal_scores_go_to_the_lower_index():
    for experts in (40, 200):
        _, ids, _ = rms_norm_route(torch.ones(1, 32, dtype=BF16), torch.ones(32, dtype=BF16), torch.ones(experts, 32, dtype=BF16), 6)
        assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_the_counter_is_zero_again_and_any_block_may_be_the_last():
    x, weight, router = (torch.randn(s).to(BF16) for s in ((3, 64), (64,), (130, 64)))
    arrived, weights, ids, out = torch.zeros(3, dtype=torch.int32), torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int32), torch.empty_like(x)
    found = []
    for order in (1, 2, 3):
        with interpret.checking(races=True, order=order):
            options = (1e-6, 0.0, False, False, True, 1.0, 0, 0, 0)
            rms_norm_route_out(x, weight, router, arrived, None, None, None, *options, weights, ids, out, None)
        assert arrived.eq(0).all()
        found.append((weights.clone(), ids.clone()))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_few_experts_are_chosen_by_a_warp_and_not_by_a_thread():
    """From 64 lanes on the compiler deals a row to a warp."""
    for experts, groups, lanes in ((8, 0, 64), (32, 0, 64), (128, 0, 128), (64, 8, 8)):
        problem = Problem(1, experts, 2880, 4, BF16, groups=groups, top_groups=groups)
        (launch,) = plan(problem, Config(1, 1024, 4), Device.named("H200"))
        assert launch.constants["tile_s"] == lanes


X, W, R = torch.zeros(1, 64, dtype=BF16), torch.zeros(64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
BAD = [
    ({"x": X.float()}, r"x.dtype must be one of bfloat16, float16, got float32"),
    ({"x": X.expand(65536, 64)}, r"x.shape\[0\] must be at most 65535 tokens \(of more: rms_norm, matmul, moe_route\), got 65536"),
    ({"x": X[0]}, r"x.dim\(\) must be 2, got 1"),
    ({"weight": W[:32]}, r"weight.shape must be \(64,\), got \(32,\)"),
    ({"router": R[:, :32]}, r"router.shape\[1\] must be 64, the k of x, got 32"),
    ({"router": R[:0]}, r"router.shape\[0\] must be 1 to 1024, the number of experts, got 0"),
    ({"top_k": 9}, r"top_k must be 1 to 8, got 9"),
    ({"groups": 3}, r"groups must be 0 or a divisor of 8"),
    ({"first_expert": 8}, r"first_expert must be 0 to 7, got 8"),
    ({"bias": torch.zeros(64)}, r"bias.shape must be \(8,\), got \(64,\)"),
    ({"router_bias": torch.zeros(8)}, r"router_bias.dtype must be bfloat16, got float32"),
    ({"residual": R}, r"residual.shape must be \(1, 64\), got \(8, 64\)"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, message):
    with counted() as counts, pytest.raises(ValueError, match=message):
        rms_norm_route(**{"x": X, "weight": W, "router": R, "top_k": 2, **change})
    assert not counts
