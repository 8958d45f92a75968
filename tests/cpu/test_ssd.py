"""Tests special to `ssd`, beside transformers' own functions, and to the patch of models that have
it.
"""

from itertools import pairwise

import pytest
import torch
from architectures import ARCHITECTURES
from tiny_models import greedy, left_padded, logits, state_of, tiny_model
from torch.nn import functional as F
from transformers.models.mamba2 import modeling_mamba2 as theirs

from tilewright import interpret, ssd
from tilewright.bench import linear_peers
from tilewright.launch import counted, forced_config
from tilewright.models import linear_attention, patch
from tilewright.ops import ssd as op
from tilewright.testing import check_op

pytestmark = pytest.mark.usefixtures("inference")
CHUNKS = op.Config(16, chunk=32)
SEGMENTS = op.Config(16, chunk=16, segment=2)
BIAS, SKIP = torch.tensor([-2.0, -4.0]), torch.tensor([0.5, -1.0])


def tokens(n: int, *, batch: int = 2, heads: int = 2, groups: int = 1, dtype: torch.dtype = torch.float32) -> dict:
    torch.manual_seed(n)
    x, dt = torch.randn(batch, n, heads, 16), torch.randn(batch, n, heads)
    b, c = (torch.randn(batch, n, groups, 24) for _ in range(2))
    return {**{name: value.to(dtype) for name, value in {"x": x, "dt": dt, "b": b, "c": c}.items()}, "a": -torch.tensor([1.0, 9.0])[:heads]}


def part(given: dict, at: slice) -> dict:
    return {name: value if name == "a" else value[:, at] for name, value in given.items()}


def near(ours, other, error: float) -> None:
    assert (ours.double() - other.double()).norm() <= error * other.double().norm()


@pytest.mark.parametrize(("config", "dtype", "error"), [(None, torch.float32, 1e-5), (CHUNKS, torch.float16, 2e-3), (SEGMENTS, torch.bfloat16, 2e-2)])
def test_a_prompt_and_the_token_behind_it_are_those_of_transformers(config, dtype, error):
    given, state = tokens(80, dtype=dtype), torch.randn(2, 2, 16, 24)
    first, second = (part(given, at) for at in (slice(0, 79), slice(79, 80)))
    options = {"D": SKIP, "dt_bias": BIAS, "dt_softplus": True}
    before = {"initial_states": state.clone(), "return_final_states": True}
    expected, middle = theirs.mamba2_chunk_scan(*(first[name] for name in ("x", "dt", "a", "b", "c")), 32, **options, **before)
    ours = {"d": SKIP, "dt_bias": BIAS, "dt_softplus": True, "state": state}
    if config is None:
        out, kept = ssd(**first, **ours)
    else:
        with forced_config(op.plan, config):
            out, kept = ssd(**first, **ours)
    assert kept is state
    near(out, expected, error)
    near(state, middle, error)
    one = {name: value[:, 0] for name, value in second.items() if name != "a"}
    wide = [value[..., None].expand(*value.shape, 16) for value in (one["dt"], SKIP, BIAS)]
    rows = (middle, one["x"], wide[0], second["a"][:, None, None].expand(2, 16, 24), one["b"], one["c"], wide[1])
    last = theirs.mamba2_selective_state_update(*rows, dt_bias=wide[2], dt_softplus=True)
    out, _ = ssd(**second, **ours)
    near(out[:, 0], last, error)
    near(state, middle, error)


@pytest.mark.parametrize("config", [CHUNKS, SEGMENTS])
def test_a_token_that_forgets_all_hides_none_behind_it(config):
    """Sums of a chunk's decays of 1e6 would leave no digit of the small ones. What the last tokens
    of a segment leave, the first ones behind it see.
    """
    given = tokens(80, batch=1, dtype=torch.bfloat16)
    given["dt"] = 0.1 * given["dt"].float().sigmoid()
    given["dt"][:, 3::8] = 1e6
    given["x"][:, 3::8] *= 1e-6
    with forced_config(op.plan, config):
        out = ssd(**given)
    near(out, op.reference(**{name: value.double() for name, value in given.items()}), 1e-2)


@pytest.mark.parametrize("config", [CHUNKS, SEGMENTS])
def test_nothing_overflows_however_long_a_state_is_kept_or_dropped(config):
    """Decays to both sides of a token would be infinite and 0, whose product is NaN."""
    given = tokens(80, batch=1, dtype=torch.bfloat16)
    given["a"], given["dt"] = torch.tensor([-1e30, 0.0]), torch.full((1, 80, 2), 1.0)
    with forced_config(op.plan, config):
        out = ssd(**given)
    near(out, op.reference(**{name: value.double() for name, value in given.items()}), 1e-2)


@pytest.mark.parametrize("raw", [-14.0, -3.0, 0.0, 5.0, 30.0])
def test_a_small_step_keeps_its_digits(raw):
    """log(1 + exp(-14)) has lost 20 of 24 bits."""
    given = tokens(1, batch=1) | {"dt": torch.full((1, 1, 2), raw), "a": torch.zeros(2)}
    near(ssd(**given, dt_softplus=True), op.reference(**{name: value.double() for name, value in given.items()}, dt_softplus=True), 5e-7)


def test_steps_beyond_their_limits_are_those_limits():
    given = tokens(5) | {"dt": torch.tensor([0.0, 0.05, 0.2, 3.0, 1.0]).view(1, 5, 1).expand(2, 5, 2)}
    inside = given | {"dt": given["dt"].clamp(0.1, 1.0)}
    assert torch.equal(ssd(**given, dt_limit=(0.1, 1.0)), ssd(**inside))


@pytest.mark.parametrize("config", [op.Config(16), CHUNKS, SEGMENTS])
def test_packed_sequences_are_those_one_by_one_in_the_rows_that_they_name(config):
    given, starts, at = tokens(100, batch=1, groups=2, dtype=torch.float16), [0, 70, 70, 71, 100], [4, 0, 3, 1]
    packed, state = {name: value if name == "a" else value[0] for name, value in given.items()}, torch.randn(5, 2, 16, 24)
    before = state.clone()
    with forced_config(op.plan, config):
        where = {"cu_seqlens": torch.tensor(starts, dtype=torch.int32), "state_rows": torch.tensor(at, dtype=torch.int32)}
        out, _ = ssd(**packed, state=state, **where)
        for row, (begin, end) in zip(at, pairwise(starts), strict=True):
            own = before[row : row + 1].clone()
            alone, _ = ssd(**part(given, slice(begin, end)), state=own)
            if end > begin:
                near(out[begin:end], alone[0], 1e-6)
            near(state[row], own[0], 1e-6)
    assert torch.equal(state[[0, 2]], before[[0, 2]]), "of an empty sequence, and of none"


@pytest.mark.parametrize("config", [op.Config(16, chunk=16), op.Config(16, chunk=16, segment=1)])
def test_blocks_in_any_order_race_for_nothing(config):
    problem = op.Problem(3, 2, 1, 40, 24, 16, torch.float16, varlen=True, has_rows=True, gate=True)
    for order in (0, 7, 23):
        with interpret.checking(races=True, order=order):
            check_op(op, problem, torch.device("cpu"), config)


def test_one_token_is_one_launch_a_prompt_two_and_a_split_one_four():
    for n, config, launches in ((1, op.Config(16), 1), (70, CHUNKS, 2), (70, SEGMENTS, 4)):
        with counted() as counts, forced_config(op.plan, config):
            ssd(**tokens(n, dtype=torch.float16))
        assert sum(counts.values()) == launches


def test_no_tokens_launch_nothing_and_leave_the_state():
    state = torch.ones(2, 2, 16, 24)
    with counted() as counts:
        out, same = ssd(**tokens(0), state=state)
    assert out.shape == (2, 0, 2, 16)
    assert same.eq(1).all()
    assert not counts


@pytest.mark.parametrize("n", [1, 100])
def test_the_peers_of_torch_compute_the_same(n):
    problem = op.Problem(2, 4, 2, n, 16, 24, torch.float32, gate=True)
    given = problem.inputs(torch.device("cpu"))
    expected, final = op.reference(**given)
    out, state = (linear_peers.ssd_one if n == 1 else linear_peers.ssd_chunked)(**given)
    near(out, expected, 1e-5)
    near(state, final, 1e-5)
    assert state is given["state"]


G = tokens(4)
BAD = [
    ({"x": G["x"].double()}, r"x.dtype must be one of bfloat16, float16, float32, got float64"),
    ({"x": torch.ones(2, 4, 2, 257)}, r"x.shape\[-1\] must be in 1..256, got 257"),
    ({"dt": G["dt"][:, :3]}, r"dt.shape must be \(2, 4, 2\), got \(2, 3, 2\)"),
    ({"dt": G["dt"].half()}, r"dt.dtype must be float32, got float16"),
    ({"a": torch.ones(3)}, r"a.shape must be \(2,\), got \(3,\)"),
    ({"b": G["b"][:, :3]}, r"b.shape must be \(2, 4, 'groups', 'state_dim'\), got \(2, 3, 1, 24\)"),
    ({"b": torch.ones(2, 4, 3, 24)}, r"b.shape\[-2\] must be a divisor of the 2 heads of x, got 3"),
    ({"c": G["c"][..., :8]}, r"c.shape must be \(2, 4, 1, 24\), got \(2, 4, 1, 8\)"),
    ({"z": G["x"][..., :8]}, r"z.shape must be \(2, 4, 2, 16\), got \(2, 4, 2, 8\)"),
    ({"d": torch.ones(2).half()}, r"d.dtype must be float32, got float16"),
    ({"state": torch.zeros(2, 2, 24, 16)}, r"state.shape must be \(2, 2, 16, 24\), got \(2, 2, 24, 16\)"),
    ({"state": torch.zeros(2, 2, 16, 24).half()}, r"state.dtype must be float32, got float16"),
    ({"state": torch.zeros(1, 2, 16, 24).expand(2, -1, -1, -1)}, r"state must be free of broadcast axes"),
    ({"state_rows": torch.zeros(2, dtype=torch.int32)}, r"state_rows must be given with a state, got none"),
    ({"state_rows": torch.zeros(3, dtype=torch.int32), "state": torch.zeros(3, 2, 16, 24)}, r"state_rows.shape.* must be .*2.*, got .*3"),
    ({"dt_limit": (1.0, 0.0)}, r"dt_limit must be \(least, largest\) with 0 <= least <= largest, got \(1.0, 0.0\)"),
    ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, r"x.dim\(\) must be 3, got 4"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, message):
    with counted() as counts, pytest.raises(ValueError, match=message):
        ssd(**{**G, **change})
    assert not counts


def test_values_are_looked_at_when_asked(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    with pytest.raises(ValueError, match=r"a\[1\] must be at most 0, got 1.0"):
        ssd(**{**G, "a": torch.tensor([-1.0, 1.0])})
    for rows, message in (([0, 3], r"state_rows\[1\] must be in 0..2, got 3"), ([2, 2], r"state_rows\[1\] must be a row that no sequence before it")):
        with pytest.raises(ValueError, match=message):
            ssd(**G, state=torch.zeros(3, 2, 16, 24), state_rows=torch.tensor(rows, dtype=torch.int32))


def test_a_state_is_no_part_of_what_the_same_call_reads():
    memory = torch.randn(2 * 4 * 2 * 16 + 2 * 2 * 16 * 24)
    for name in ("x", "b"):
        read = memory[: G[name].numel()].view(G[name].shape)
        with pytest.raises(ValueError, match=f"state must be free of elements of {name}, because it is written in place"):
            ssd(**{**G, name: read}, state=memory[100 : 100 + 2 * 2 * 16 * 24].view(2, 2, 16, 24))


# ------------------------------------------------------------------------------------------- patch
def mamba(dtype: torch.dtype = torch.float32, **changes: object):
    return tiny_model({"model_type": "mamba2", **ARCHITECTURES["mamba2"], **changes}, dtype)


def mixer_of(model):
    return next(module for module in model.modules() if type(module) is theirs.Mamba2Mixer)


def test_each_mixer_of_a_patched_model_runs_ours_and_undo_restores_every_bit():
    model, inputs = mamba(), left_padded()
    stock, before = logits(model, inputs), state_of(model)
    with patch(model) as report:
        assert {line.op: line.count for line in report.replaced}["ssd"] == 2
        with counted() as counts:
            greedy(model, inputs, 2)
        assert counts["recurrent_kernel"] == 4  # fp32: a prompt token after token too
        assert counts["causal_conv1d_kernel"] == counts["one_token_kernel"] == 2
    assert state_of(model) == before
    assert torch.equal(logits(model, inputs), stock)


def test_a_prompt_in_parts_is_the_prompt():
    """The second part has several tokens and a state in front of it."""
    model, ids = mamba(), torch.randint(3, 96, (2, 13))
    expected = logits(model, {"input_ids": ids})
    with patch(model):
        first = model(input_ids=ids[:, :7], use_cache=True)
        second = model(input_ids=ids[:, 7:], cache_params=first.cache_params, use_cache=True)
    near(torch.cat((first.logits, second.logits), 1), expected, 1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ({"state_size": 260}, "head_dim and ssm_state_size must be at most 256, got 16 and 260"),
        ({}, "its mamba2_chunk_scan computes something else"),
    ],
)
def test_a_mixer_that_ours_do_not_compute_is_kept_with_its_reason(change, reason, monkeypatch):
    stock = theirs.mamba2_chunk_scan
    if not change:
        monkeypatch.setattr(theirs, "mamba2_chunk_scan", lambda *args, **options: stock(*args, **options | {"dt_limit": (0.2, 0.3)}))
    with patch(mamba(**change)) as report:
        assert f"ssd: {reason}" in {line.reason for line in report.kept}


def test_packed_sequences_of_a_patched_mixer_are_refused():
    model = mamba()
    with patch(model), pytest.raises(ValueError, match="seq_idx must be None"):
        mixer_of(model)(torch.randn(1, 6, 32), seq_idx=torch.zeros(1, 6, dtype=torch.int32))


def test_a_state_of_16_bits_is_moved_on():
    given = tokens(1, dtype=torch.float16)
    wide = [value[..., None].expand(*value.shape, 16) for value in (given["dt"][:, 0].sigmoid(), SKIP)]
    rows = (given["x"][:, 0], wide[0], given["a"][:, None, None].expand(2, 16, 24), given["b"][:, 0], given["c"][:, 0], wide[1])
    state = torch.randn(2, 2, 16, 24).half()
    same = state.clone()
    expected = theirs.mamba2_selective_state_update(same, *rows)
    near(linear_attention.state_update(state, *rows), expected, 2e-3)
    near(state, same, 2e-3)


def test_half_precision_of_a_mixer_is_no_further_from_the_truth_than_transformers():
    model, x = mamba(torch.bfloat16), torch.randn(2, 70, 32)
    layer = mixer_of(model)
    truth = layer.double()(x.double())
    layer.bfloat16()
    stock = layer(x.bfloat16())
    with patch(model):
        ours = layer(x.bfloat16())
    assert F.mse_loss(ours.double(), truth) <= 4 * F.mse_loss(stock.double(), truth)
