"""Bugs that were planted and that no other test found."""

import dataclasses
import os
from pathlib import Path

import cuda.tile as ct
import numpy as np
import pytest
import torch
from configs import interpreted
from tiny_models import tiny_model
from transformers import DynamicCache

from tilewright import ops
from tilewright.interpret import interpret
from tilewright.interpret.formats import round_to
from tilewright.launch import Device, forced_config
from tilewright.models import patch
from tilewright.ops import attention as attention_op, attention_decode as decode_op, sample as sample_op
from tilewright.ops.attention import attention
from tilewright.ops.attention_decode import attention_decode
from tilewright.ops.moe_route import moe_route
from tilewright.ops.rms_norm import rms_norm
from tilewright.ops.sample import sample
from tilewright.testing import accuracy, assert_accurate, check_op, op_name
from tilewright.testing.cases import cases
from tilewright.testing.definitions import DEFINITIONS
from tilewright.tune import store


def test_decode_sees_a_sliding_window_of_a_cache_that_holds_more():
    model = tiny_model({"model_type": "mistral", "sliding_window": 5})
    torch.manual_seed(0)
    ids = torch.randint(3, 90, (2, 13))

    def steps():
        cache = DynamicCache()  # without a config it keeps every key
        model(ids[:, :9], past_key_values=cache)
        return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(9, 13)], 1)

    with torch.inference_mode():
        stock = steps()
        with patch(model) as report:
            ours = steps()
    assert "attention  self_attn" in str(report), report  # patch keeps PyTorch's where ours differs
    torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("window", "more"), [(2, 0), (66, 0), (None, 62), (None, 126), (None, 254)])
def test_tiles_of_masks_end_where_the_masks_do(window, more):
    """Two keys before a tile of keys begins, and two keys before it ends, in every H200 config that
    the interpreter can tell from the others.
    """
    torch.manual_seed(more)
    q, k, v = torch.randn(1, 1, 270, 16).half(), *(torch.randn(1, 1, 270 + more, 16).half() for _ in range(2))
    options = {"causal": True, "window": window, "return_lse": True, "softcap": None}
    theirs = DEFINITIONS["attention"](q, k, v, **options)
    truth = DEFINITIONS["attention"](q.double(), k.double(), v.double(), **options)
    problem = attention_op.Problem(1, 1, 1, 270, 270 + more, 16, torch.float16, window=window, return_lse=True)
    kernels = {}
    for config in attention_op.space(problem, Device.named("H200")):
        kernels.setdefault(interpreted(attention_op, problem, config), config)
    for config in kernels.values():
        with forced_config(attention_op.plan, config):
            ours = attention(q, k, v, causal=True, window=window, return_lse=True)
        for mine, other, right in zip(ours, theirs, truth, strict=True):
            assert_accurate(mine, other.to(mine.dtype), right, f"{config}")


@pytest.mark.parametrize("length", [41, 1000, 2**31 - 1, -1, -(2**31)])
def test_a_length_beyond_the_cache_is_the_cache_and_a_negative_one_none(length):
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 2, 3, 16), torch.randn(2, 1, 40, 16), torch.randn(2, 1, 40, 16)
    given = torch.tensor([length, 7], dtype=torch.int32)
    meant = torch.tensor([40 if length > 0 else 0, 7], dtype=torch.int32)
    for op in (attention, attention_decode):
        assert torch.equal(op(q, k, v, kv_len=given), op(q, k, v, kv_len=meant))


@pytest.mark.parametrize(("share", "ratio"), [(1 / 16, 1.0), (1 / 4, 2.0), (1 / 64, 0.5)])
def test_beside_an_exact_result_a_quarter_of_eps_is_allowed(share, ratio):
    truth = torch.ones(64, dtype=torch.float64)
    ours = truth.float()
    ours[: int(64 * share)] += torch.finfo(torch.float32).eps
    assert accuracy(ours, truth.float(), truth).rms_ratio == pytest.approx(ratio)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_twice_the_error_of_the_other_is_allowed(times):
    truth = torch.ones(64, dtype=torch.float64)
    error = 2.0**-12  # far above eps / 4 and one ulp
    found = accuracy((truth + times * error).float(), (truth + error).float(), truth)
    assert found.rms_ratio == pytest.approx(times / 2, rel=1e-3)
    assert found.worst_ratio == pytest.approx(times / 2, rel=1e-3)


@pytest.mark.parametrize("cols", [2, 5, 33])
def test_top_k_of_all_but_one_leaves_out_the_smallest(cols):
    logits = torch.zeros(300, cols)
    logits[:, 1] = -0.01
    drawn = sample(logits, torch.tensor(5), top_k=torch.tensor(cols - 1, dtype=torch.int32))
    assert (drawn != 1).all()
    assert (sample(logits, torch.tensor(5), top_k=torch.tensor(cols, dtype=torch.int32)) == 1).any()


def test_rows_are_on_disk_before_their_file_has_its_name(tmp_path, monkeypatch):
    order = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(store.os, "fsync", lambda number: (order.append("sync"), sync(number)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (order.append("replace"), replace(path, target))[1])
    store.Store(tmp_path / "tuned.json")._write([])
    assert order == ["sync", "replace"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_maximum_leaves_out_nan_unless_it_is_asked_for(dtype):
    @ct.kernel
    def kernel(x, out):
        t = ct.load(x, (0,), (2,))
        ct.store(out, (0,), ct.maximum(t, ct.full((2,), 1.0, x.dtype)))
        ct.store(out, (1,), ct.maximum(t, ct.full((2,), 1.0, x.dtype), propagate_nan=True))

    out = torch.zeros(4, dtype=dtype)
    interpret(kernel, (1,), (torch.tensor([torch.nan, 2.0], dtype=dtype), out))
    assert out[:2].tolist() == [1.0, 2.0]
    assert out[2].isnan()
    assert out[3] == 2


def test_tf32_rounds_halves_to_even():
    halves = np.float32([1 + 2**-11, 1 + 3 * 2**-11])
    assert round_to(halves, "tfloat32").tolist() == [1.0, 1 + 2 * 2**-10]


def test_padding_that_is_not_zero_reaches_a_product():
    @ct.kernel
    def kernel(x, y, out):
        a = ct.load(x, (0, 0), (16, 16), padding_mode=ct.PaddingMode.NAN)
        b = ct.load(y, (0, 0), (16, 16), padding_mode=ct.PaddingMode.ZERO)
        ct.store(out, (0, 0), ct.mma(a, b, ct.zeros((16, 16), ct.float32)))

    out = torch.zeros(16, 16)
    interpret(kernel, (1,), (torch.ones(16, 12), torch.ones(12, 16), out))
    assert out.isnan().all()


def test_experts_whose_scores_are_below_zero_are_in_order_too():
    torch.manual_seed(0)
    logits, bias = torch.randn(9, 16), -2.0 - torch.rand(16)
    _, ids = moe_route(logits, 4, sigmoid=True, bias=bias)
    assert torch.equal(ids.long(), (logits.sigmoid() + bias).topk(4).indices)


def uneven(op, problem):
    """A config of the H200 whose last tile of rows is not full, else its default: the interpreter's
    own take all rows of a small problem at once. Tiles of one row, of which an H200's own for so
    few rows may all be, get the least power of two of them that leaves a rest.
    """
    configs, rows = op.space(problem, Device.named("H200")), getattr(problem, "rows", getattr(problem, "tokens", 0))
    first = configs[0]
    if rows > 1 and getattr(first, "tile_m", 0) == 1 and not getattr(first, "persistent", False):
        first = dataclasses.replace(first, tile_m=2 * (rows & -rows))
    found = [c for c in configs if rows % getattr(c, "tile_m", 1) and not getattr(c, "persistent", False)]
    return min(found, key=lambda c: c.tile_m, default=first)  # the front end takes longer for large ones


@pytest.mark.parametrize("op", ops.ALL, ids=op_name)
def test_tiles_of_a_gpu_cover_what_the_interpreters_own_take_at_once(op):
    with torch.inference_mode():
        for problem in cases(op, "small")[:2]:
            check_op(op, problem, torch.device("cpu"), uneven(op, problem))


def test_a_norm_rounds_before_its_weight_where_asked():
    """The accuracy rule cannot see it: one rounding less is nearer to the truth."""
    torch.manual_seed(0)
    x, weight = torch.randn(40, 256).bfloat16(), torch.randn(256).bfloat16()
    y = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    rounded, other = y.bfloat16() * weight, (y * weight.float()).bfloat16()
    assert (rounded != other).float().mean() > 0.1
    for wanted, expected in ((True, rounded), (False, other)):
        found = rms_norm(x, weight, eps=1e-6, round_before_weight=wanted)
        assert (found != expected).float().mean() < 0.01


@pytest.mark.parametrize("columns", [32, 33, 34, 35])
def test_partial_sums_of_any_width_have_room_for_their_maximum_and_denominator(columns):
    problem = decode_op.Problem(1, 2, 1, 300, 64, torch.float32, v_dim=columns)
    config = next(c for c in decode_op.space(problem, Device.named("CPU")) if c.num_kv_splits > 1)
    assert len(decode_op.plan(problem, config, Device.named("CPU"))) == 2  # keys for more than one split
    check_op(decode_op, problem, torch.device("cpu"), config)


def test_what_kernels_cannot_run_is_not_legal():
    """No candidate is such a config, but a row of a table may be."""
    h200 = Device.named("H200")
    plain = attention_op.Problem(4, 8, 8, 1024, 1024, 128, torch.bfloat16)
    walking = dataclasses.replace(attention_op.space(plain, h200)[0], persistent=True, tile_n=128)
    assert attention_op.CHOICES.legal(plain, walking, h200)
    for change in ({"has_len": True}, {"has_start": True}, {"varlen": True}, {"window": 100}):
        assert not attention_op.CHOICES.legal(dataclasses.replace(plain, **change), walking, h200)
    wide, narrow = (sample_op.Problem(4, columns, torch.bfloat16) for columns in (128_256, 256))
    cluster = next(c for c in sample_op.space(wide, h200) if c.num_ctas == 8)
    assert sample_op.CHOICES.legal(wide, cluster, h200)
    assert not sample_op.CHOICES.legal(narrow, cluster, h200)
