"""TILEWRIGHT_CHECK=1: what ops assert about the numbers in their device tensors."""

import re
import sys

import pytest
import torch
from tensors import int32, randn

import tilewright
from tilewright import ops
from tilewright.launch import Device, traced
from tilewright.testing import op_name, public_function, seeded_inputs
from tilewright.testing.cases import cases

pytestmark = pytest.mark.usefixtures("inference")
ONE, NAN = torch.tensor(1.0), float("nan")
CODES = torch.float8_e4m3fn


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")


def attend(**given):
    q, kv = randn(2, 2, 4, 16), randn(2, 2, 8, 16)
    return tilewright.attention(q, kv, kv, **given)


def attend_codes(**bad):
    q = randn(1, 2, 4, 16).to(CODES)
    return tilewright.attention(q, q, q, **{"q_scale": torch.ones(2), "k_scale": torch.ones(2), "v_scale": torch.ones(2), **bad})


def packed(cu_q, cu_kv):
    q = randn(8, 2, 16)
    return tilewright.attention(q, q, q, cu_seqlens_q=int32(*cu_q), cu_seqlens_kv=int32(*cu_kv))


def expand(**given):
    q, codes = randn(1, 2, 4, 16), "q_scale" in given
    q = q.to(CODES) if codes else q.bfloat16()
    return tilewright.mla(q, q, k_nope=q, k_rope=q[:, :1], v=q, **given)


def decode(**given):
    kv = randn(2, 2, 32, 16)
    return tilewright.attention_decode(randn(2, 2, 1, 16), kv, kv, **given)


def decode_pages(table, kv_len=None):
    pool = randn(3, 2, 16, 16)
    return tilewright.attention_decode(randn(2, 2, 1, 16), pool, pool, kv_len, block_table=torch.tensor(table, dtype=torch.int32))


def absorbed(table, kv_len, **given):
    q, q_rope = randn(2, 2, 1, 64).bfloat16(), randn(2, 2, 1, 16).bfloat16()
    table = torch.tensor(table, dtype=torch.int32)
    return tilewright.mla_decode(q, q_rope, randn(3, 16, 80).bfloat16(), int32(*kv_len), scale=0.1, block_table=table, **given)


def append(positions, table=None, **given):
    new, dtype = randn(1, 2, len(positions), 16), CODES if given else torch.float32
    caches = torch.zeros(2, 3, 2, 16, 16).to(dtype) if table else torch.zeros(2, 1, 2, 64, 16).to(dtype)
    return tilewright.kv_append(
        new, new, *caches, positions=int32(*positions)[None], block_table=None if table is None else int32(*table)[None], **given
    )


def sparse(**given):
    q, cache = randn(2, 2, 1, 64).bfloat16(), randn(2, 16, 64).bfloat16()
    indices = torch.zeros(2, 1, 4, dtype=torch.int32)
    more = {"extra_cache": cache, "extra_indices": indices} if "extra_length" in given else {}
    return tilewright.sparse_decode(q, cache, indices, scale=0.1, **more, **given)


def listed(**given):
    q, weights = randn(2, 1, 4, 16), torch.ones(2, 1, 4)
    return tilewright.sparse_index(q, randn(3, 16, 16), weights, 3, **given)


def grouped(**given):
    a = randn(3, 8, 16).bfloat16()
    return tilewright.grouped_gemm(a if "counts" in given else a[0], a.mT[:, :, :8].contiguous(), **given)


def mixture(ids):
    x = randn(2, 16).bfloat16()
    return tilewright.moe(x, randn(2, 32, 16).bfloat16(), randn(2, 16, 16).bfloat16(), weights=torch.ones(2, 2), ids=torch.tensor(ids))


def draw(**given):
    return tilewright.sample(randn(2, 8), torch.tensor(0), **given)


def adjust(*counts, **given):
    return tilewright.adjust_logits(randn(2, 8), *counts, **given)


WRONG = {
    "kv_len[1] must be in 0..8, got 9": lambda: attend(kv_len=int32(8, 9)),
    "kv_len[0] must be in 0..8, got -1": lambda: attend(kv_len=int32(-1, 9)),
    "kv_start[1] must be in 0..8, got 9": lambda: attend(kv_len=int32(8, 3), kv_start=int32(2, 9)),
    "kv_start[0] must be in 0..8, got -2": lambda: attend(kv_start=int32(-2, 4)),
    "cu_seqlens_q[2] must be at least the one before it, got 3": lambda: packed((0, 5, 3, 8), (0, 2, 4, 8)),
    "cu_seqlens_kv[2] must be at least the one before it, got 1": lambda: packed((0, 3, 5, 8), (0, 2, 1, 8)),
    "cu_seqlens_kv[3] must be in 0..8, got 9": lambda: packed((0, 3, 5, 8), (0, 2, 4, 9)),
    "cu_seqlens_q[0] must be in 0..8, got -1": lambda: packed((-1, 3, 5, 8), (0, 2, 4, 8)),
    "q_scale[1] must be positive and finite, got 0.0": lambda: attend_codes(q_scale=torch.tensor([1.0, 0.0])),
    "k_scale[0] must be positive and finite, got nan": lambda: attend_codes(k_scale=torch.tensor([NAN, 1.0])),
    "v_scale[1] must be positive and finite, got inf": lambda: attend_codes(v_scale=torch.tensor([1.0, torch.inf])),
    "kv_len[0] must be in 0..4, got 5": lambda: expand(kv_len=int32(5)),
    "k_scale must be positive and finite, got -1.0": lambda: expand(q_scale=torch.ones(2), k_scale=-ONE, v_scale=torch.ones(2)),
    "kv_len[1] must be in 0..32, got 33": lambda: decode(kv_len=int32(1, 33)),
    "kv_start[0] must be in 0..32, got 33": lambda: decode(kv_len=int32(6, 8), kv_start=int32(33, 0)),
    "kv_len[0] must be in 0..32, got 100": lambda: decode_pages([[0, 1], [2, 0]], int32(100, 1)),
    "block_table[0, 1] must be in 0..2, the pages of the cache, got 3": lambda: decode_pages([[0, 3], [2, 9]], int32(17, 16)),
    "block_table[1, 0] must be in 0..2, the pages of the cache, got -1": lambda: decode_pages([[0, 1], [-1, 0]]),
    "block_table[1, 1] must be in 0..2, the pages of the cache, got 7": lambda: absorbed([[0, 8], [1, 7]], (16, 17)),
    "kv_len[0] must be in 0..32, got 40": lambda: absorbed([[0, 1], [1, 2]], (40, 17)),
    "kv_start[1] must be in 0..32, got -4": lambda: absorbed([[0, 1], [1, 2]], (30, 17), kv_start=int32(0, -4)),
    "positions[0, 2] must be unlike those before it in its sequence, got 5": lambda: append((5, -1, 5, -1)),
    "block_table[0, 1] must be in 0..2, the pages of the cache, got 4": lambda: append((0, 31, 99), (2, 4, 9)),
    "v_scale must be positive and finite, got 0.0": lambda: append((0, 1), k_scale=ONE, v_scale=0 * ONE),
    "topk_length.view(-1)[1] must be in 0..4, got 5": lambda: sparse(topk_length=int32(4, 5)),
    "extra_length.view(-1)[0] must be in 0..4, got -1": lambda: sparse(topk_length=int32(4, 4), extra_length=int32(-1, 1)),
    "kv_len[1] must be in 0..32, got 40": lambda: listed(kv_len=int32(0, 40), block_table=int32((0, 1), (2, 0))),
    "block_table[1, 0] must be in 0..2, the pages of the cache, got 3": lambda: listed(kv_len=int32(0, 5), block_table=int32((9, 9), (3, 9))),
    "offsets[1] must be at least the one before it, got 4": lambda: grouped(offsets=int32(5, 4, 8)),
    "offsets[2] must be in 0..8, got 9": lambda: grouped(offsets=int32(5, 6, 9)),
    "counts[1] must be in 0..8, got -3": lambda: grouped(counts=int32(5, -3, 9)),
    "ids.view(-1)[3] must be in -1023..1023, got 5000000": lambda: mixture([[0, 1], [-1, 5_000_000]]),
    "scales[0, 1] must be in 0..144, got 255": lambda: tilewright.quantized_matmul(
        randn(1, 64).bfloat16(),
        torch.zeros(1, 1, 64, 16).int(),
        torch.full((4, 64), 255).byte() * torch.arange(64).clamp(max=1).byte(),
        weight_format="mxfp4",
    ),
    "ids.view(-1)[2] must be in 0..4, got 5": lambda: tilewright.embedding(int32(0, 4, 5, -1), randn(5, 8)),
    "temperature[1] must be a number, got nan": lambda: draw(temperature=torch.tensor([1.0, NAN])),
    "top_p[0] must be a number, got nan": lambda: draw(top_p=torch.tensor(NAN)),
    "repetition[1] must be positive and finite, got 0.0": lambda: adjust(torch.ones(2, 8).int(), repetition=torch.tensor([1.0, 0.0])),
    "frequency[0] must be finite, got inf": lambda: adjust(torch.ones(2, 8).int(), frequency=torch.tensor(torch.inf)),
    "bias[0, 3] must be a number, got nan": lambda: adjust(bias=torch.tensor([[0.0, 0, 0, NAN, 0, 0, 0, 0]])),
    "scale.view(1, 1)[0, 0] must be positive and finite, got -2.0": lambda: tilewright.quantize_fp8(randn(2, 8), scale=-2 * ONE),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_value_that_breaks_a_promise_is_named_with_its_index(checked, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        WRONG[message]()


@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL])
def test_right_values_pass(checked, op):
    """No false alarm on any op's small problems. Their kernels do not run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.launch.run.Bound.run", lambda *args: None)
        for problem in cases(op, "small"):
            public_function(op)(**seeded_inputs(op, problem, torch.device("cpu")))


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_looked_at_unless_it_is_asked_for(monkeypatch, value):
    monkeypatch.delenv("TILEWRIGHT_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("TILEWRIGHT_CHECK", value)
    monkeypatch.setattr(sys.modules["tilewright.launch.torch_op"], "check_values", None)
    assert tilewright.embedding(int32(0, 7), randn(5, 8))[1].isnan().all()
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    with pytest.raises(TypeError, match="NoneType"):
        tilewright.embedding(int32(0, 7), randn(5, 8))


def test_a_graph_capture_is_not_checked_and_says_so(checked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(RuntimeWarning, match="TILEWRIGHT_CHECK checks no value under graph capture, nor when the graph is replayed"):
        tilewright.embedding(int32(0, 7), randn(5, 8))


def test_compiled_code_is_checked_when_it_runs(checked):
    compiled = torch.compile(lambda ids, weight: tilewright.embedding(ids, weight) + 1, fullgraph=True, backend="aot_eager")
    weight = randn(5, 8)
    assert torch.equal(compiled(int32(0, 4), weight), weight[[0, 4]] + 1)
    with pytest.raises(ValueError, match=r"ids.view\(-1\)\[0\] must be in 0..4, got 5"):
        compiled(int32(5, 4), weight)


def test_traces_look_at_no_value(checked):
    with traced(Device.named("H200")) as launches:
        tilewright.embedding(torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(5, 8, device="meta"))
    assert launches
