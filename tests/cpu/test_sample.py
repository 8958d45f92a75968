"""Tests special to `sample`: which tokens are kept, how often each comes, independence of tiles,
edges, messages.
"""

import binaries
import cuda.tile as ct
import pytest
import torch

from tilewright import argmax, interpret, sample
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, forced_config, traced
from tilewright.ops import adjust_logits, sample as op
from tilewright.ops.sample.kernels import _exponential
from tilewright.testing import run_op

SEED = torch.tensor(7)


def f32(value):
    return torch.tensor(value, dtype=torch.float32)


def i32(value):
    return torch.tensor(value, dtype=torch.int32)


def draws(logits, count, **options):
    """`count` draws from one row: every row has noise of its own."""
    return sample(logits.expand(count, -1).contiguous(), SEED, **options)


def shares(logits, count, **options):
    return torch.bincount(draws(logits, count, **options), minlength=logits.shape[-1]).double() / count


@pytest.mark.parametrize(("temperature", "dtype"), [(None, torch.bfloat16), (0.5, torch.float32), (2.0, torch.bfloat16)])
def test_each_comes_as_often_as_the_softmax_says(dtype, temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, 1.0, -torch.inf, 0.0, 1.5]).to(dtype)
    found = shares(logits, 4000, temperature=None if temperature is None else f32(temperature))
    wanted = (logits.double() / (temperature or 1.0)).softmax(-1)
    assert found[4] == 0
    assert ((found - wanted).abs() < 5 * (wanted * (1 - wanted) / 4000).sqrt() + 1e-12).all(), (found, wanted)


def test_top_k_keeps_equal_logits_and_top_p_the_fewest_that_reach_it():
    logits = torch.tensor([0.5, 1.5, 1.0, 1.0, -0.5, 0.0])
    kept = [set(draws(logits, 90, top_k=i32(k)).tolist()) for k in (1, 2, 3, 4, 0, 100)]
    assert kept == [{1}, {1, 2, 3}, {1, 2, 3}, {0, 1, 2, 3}, *[set(range(6))] * 2]
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = [set(draws(logits, 90, top_p=f32(p)).tolist()) for p in (0.0, 0.49, 0.51, 0.79, 0.81, 0.96, 1.0)]
    assert kept == [{0}, {0}, {0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    # after top_k the rest is a distribution of its own: 0.5 / 0.8 is more than 0.6
    assert set(draws(logits, 90, top_k=i32(2), top_p=f32(0.6)).tolist()) == {0}
    # temperature comes first: at 4 the four are nearly equal
    assert set(draws(logits, 90, temperature=f32(4.0), top_p=f32(0.51)).tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("cols", "dtype"),
    [(5, torch.float32), (700, torch.float32), (700, torch.bfloat16), (5, torch.float16)],
    ids=lambda v: str(v).removeprefix("torch."),
)
def test_kept_sets_are_exact_and_no_tile_changes_a_draw(cols, dtype):
    rows = 16
    logits = (4 * torch.randn(rows, cols)).to(dtype)
    logits[3] = logits[3].round()  # many equal ones
    logits[4, 1:] = -torch.inf
    logits[5] = -torch.inf
    logits[6, : cols // 2] = torch.nan
    logits[7, cols // 2 :] = torch.inf
    logits[8] = torch.finfo(dtype).max * torch.sign(logits[8])
    logits[9] = torch.where(logits[9] > 0, 0.0, -0.0)
    logits[10] *= 1e-4  # around zero the places of floats are dense
    options = {
        "temperature": torch.linspace(0.0, 2.0, rows).clamp(max=1.5),
        "top_k": torch.linspace(0, cols + 3, rows).to(torch.int32).flip(0),
        "top_p": torch.linspace(0.05, 1.1, rows),
    }
    for turn, given in enumerate((set(), {"top_p"}, set(options))):
        chosen = {name: value for name, value in options.items() if name in given}
        expected = op.reference(logits, SEED, **chosen)
        problem = op.Problem(rows, cols, dtype, *(name in given for name in options), False)
        configs = (op.space(problem, Device.named("CPU"))[0], op.space(problem, Device.named("H200"))[-1], op.Config(64, 5))
        every = cols > 5 and dtype is torch.float32  # the others take turns
        for config in configs if every else configs[turn : turn + 1]:
            with forced_config(op.plan, config):
                assert torch.equal(sample(logits, SEED, **chosen), expected), (given, config)


def test_greedy_where_the_temperature_is_zero():
    logits = torch.randint(-4, 4, (6, 300)).float()  # equal largest ones
    options = {"top_k": i32(3), "top_p": f32(0.4)}
    assert torch.equal(sample(logits, SEED, temperature=f32(0.0), **options), argmax(logits))
    mixed = sample(logits, SEED, temperature=torch.tensor([0.0, 1.0, -1.0, torch.nan, 0.0, 1e-3]))
    assert torch.equal(mixed[[0, 2, 3, 4]], argmax(logits)[[0, 2, 3, 4]])
    assert (logits[5, mixed[5]] == logits[5].max()).all()  # cold: the largest, any of them
    assert torch.equal(sample(torch.full((2, 9), -torch.inf), SEED), torch.zeros(2, dtype=torch.int64))


def test_offset_seed_and_row_make_other_draws():
    logits = torch.zeros(8, 5000)
    first = sample(logits, SEED, torch.tensor(0))
    assert torch.equal(first, sample(logits, SEED))
    assert len(set(first.tolist())) > 6
    for seed, offset in ((7, 1), (8, 0), (7, 2**32), (7 + 2**32, 0)):
        assert (sample(logits, torch.tensor(seed), torch.tensor(offset)) != first).sum() > 6
    assert torch.equal(sample(logits[:3], SEED), first[:3])  # a row's draw does not depend on the others


def test_with_a_seed_for_each_row_a_draw_does_not_depend_on_its_place():
    torch.manual_seed(0)
    logits, seeds, offsets = torch.randn(6, 300), torch.arange(6) + 2**33, torch.arange(6) * 3
    options = {"temperature": f32(1.0), "top_p": torch.full((6,), 0.9)}
    drawn = sample(logits, seeds, offsets, **options)
    assert torch.equal(drawn, op.reference(logits, seeds, offsets, **options))
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert torch.equal(sample(logits[order], seeds[order], offsets[order], **options), drawn[order])
    alone = [sample(logits[i : i + 1], seeds[i], offsets[i], temperature=f32(1.0), top_p=f32(0.9)).item() for i in range(6)]
    assert alone == drawn.tolist()
    assert len(set(sample(torch.zeros(6, 300), seeds).tolist())) > 3


def test_values_that_change_while_serving_compile_nothing_new():
    kernels = set()
    for step in range(5):
        with traced(Device.named("H200")) as launches:
            meta = torch.empty(4, 128_256, device="meta")
            scalar = torch.empty((), dtype=torch.int64, device="meta")
            sample(meta, scalar, scalar + step, temperature=torch.empty(4, device="meta"), top_k=torch.empty((), dtype=torch.int32, device="meta"))
        kernels.add(tuple(traced.launch.compiled for traced in launches))
    assert len(kernels) == 1


def test_no_rows_launch_nothing():
    with counted() as counts:
        assert sample(torch.empty(0, 64), SEED).shape == (0,)
    assert not counts


X = torch.zeros(4, 64)
BAD = [
    ({"logits": X[0]}, ValueError, r"logits.dim\(\) must be 2, got 1"),
    ({"logits": X[:, :0]}, ValueError, r"logits.shape\[1\] must be at least 1, got 0"),
    ({"logits": X.int()}, ValueError, r"logits.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"seed": 3}, TypeError, r"seed must be a torch.Tensor, got int"),
    ({"seed": torch.zeros(3, dtype=torch.int64)}, ValueError, r"seed.shape must be \(\) or \(4,\), got \(3,\)"),
    ({"offset": torch.tensor(1.0)}, ValueError, r"offset.dtype must be int64, got float32"),
    ({"temperature": 0.5}, TypeError, r"temperature must be a torch.Tensor, got float"),
    ({"temperature": torch.zeros(3)}, ValueError, r"temperature.shape must be \(\) or \(4,\), got \(3,\)"),
    ({"top_k": torch.tensor(5)}, ValueError, r"top_k.dtype must be int32, got int64"),
    ({"top_p": torch.zeros(4, 1)}, ValueError, r"top_p.shape must be \(\) or \(4,\), got \(4, 1\)"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        sample(**{"logits": X, "seed": SEED, **change})
    assert not counts


def test_a_penalty_of_infinity_is_of_the_answers_tokens_alone():
    """The definition made a NaN of every other logit."""
    logits, counts, infinite = torch.randn(2, 40), torch.zeros(2, 40, dtype=torch.int32), torch.tensor(torch.inf)
    counts[:, 3], counts[:, 5] = 2, adjust_logits.PROMPT
    expected = logits.clone()
    expected[:, 3] = -torch.inf
    for function in (adjust_logits.adjust_logits, adjust_logits.reference):
        assert torch.equal(function(logits, counts, presence=infinite), expected)


@pytest.mark.parametrize("problem", [op.Problem(64, 151_936, torch.float32), op.Problem(226, 131_072, torch.bfloat16)], ids=["fp32", "bf16"])
def test_two_blocks_share_an_sm_where_rows_need_it(problem):
    """As the model counts: with what the compiler takes for a block alone, they took two waves."""
    with traced(Device.named("H200")) as launches, torch.inference_mode():
        run_op(op, problem.inputs(torch.device("meta")))
    found = binaries.made(Job.of(launches[0], "sm_90")).resources
    assert found.registers <= 128
    assert found.stack_bytes == 0


@ct.kernel
def exponential_kernel(WORDS, OUT):
    ct.store(OUT, (0,), _exponential(ct.load(WORDS, (0,), (4096,)).astype(ct.uint32)))


def test_the_exponential_of_a_word_is_good_to_fp32():
    """From 2**-33, which 1 - v rounds away, to 16.6."""
    words = torch.cat((torch.arange(1024), 2 ** torch.arange(32), 2**32 - 1 - torch.arange(1024), torch.randint(0, 2**32, (2016,))))
    out = torch.empty(4096)
    interpret(exponential_kernel, (1,), (words, out))
    v = ((words.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)).double()
    torch.testing.assert_close(out.double(), -torch.log1p(-v), rtol=4e-7, atol=0)
