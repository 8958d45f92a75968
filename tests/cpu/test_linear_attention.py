"""Tests special to the ops of linear attention, beside transformers' own functions, and to the
patch of models that have it.
"""

import pickle
from itertools import pairwise

import pytest
import torch
from tiny_models import greedy, left_padded, logits, state_of, tiny
from torch.nn import functional as F
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from tilewright import causal_conv1d, gated_delta_rule, rms_norm_gated
from tilewright.launch import Device, counted, forced_config
from tilewright.models import kinds, patch
from tilewright.ops import causal_conv1d as convolution, gated_delta_rule as rule, rms_norm_gated as gated
from tilewright.ops.causal_conv1d.decision import legal

pytestmark = pytest.mark.usefixtures("inference")
CHUNKS = rule.Config(32, chunk=64)
STEADY = rule.Config(32, chunk=64, solve_heads=2, steady=True)
SEGMENTS = rule.Config(16, chunk=64, transposed=True, segment=1)
SKIPS = rule.Config(16, chunk=16, transposed=True, segment=2, skips=True)


def tokens(n: int, *, batch: int = 2, k_heads: int = 1, v_heads: int = 2, dim: int = 32, dtype: torch.dtype = torch.float32) -> dict:
    """Arguments of both: axes are ours."""
    torch.manual_seed(n)
    q, k = (torch.randn(batch, k_heads, n, dim) for _ in range(2))
    g = -0.2 * torch.rand(batch, v_heads, n)
    given = {"q": q, "k": k, "v": torch.randn(batch, v_heads, n, dim)}
    return {**{name: x.to(dtype) for name, x in given.items()}, "g": g, "beta": torch.rand(batch, v_heads, n)}


def of_transformers(function, state=None, **given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [x.transpose(1, 2) for x in given.values()]
    out, final = function(*rows, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out.transpose(1, 2), final


def near(ours, other, error: float) -> None:
    assert (ours.double() - other.double()).norm() <= error * other.double().norm()


@pytest.mark.parametrize(
    ("config", "dtype", "error"),
    [
        (None, torch.float32, 1e-5),
        (CHUNKS, torch.float16, 2e-3),
        (STEADY, torch.float16, 2e-3),
        (SEGMENTS, torch.bfloat16, 2e-2),
        (SKIPS, torch.float16, 2e-3),
    ],
)
def test_a_prompt_and_the_tokens_behind_it_are_those_of_transformers(config, dtype, error):
    given, state = tokens(150, dtype=dtype), torch.randn(2, 2, 32, 32)
    first, second = ({name: x[:, :, part] for name, x in given.items()} for part in (slice(0, 149), slice(149, 150)))
    expected, middle = of_transformers(theirs.torch_chunk_gated_delta_rule, state, **first)
    last, final = of_transformers(theirs.torch_recurrent_gated_delta_rule, middle, **second)
    if config is None:
        out, kept = gated_delta_rule(**first, state=state)
    else:
        with forced_config(rule.plan, config):
            out, kept = gated_delta_rule(**first, state=state)
    assert kept is state
    near(out, expected, error)
    near(state, middle, error)
    out, _ = gated_delta_rule(**second, state=state)
    near(out, last, error)
    near(state, final, error)


@pytest.mark.parametrize(("chunk", "dtype", "error"), [(0, torch.float32, 1e-5), (32, torch.float16, 2e-3), (64, torch.bfloat16, 2e-2)])
def test_a_gate_for_each_column_is_that_of_transformers(chunk, dtype, error):
    """Also of columns that forget at once, for which a power of both signs would overflow."""
    given, state = tokens(71, dtype=dtype), torch.randn(2, 2, 32, 32)
    given |= {"g": -(torch.rand(2, 2, 71, 32) ** 4) * 5, **{name: given[name].repeat(1, 2, 1, 1) for name in ("q", "k")}}
    given["g"][:, :, ::7, :5] = -1e4
    first, second = ({name: x[:, :, part] for name, x in given.items()} for part in (slice(0, 70), slice(70, 71)))
    expected, middle = of_transformers(kimi.recurrent_kimi_delta_attention, state, **first)
    last, final = of_transformers(kimi.recurrent_kimi_delta_attention, middle, **second)
    with forced_config(rule.plan, rule.Config(32, chunk)):
        out, _ = gated_delta_rule(**first, state=state)
    near(out, expected, error)
    near(state, middle, error)
    near(gated_delta_rule(**second, state=state)[0], last, error)
    near(state, final, error)


@pytest.mark.parametrize("config", [CHUNKS, STEADY, SEGMENTS])
def test_keys_that_are_alike_lose_no_digits(config):
    """Powers of a chunk's matrix would reach 1e17."""
    given = tokens(128, batch=1, dtype=torch.float16)
    given["k"] = (given["k"][:, :, :1] + 0.05 * given["k"].float()).half()
    given["g"], given["beta"] = torch.zeros(1, 2, 128), 0.9 + 0.1 * given["beta"]
    with forced_config(rule.plan, config):
        out = gated_delta_rule(**given)
    near(out, rule.reference(**{name: x.double() for name, x in given.items()}), 1e-2)


@pytest.mark.parametrize("config", [CHUNKS, STEADY, SEGMENTS, SKIPS])
def test_a_gate_that_forgets_all_hides_no_token_behind_it(config):
    """Sums of a chunk's decays of 1e4 would leave no digit of the small ones."""
    given = tokens(128, batch=1, dtype=torch.float16)
    given["g"][:, :, ::8] = -1e4
    with forced_config(rule.plan, config):
        out = gated_delta_rule(**given)
    near(out, rule.reference(**{name: x.double() for name, x in given.items()}), 2e-3)


@pytest.mark.parametrize(("config", "channels"), [(CHUNKS, False), (STEADY, False), (SEGMENTS, False), (rule.Config(32, chunk=32), True)])
def test_packed_sequences_are_those_one_by_one(config, channels):
    given, starts = tokens(200, batch=1, dtype=torch.float16), [0, 130, 130, 131, 200]
    if channels:
        given["g"] = given["g"][..., None] * torch.rand(32)
        given |= {name: given[name].repeat(1, 2, 1, 1) for name in ("q", "k")}
    packed, state = {name: x[0].transpose(0, 1) for name, x in given.items()}, torch.randn(4, 2, 32, 32)
    before = state.clone()
    with forced_config(rule.plan, config):
        out, _ = gated_delta_rule(**packed, state=state, cu_seqlens=torch.tensor(starts, dtype=torch.int32))
        for i, (a, b) in enumerate(pairwise(starts)):
            own = before[i : i + 1].clone()
            alone, _ = gated_delta_rule(**{name: x[:, :, a:b] for name, x in given.items()}, state=own)
            near(out[a:b], alone[0].transpose(0, 1), 1e-6) if b > a else None
            near(state[i], own[0], 1e-6)
    assert torch.equal(state[1], before[1])


@pytest.mark.parametrize("channels", [False, True])
def test_no_chunk_has_more_tokens_than_keys_have_columns(channels):
    """Its rounding errors would gather: up to 2.9 of the accuracy rule's bound."""
    for name in (None, "A100", "H200", "B200", "RTX5090"):
        device = Device.named(name) if name else Device.of(torch.empty(0))
        for dim in (4, 31, 33, 63, 64, 128):
            problem = rule.Problem(1, 1, 2, 4096, dim, torch.bfloat16, channels=channels)
            chunks = {c.chunk for c in rule.space(problem, device)}
            assert 0 in chunks
            assert max(chunks) <= dim
            assert len(chunks) > 1 or dim < 64 or (channels and name == "RTX5090")


def test_a_part_of_a_cache_is_moved_on_and_no_other():
    cache, given = torch.randn(5, 2, 32, 32), tokens(1)
    before = cache.clone()
    gated_delta_rule(**given, state=cache[1:3])
    assert torch.equal(cache[[0, 3, 4]], before[[0, 3, 4]])
    assert not torch.equal(cache[1:3], before[1:3])


def test_one_token_is_one_launch_and_a_prompt_two():
    with counted() as counts:
        gated_delta_rule(**tokens(1))
    assert sum(counts.values()) == 1
    with counted() as counts, forced_config(rule.plan, CHUNKS):
        gated_delta_rule(**tokens(70, dtype=torch.float16))
    assert sum(counts.values()) == 2


@pytest.mark.parametrize("dim", [56, 128])
@pytest.mark.parametrize("parts", [2, 4])
def test_one_token_by_its_own_kernel_is_that_of_the_other(dim, parts):
    """Also of heads whose last tile of rows, or of columns, ends inside."""
    given, states = tokens(1, dim=dim), [torch.randn(2, 2, dim, dim)]
    states.append(states[0].clone())
    outs = []
    for config, state in zip((rule.Config(32), rule.Config(32, parts=parts)), states, strict=True):
        with forced_config(rule.plan, config), counted() as counts:
            outs.append(gated_delta_rule(**given, state=state))
        assert counts.keys() == {"token_kernel" if config.parts else "recurrent_kernel"}
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)


def test_the_default_of_one_token_has_its_own_kernel_and_wide_tiles_only_for_many_blocks():
    """H200, us with 32 and 64 columns: 4 sequences 5.9 and 6.7, 256 267 and 264."""
    for gpu in ("A100", "H200", "B200", "GB10"):
        device = Device.named(gpu)
        found = [rule.space(rule.Problem(batch, 16, 32, 1, 128, torch.bfloat16), device) for batch in (1, 256)]
        assert [(c.tile_v, c.parts) for configs in found for c in configs] == [(32, 4), (64, 4)]
        for p in (rule.Problem(4, 16, 32, 2, 128, torch.bfloat16), rule.Problem(4, 16, 32, 1, 128, torch.bfloat16, has_state=False)):
            assert all(c.parts == 0 for c in rule.space(p, device))


@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_convolution_and_its_state_are_those_of_transformers(n):
    """Its cache keeps one input more than the weights need, time as the axis of stride 1."""
    torch.manual_seed(n)
    x, weight, cache = torch.randn(2, n, 24), torch.randn(24, 4), torch.randn(2, 24, 4)
    mine = cache.clone()
    expected = theirs.causal_conv1d_update(x.mT, cache, weight, None, "silu").mT
    out, state = causal_conv1d(x, weight, state=mine.mT)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine, cache)
    assert state.data_ptr() == mine.data_ptr()


@pytest.mark.parametrize("tile_m", [8, 16])
def test_the_first_tile_alone_sees_the_state_and_moves_it_on(tile_m):
    problem, cpu = convolution.Problem(2, 19, 16, torch.float32, width=8, taps=7), Device.of(torch.ones(1))
    assert legal(problem, convolution.Config(tile_m, 16), cpu)
    assert not legal(problem, convolution.Config(4, 16), cpu), "its second tile would see the state too"
    for tokens in (5, 19):
        x, weight, state = torch.randn(2, tokens, 16), torch.randn(16, 8), torch.randn(2, 7, 16)
        expected, final = convolution.reference(x, weight, state=state)
        with forced_config(convolution.plan, convolution.Config(tile_m, 16)):
            out, _ = causal_conv1d(x, weight, state=state)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(state, final)


def test_a_prompt_in_parts_is_the_prompt():
    x, weight = torch.randn(2, 13, 16), torch.randn(16, 4)
    state = torch.zeros(2, 3, 16)
    parts = [causal_conv1d(x[:, a:b].contiguous(), weight, state=state)[0] for a, b in ((0, 5), (5, 6), (6, 8), (8, 13))]
    torch.testing.assert_close(torch.cat(parts, 1), causal_conv1d(x, weight), rtol=1e-6, atol=1e-6)
    assert torch.equal(state, x[:, -3:])


GATED_NORMS = {
    "behind": (lambda: theirs.Qwen3NextRMSNormGated(32, eps=1e-5), {}),
    "in front, in groups": (lambda: modeling_mamba2.MambaRMSNormGated(32, 16, eps=1e-5), {"groups": 2, "gate_first": True}),
    "in front, groups off tiles": (lambda: modeling_falcon_h1.FalconH1RMSNormGated(36, 1e-5, 3, False), {"groups": 3, "gate_first": True}),
    "behind, in groups": (lambda: modeling_falcon_h1.FalconH1RMSNormGated(32, 1e-5, 2), {"groups": 2}),
    "sigmoid": (lambda: kimi.KimiLinearRMSNormGated(32, 1e-5), {"sigmoid": True}),
}


@pytest.mark.parametrize("form", GATED_NORMS)
def test_a_gated_norm_is_that_of_transformers_and_patch_knows_its_form(form):
    make, options = GATED_NORMS[form]
    norm = make()
    cols = len(norm.weight)
    norm.weight.copy_(torch.randn(cols))
    x, gate = torch.randn(3, 5, cols), torch.randn(3, 5, cols)
    torch.testing.assert_close(rms_norm_gated(x, norm.weight.data, gate, 1e-5, **options), norm(x, gate), rtol=1e-5, atol=1e-5)
    found = dict(kinds.gated_norm(norm).options)
    del found["eps"]
    assert found == {"groups": 1, "gate_first": False, "sigmoid": False} | options


def test_no_tokens_launch_nothing_and_leave_the_state():
    state, taps = torch.ones(2, 2, 32, 32), torch.ones(2, 3, 8)
    with counted() as counts:
        out, same = gated_delta_rule(**tokens(0), state=state)
        assert causal_conv1d(torch.zeros(2, 0, 8), torch.ones(8, 4), state=taps)[0].shape == (2, 0, 8)
    assert out.shape == (2, 2, 0, 32)
    assert same.eq(1).all()
    assert taps.eq(1).all()
    assert not counts


G = tokens(4)
BAD_RULE = [
    ({"q": G["q"].double()}, r"q.dtype must be one of bfloat16, float16, float32, got float64"),
    ({"k": G["k"][..., :16]}, r"k.shape must be \(2, 1, 4, 32\), got \(2, 1, 4, 16\)"),
    ({"v": G["v"][:, :, :3]}, r"v.shape must be \(2, v_heads, 4, v_dim\), got \(2, 2, 3, 32\)"),
    ({"g": G["g"].half()}, r"g.dtype must be float32, got float16"),
    ({"g": torch.zeros(2, 2, 4, 16)}, r"g.shape must be \(2, 2, 4, 32\), got \(2, 2, 4, 16\)"),
    ({"g": torch.zeros(2, 2, 32, 4).mT}, r"g.stride\(-1\) must be 1, got 4"),
    ({"beta": G["beta"][:, :1]}, r"beta.shape must be \(2, 2, 4\), got \(2, 1, 4\)"),
    (
        {"v": torch.ones(2, 3, 4, 32), "q": torch.ones(2, 2, 4, 32), "k": torch.ones(2, 2, 4, 32)},
        r"v.shape\[1\] must be a multiple of k.shape\[1\] = 2, got 3",
    ),
    ({"v": G["v"][..., :0]}, r"v.shape\[-1\] must be in 1..256, got 0"),
    ({"q": torch.ones(2, 0, 4, 32), "k": torch.ones(2, 0, 4, 32)}, r"k.shape\[1\] must be at least 1, got 0"),
    ({"state": torch.zeros(2, 2, 32, 16)}, r"state.shape must be \(2, 2, 32, 32\), got \(2, 2, 32, 16\)"),
    ({"state": torch.zeros(2, 2, 32, 32).half()}, r"state.dtype must be float32, got float16"),
    ({"state": torch.zeros(1, 2, 32, 32).expand(2, -1, -1, -1)}, r"state must be free of broadcast axes"),
    ({"scale": 0.0}, r"scale must be positive, got 0.0"),
    ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, r"q.dim\(\) must be 3, got 4"),
]
BAD_CONVOLUTION = [
    ({"weight": torch.ones(8, 9)}, r"weight.shape must be \(8, 2..8\), got \(8, 9\)"),
    ({"weight": torch.ones(7, 4)}, r"weight.shape must be \(8, 2..8\), got \(7, 4\): channels are the last axis of x"),
    ({"weight": torch.ones(8, 1, 4)}, r"weight.shape must be \(8, 2..8\), got \(8, 1, 4\): give a Conv1d's weight\[:, 0\]"),
    ({"state": torch.ones(2, 2, 8)}, r"state.shape must be \(2, 3, 8\), got \(2, 2, 8\)"),
    ({"state": torch.ones(2, 3, 8).half()}, r"state.dtype must be float32, got float16"),
    ({"bias": torch.ones(9)}, r"bias.shape must be \(8,\), got \(9,\)"),
]


@pytest.mark.parametrize(("change", "message"), BAD_RULE)
def test_bad_input_of_the_rule_is_named_and_nothing_is_launched(change, message):
    with counted() as counts, pytest.raises(ValueError, match=message):
        gated_delta_rule(**{**G, **change})
    assert not counts


@pytest.mark.parametrize(("change", "message"), BAD_CONVOLUTION)
def test_bad_input_of_the_convolution_is_named_and_nothing_is_launched(change, message):
    with counted() as counts, pytest.raises(ValueError, match=message):
        causal_conv1d(**{"x": torch.ones(2, 5, 8), "weight": torch.ones(8, 4), **change})
    assert not counts


def test_values_are_looked_at_when_asked(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    with pytest.raises(ValueError, match=r"g\[0, 0, 0\] must be at most 0"):
        gated_delta_rule(**{**G, "g": G["g"].abs() + 1})
    with pytest.raises(ValueError, match=r"cu_seqlens\[1\] must be in 0..5, got 9"):
        causal_conv1d(torch.ones(5, 8), torch.ones(8, 4), cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))


# ------------------------------------------------------------------------------------------- patch
def test_each_layer_of_a_patched_model_runs_ours_and_undo_restores_every_bit():
    model, inputs = tiny("qwen3_5"), left_padded()
    stock, before = logits(model, inputs), state_of(model)
    with patch(model) as report:
        found = {line.op: line.count for line in report.replaced}
        assert found["gated_delta_rule"] == found["rms_norm_gated"] == 1
        with counted() as counts:
            greedy(model, inputs, 2)
        assert counts["recurrent_kernel"] == 2  # fp32: a prompt token after token too
        assert counts["causal_conv1d_kernel"] == counts["one_token_kernel"] == 1
        assert counts["rms_norm_gated_kernel"] == 2
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(logits(again, inputs), logits(model, inputs))
    assert state_of(model) == before
    assert torch.equal(logits(model, inputs), stock)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be silu, got gelu_pytorch_tanh"),
        ({"linear_value_head_dim": 264}, "head_k_dim and head_v_dim must be at most 256, got 8 and 264"),
    ],
)
def test_a_layer_that_ours_do_not_compute_is_kept_with_its_reason(change, reason):
    with patch(tiny("qwen3_5", **change)) as report:
        assert f"gated_delta_rule: {reason}" in {line.reason for line in report.kept}


def test_packed_sequences_of_a_patched_model_are_refused():
    model = tiny("qwen3_5")
    with patch(model), pytest.raises(ValueError, match="cu_seq_lens_q must be None"):
        model(input_ids=torch.ones(1, 6, dtype=torch.long), cu_seq_lens_q=torch.tensor([0, 3, 6], dtype=torch.int32), use_cache=False)


def test_half_precision_of_a_layer_is_no_further_from_the_truth_than_transformers():
    model, x = tiny("qwen3_5", torch.bfloat16), torch.randn(2, 70, 32)
    layer = next(module for module in model.modules() if type(module).__name__ == "Qwen3_5GatedDeltaNet")
    truth = layer.double()(x.double())
    layer.bfloat16()
    stock = layer(x.bfloat16())
    with patch(model):
        ours = layer(x.bfloat16())
    assert F.mse_loss(ours.double(), truth) <= 4 * F.mse_loss(stock.double(), truth)


def test_few_rows_of_groups_are_decided_as_few_rows():
    """One row of eight groups is eight rows of a norm, not as many as 264 rows of it have."""
    one = gated.Problem(1, 1024, torch.bfloat16, groups=8)
    assert gated.CHOICES.bucket(one, Device.named("H200")).rows == 2 * 132 // 8
