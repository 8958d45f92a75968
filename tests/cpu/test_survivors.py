"""Bugs that were planted and that no other test found."""

import os
from pathlib import Path

import cuda.tile as ct
import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache

from tilewright.interpret import interpret
from tilewright.interpret.formats import round_to
from tilewright.launch import Device, forced_config
from tilewright.models import patch
from tilewright.ops import attention as attention_op
from tilewright.ops.attention import attention
from tilewright.ops.attention_decode import attention_decode
from tilewright.ops.sample import sample
from tilewright.testing import accuracy, assert_accurate
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
        with patch(model):
            ours = steps()
    torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("window", "more"), [(2, 0), (66, 0), (None, 62), (None, 126), (None, 254)])
def test_tiles_of_masks_end_where_the_masks_do(window, more):
    """Two keys before a tile of keys begins, and two keys before it ends, in every H200 config."""
    torch.manual_seed(more)
    q, k, v = torch.randn(1, 1, 270, 16).half(), *(torch.randn(1, 1, 270 + more, 16).half() for _ in range(2))
    options = {"causal": True, "window": window, "return_lse": True, "softcap": None}
    theirs = DEFINITIONS["attention"](q, k, v, **options)
    truth = DEFINITIONS["attention"](q.double(), k.double(), v.double(), **options)
    problem = attention_op.Problem(1, 1, 1, 270, 270 + more, 16, torch.float16, window=window, return_lse=True)
    for config in attention_op.space(problem, Device.named("H200")):
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
