"""What the loops of test_ops.py do not see of `rope`: in place on views, equality with the models' own code, messages."""

import pytest
import torch

from tilewright import rope
from tilewright.launch import Device, counted, forced_config
from tilewright.ops import rope as op
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
    """q and k are slices of a fused projection; v beside them, and the elements past rotary_dim, keep every bit (here: NaN)."""
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
    for config in {*op.space(problem, Device.named("CPU")), *op.space(problem, Device.named("H200"))}:
        ours = q.clone(), k.clone()
        with forced_config(op.plan, config):
            rope(*ours, cos, sin, interleaved=interleaved)
        torch.testing.assert_close(ours, expected)


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
    problems = (op.Problem(1, 32, 8, seq_len, 128, BF16) for seq_len in range(1, 3000))
    plans = [op.plan(p, op.space(p, device)[0], device) for p in problems]
    assert len({(plan.kernel, plan.constants) for plan in plans}) <= 8


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
    ({"q": Q[:, :1].expand(2, 4, 5, 64)}, ValueError, r"q must be free of broadcast axes, being written in place, got strides"),
    ({"k": K[..., :32].contiguous()}, ValueError, r"k.shape must be \(2, kv_heads, 5, 64\), got \(2, 2, 5, 32\)"),
    ({"k": K[:1]}, ValueError, r"k.shape must be \(2, kv_heads, 5, 64\), got \(1, 2, 5, 64\)"),
    ({"k": K.half()}, ValueError, r"k.dtype must be float32, got float16"),
    ({"k": torch.zeros(2, 2, 5, 64, device="meta")}, ValueError, r"k.device must be cpu, got meta"),
    ({"cos": None}, ValueError, r"the angles must be cos and sin, or positions and inv_freq, got sin"),
    ({"cos": None, "sin": None}, ValueError, r"the angles must be .*, got neither"),
    ({"positions": POSITIONS}, ValueError, r"the angles must be .*, got cos, sin, positions"),
    ({"cos": TABLE[:, :4]}, ValueError, r"cos.shape must be \(1 or 2, 5, 1 to 32\), got \(1, 4, 32\)"),
    ({"cos": torch.ones(1, 5, 64)}, ValueError, r"cos.shape must be \(1 or 2, 5, 1 to 32\), got \(1, 5, 64\)"),
    ({"cos": torch.ones(3, 5, 32)}, ValueError, r"cos.shape must be \(1 or 2, 5, 1 to 32\), got \(3, 5, 32\)"),
    ({"cos": TABLE.half()}, ValueError, r"cos.dtype must be one of float32, .*got float16"),
    ({"cos": torch.ones(1, 5, 32, device="meta")}, ValueError, r"cos.device must be cpu, got meta"),
    ({"sin": TABLE[..., :16]}, ValueError, r"sin.shape must be .*\(1, 5, 32\).*, got \(1, 5, 16\)"),
    ({"sin": TABLE.half()}, ValueError, r"sin.dtype must be float32, got float16"),
    ({"scaling": 2.0}, ValueError, r"scaling must be 1.0 with cos and sin, which contain it, got 2.0"),
    (BY_POSITION | {"positions": POSITIONS.float()}, ValueError, r"positions.dtype must be one of int32, int64, got float32"),
    (BY_POSITION | {"positions": POSITIONS[0]}, ValueError, r"positions.dim\(\) must be 2, got 1"),
    (BY_POSITION | {"positions": POSITIONS[:, :4]}, ValueError, r"positions.shape must be \(1 or 2, 5\), got \(1, 4\)"),
    (BY_POSITION | {"positions": POSITIONS.to("meta")}, ValueError, r"positions.device must be cpu, got meta"),
    (BY_POSITION | {"inv_freq": torch.ones(33)}, ValueError, r"inv_freq.shape must be \(1 to 32,\), got \(33,\)"),
    (BY_POSITION | {"inv_freq": INV_FREQ.half()}, ValueError, r"inv_freq.dtype must be one of float32, got float16"),
    (BY_POSITION | {"inv_freq": INV_FREQ.to("meta")}, ValueError, r"inv_freq.device must be cpu, got meta"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched_or_written(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        rope(**{"q": Q, "k": K, "cos": TABLE, "sin": TABLE, **change})
    assert not counts
    assert (Q == 1).all()
    assert (K == 1).all()
