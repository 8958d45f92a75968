"""Tests special to `rope`: in place on views, equality with the models' own code, messages."""

import random

import binaries
import pytest
import torch
from configs import ROWS

from tilewright import rope
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, forced_config, forget_plans, traced
from tilewright.ops import rope as op
from tilewright.ops.rope import decision
from tilewright.testing import assert_accurate

BF16 = torch.bfloat16


def angles(positions, half, dtype=torch.float32):
    inv_freq = 10_000.0 ** (-torch.arange(half) / half)
    angle = positions[..., None].float() * inv_freq
    return angle.cos().to(dtype), angle.sin().to(dtype), inv_freq


def test_reference_is_transformers_half_split():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, 4, 5, 32).to(BF16), torch.randn(2, 2, 5, 32).to(BF16)
    cos, sin, _ = angles(torch.arange(5)[None], 16, BF16)
    both = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    for ours, theirs in zip(op.reference(q, k, cos, sin), llama.apply_rotary_pos_emb(q, k, *both), strict=True):
        assert torch.equal(ours, theirs)


def test_reference_interleaved_is_multiplication_by_a_complex_number():
    q, k = torch.randn(2, 4, 5, 32), torch.randn(2, 1, 5, 32)
    cos, sin, _ = angles(torch.arange(5)[None], 16)
    turn = torch.complex(cos, sin)[:, None]
    for ours, x in zip(op.reference(q, k, cos, sin, interleaved=True), (q, k), strict=True):
        theirs = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (16, 2))) * turn).flatten(-2)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 48, 20])
def test_in_place_on_views_of_one_projection(interleaved, rotary_dim):
    """q and k are slices of a fused projection. v and the elements past rotary_dim (NaN) keep every
    bit.
    """
    batch, seq_len, q_heads, kv_heads, head_dim = 2, 7, 4, 2, 64
    qkv = torch.randn(batch, seq_len, q_heads + 2 * kv_heads, head_dim).to(BF16)
    qkv[:, :, q_heads + kv_heads :] = torch.nan
    qkv[..., rotary_dim:] = torch.nan
    q, k, _ = (x.transpose(1, 2) for x in qkv.split((q_heads, kv_heads, kv_heads), 2))
    before = q.clone(), k.clone()
    cos, sin, _ = angles(torch.arange(seq_len)[None], rotary_dim // 2, BF16)
    expected = op.reference(q, k, cos, sin, interleaved=interleaved)
    truth = op.reference(q.double(), k.double(), cos.double(), sin.double(), interleaved=interleaved)

    with counted() as counts:
        result = rope(q, k, cos, sin, interleaved=interleaved)
    assert sum(counts.values()) == 1
    assert result[0] is q
    assert result[1] is k
    for ours, old, theirs, true in zip(result, before, expected, truth, strict=True):
        assert_accurate(ours[..., :rotary_dim], theirs[..., :rotary_dim], true[..., :rotary_dim])
        assert not torch.equal(ours[:, :, 1:, :rotary_dim], old[:, :, 1:, :rotary_dim])
        assert ours[..., rotary_dim:].isnan().all()
    assert qkv[:, :, q_heads + kv_heads :].isnan().all()


@pytest.mark.parametrize("head_dim", [80, 96, 6])
@pytest.mark.parametrize("interleaved", [False, True])
def test_halves_that_are_no_power_of_two(head_dim, interleaved):
    q, k = torch.randn(2, 3, 6, head_dim), torch.randn(2, 1, 6, head_dim)
    cos, sin, _ = angles(torch.arange(6)[None], head_dim // 2)
    expected = op.reference(q, k, cos, sin, interleaved=interleaved)
    problem = op.Problem(2, 3, 1, 6, head_dim, torch.float32, interleaved=interleaved)
    turn = head_dim // 2 % 4 + interleaved
    for configs in (op.space(problem, Device.named("CPU")), op.space(problem, Device.named("H200"))[:4]):
        config = configs[turn % len(configs)]
        ours = q.clone(), k.clone()
        with forced_config(op.plan, config):
            rope(*ours, cos, sin, interleaved=interleaved)
        torch.testing.assert_close(ours, expected)


# (batch, q_heads, kv_heads, seq_len, head_dim, rotary_dim): heads, lengths and halves that no tile
# divides
ODD = [
    (2, 40, 8, 13, 16, 16),
    (2, 32, 32, 5, 96, 96),
    (3, 32, 16, 3, 16, 16),
    (1, 64, 8, 11, 8, 8),
    (1, 28, 4, 9, 16, 16),
    (3, 25, 5, 7, 8, 8),
    (2, 16, 16, 10, 80, 80),
    (1, 128, 8, 3, 24, 8),
    (2, 14, 2, 33, 72, 72),
    (1, 9, 3, 19, 8, 6),
    (2, 1, 71, 2, 8, 8),
]


KINDS = ["inside", "outside", "interleaved", "positions"] * 6


@pytest.mark.parametrize(("shape", "kind", "name"), list(zip(ODD * 2, KINDS, ["CPU"] * 11 + ["H200"] * 11, strict=False)), ids=str)
def test_odd_shapes(shape, kind, name):
    """Each shape as two kinds, and with the default of each device."""
    options = {"heads_inside": kind != "outside", "interleaved": kind == "interleaved", "from_positions": kind == "positions"}
    problem = op.Problem(*shape[:5], torch.float32, shape[5], **options)
    inputs = problem.inputs(torch.device("cpu"))
    expected = op.reference(**inputs)
    ours = {**inputs, "q": inputs["q"].clone(), "k": inputs["k"].clone()}
    with forced_config(op.plan, op.space(problem, Device.named(name))[0]):
        torch.testing.assert_close(rope(**ours), expected, rtol=1e-5, atol=1e-5)


def drawn(count):
    """Problems as models and prompts make them, none chosen by hand."""
    draw = random.Random(1122)
    for _ in range(count):
        kv_heads, group = draw.choice([1, 2, 3, 4, 5, 8, 10, 16, 32]), draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 16])
        head_dim = draw.choice([32, 64, 72, 80, 96, 128, 192, 256, 576])
        batch, seq_len = int(2 ** draw.uniform(0, 8)), draw.choice([1, int(2 ** draw.uniform(0, 13))])
        dtype = draw.choice([BF16, torch.float16, torch.float32])
        yield op.Problem(batch, kv_heads * group, kv_heads, seq_len, head_dim, dtype, interleaved=draw.random() < 0.2)


@pytest.mark.parametrize("name", ["A100", "H200", "B200", "RTX5090"])
def test_drawn_shapes_have_configs_that_load_wide_and_fill_their_lanes(name):
    device = Device.named(name)
    for p in drawn(200):
        configs = op.space(p, device)
        config = configs[0]
        assert decision.work(p, config, device).chain == 0
        assert decision.lanes(p, config)[1] * p.dtype.itemsize <= 48, (p, config)
        # At least 4 bytes a thread and load, unless the whole problem has no more for a block.
        tile = min(config.tile_h, max(p.q_heads, p.kv_heads)) * config.tile_s * (p.rotated // 2) * p.dtype.itemsize * (2 if p.interleaved else 1)
        assert tile >= 256 or config.tile_h >= p.q_heads, (p, config)


def test_compiled_defaults_load_everything_at_once():
    """A load that checks its bounds stands in a branch and waits for the one before: there are
    none, only predicates.
    """
    shapes = [(2, 32, 32, 314, 96), (5, 25, 5, 333, 64), (2, 16, 16, 1000, 80), (3, 14, 2, 1001, 64)]
    device = Device.named("H200")
    for shape in shapes:
        problem = op.Problem(*shape, BF16)
        with traced(device) as launches:
            rope(**problem.inputs(torch.device("meta")))
        found = binaries.made(Job.of(launches[0], "sm_90")).resources
        assert not found.spills
        assert found.count("BRA") <= 2, (shape, found.instructions)


TOKENS = [(1, 1 << 20), (1 << 20, 1), (1 << 10, 1 << 10), (3, 349_526), (1, 1 << 31), (1 << 31, 1), (1 << 26, 3), (70_000, 70_000)]


@pytest.mark.parametrize(("batch", "seq_len"), TOKENS)
@pytest.mark.parametrize("heads_inside", [True, False])
@pytest.mark.parametrize(("heads", "head_dim"), [((40, 8), 128), ((1, 1), 2)])
def test_any_number_of_tokens_fits_into_the_grid(batch, seq_len, heads_inside, heads, head_dim):
    problem = op.Problem(batch, *heads, seq_len, head_dim, BF16, heads_inside=heads_inside)
    device = Device.named("H200")
    configs = op.space(problem, device)
    assert configs
    for config in configs:
        (launch,) = op.plan(problem, config, device)
        x, y, z = launch.grid
        assert x < 1 << 24
        assert max(y, z) < 1 << 16
        assert x * y * z * config.tile_s * config.tile_h * config.tiles >= heads[0] * batch * seq_len


@pytest.mark.parametrize("limits", [(7, 65_535), (7, 2)])
@pytest.mark.parametrize("kind", ["inside", "positions"])
def test_what_is_too_much_for_x_goes_on_in_z(limits, kind, monkeypatch):
    """Every place once, and none beyond the last: that of an odd batch has no block in the last
    z.
    """
    monkeypatch.setattr(decision, "MAX_X", limits[0])
    monkeypatch.setattr(decision, "MAX_Y", limits[1])
    forget_plans()
    problem = op.Problem(5 if limits[1] > 5 else 2, 4, 2, 9, 16, torch.float32, from_positions=kind == "positions")
    config = op.Config(2, 2, num_worker_warps=4)
    (launch,) = op.plan(problem, config, Device.named("CPU"))
    assert launch.grid[0] <= 7
    assert launch.grid[2] > 1
    inputs = problem.inputs(torch.device("cpu"))
    expected = op.reference(**inputs)
    with forced_config(op.plan, config):
        torch.testing.assert_close(rope(**inputs), expected)
    forget_plans()


@pytest.mark.parametrize("heads", [slice(0, 4), slice(0, 1), slice(3, 5), slice(2, 3)])
def test_q_and_k_that_share_elements_are_refused(heads):
    """Each would be rotated by what the other left of it.

    Neighbours in one projection are not meant: they share only the storage.
    """
    x = torch.ones(2, 5, 8, 64).transpose(1, 2)
    for q, k in ((x[:, :4], x[:, heads]), (x[:, heads], x[:, :4])):
        with counted() as counts, pytest.raises(ValueError, match="k must be free of elements of q, because both are written in place, got"):
            rope(q, k, TABLE, TABLE)
        assert not counts
    rope(x[:, :4], x[:, 4:6], TABLE, TABLE)
    rope(x[:, 4:], x[:, :4], TABLE, TABLE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [1, 3])
def test_positions_are_the_tables_they_stand_for(dtype, rows):
    q, k = torch.randn(3, 4, 5, 64), torch.randn(3, 2, 5, 64)
    positions = torch.arange(5)[None] + 1000 * torch.arange(rows)[:, None]
    cos, sin, inv_freq = angles(positions, 32)
    by_table = rope(q.clone(), k.clone(), 1.5 * cos, 1.5 * sin)
    by_position = rope(q, k, positions=positions.to(dtype), inv_freq=inv_freq, scaling=1.5)
    torch.testing.assert_close(by_position, by_table)


def test_far_positions_are_as_accurate_as_torchs():
    q, k = torch.randn(1, 2, 4, 64), torch.randn(1, 1, 4, 64)
    positions = torch.tensor([[1 << 17, (1 << 17) + 1, 1_000_003, 5]])
    inv_freq = angles(positions, 32)[2]
    theirs = op.reference(q, k, positions=positions, inv_freq=inv_freq)
    truth = op.reference(q.double(), k.double(), positions=positions, inv_freq=inv_freq.double())
    for o, t, w in zip(rope(q.clone(), k.clone(), positions=positions, inv_freq=inv_freq), theirs, truth, strict=True):
        assert_accurate(o, t, w)


def test_tables_may_be_fp32_beside_bf16_and_differ_by_sequence():
    q, k = torch.randn(3, 4, 5, 64).to(BF16), torch.randn(3, 2, 5, 64).to(BF16)
    cos, sin, _ = angles(torch.arange(15).view(3, 5), 32)
    truth = op.reference(q.double(), k.double(), cos.double(), sin.double())
    theirs = op.reference(q, k, cos, sin)
    for o, t, w in zip(rope(q.clone(), k.clone(), cos, sin), theirs, truth, strict=True):
        assert_accurate(o, t, w)


@pytest.mark.parametrize(("batch", "seq_len"), [(0, 5), (2, 0)])
def test_empty_launches_nothing(batch, seq_len):
    q, k = torch.empty(batch, 4, seq_len, 64), torch.empty(batch, 2, seq_len, 64)
    table = torch.empty(1, seq_len, 32)
    with counted() as counts:
        assert rope(q, k, table, table)[0] is q
    assert not counts


def test_few_kernels_serve_every_prompt_length():
    device = Device.named("H200")
    problems = (op.Problem(1, 32, 8, seq_len, 128, BF16) for seq_len in ROWS)
    launches = [op.plan(p, op.space(p, device)[0], device)[0] for p in problems]
    assert len({launch.compiled for launch in launches}) <= 8


Q, K, TABLE = torch.ones(2, 4, 5, 64), torch.ones(2, 2, 5, 64), torch.ones(1, 5, 32)
POSITIONS, INV_FREQ = torch.zeros(1, 5, dtype=torch.int64), torch.ones(32)
BY_POSITION = {"cos": None, "sin": None, "positions": POSITIONS, "inv_freq": INV_FREQ}
BAD = [
    ({"q": None}, TypeError, r"q must be a torch.Tensor, got NoneType"),
    ({"q": Q[0]}, ValueError, r"q.dim\(\) must be 4, got 3"),
    ({"q": torch.tensor(1.0)}, ValueError, r"q.dim\(\) must be 4, got 0"),
    ({"q": Q.double()}, ValueError, r"q.dtype must be one of bfloat16, float16, float32, got float64"),
    ({"q": Q.mT.contiguous().mT}, ValueError, r"q.stride\(-1\) must be 1, got 5"),
    ({"q": Q.clone().requires_grad_()}, ValueError, r"q.requires_grad must be False"),
    ({"q": Q[:, :1].expand(2, 4, 5, 64)}, ValueError, r"q must be free of broadcast axes, because it is written in place, got strides"),
    ({"k": K[..., :32].contiguous()}, ValueError, r"k.shape must be \(2, kv_heads, 5, 64\), got \(2, 2, 5, 32\)"),
    ({"k": K[:1]}, ValueError, r"k.shape must be \(2, kv_heads, 5, 64\), got \(1, 2, 5, 64\)"),
    ({"k": K.half()}, ValueError, r"k.dtype must be float32, got float16"),
    ({"cos": None}, ValueError, r"the angles must be cos and sin, or positions and inv_freq, got sin"),
    ({"cos": None, "sin": None}, ValueError, r"the angles must be .*, got neither"),
    ({"positions": POSITIONS}, ValueError, r"the angles must be .*, got cos, sin, positions"),
    ({"cos": TABLE[:, :4]}, ValueError, r"cos.shape must be \(1 or 2, 5, 1 to 32\), got \(1, 4, 32\)"),
    ({"cos": torch.ones(1, 5, 64)}, ValueError, r"got \(1, 5, 64\): transformers gives each angle twice, so pass the first half"),
    ({"cos": torch.ones(3, 5, 32)}, ValueError, r"cos.shape must be \(1 or 2, 5, 1 to 32\), got \(3, 5, 32\)"),
    ({"cos": TABLE.half()}, ValueError, r"cos.dtype must be float32, got float16"),
    ({"sin": TABLE[..., :16]}, ValueError, r"sin.shape must be .*\(1, 5, 32\).*, got \(1, 5, 16\)"),
    ({"sin": TABLE.half()}, ValueError, r"sin.dtype must be float32, got float16"),
    ({"scaling": 2.0}, ValueError, r"scaling must be 1.0 with cos and sin, which contain it, got 2.0"),
    (BY_POSITION | {"positions": POSITIONS.float()}, ValueError, r"positions.dtype must be one of int32, int64, got float32"),
    (BY_POSITION | {"positions": POSITIONS[0]}, ValueError, r"positions.dim\(\) must be 2, got 1"),
    (BY_POSITION | {"positions": POSITIONS[:, :4]}, ValueError, r"positions.shape must be \(1 or 2, 5\), got \(1, 4\)"),
    (BY_POSITION | {"inv_freq": torch.ones(33)}, ValueError, r"inv_freq.shape must be \(1 to 32,\), got \(33,\)"),
    (BY_POSITION | {"inv_freq": INV_FREQ.half()}, ValueError, r"inv_freq.dtype must be float32, got float16"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched_or_written(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        rope(**{"q": Q, "k": K, "cos": TABLE, "sin": TABLE, **change})
    assert not counts
    assert (Q == 1).all()
    assert (K == 1).all()
