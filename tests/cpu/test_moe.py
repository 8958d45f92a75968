"""Tests special to `moe`: ids of any kind, which weights are read, launches, layouts, messages."""

import re

import binaries
import pytest
import torch
import torch.nn.functional as F
from configs import compiled_kernels
from test_mega import disassembled

from tilewright import interpret, moe, moe_route
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, traced
from tilewright.ops import moe as op
from tilewright.ops.common.scaling import Scaling
from tilewright.ops.moe import Problem
from tilewright.testing import assert_accurate, check_op, run_op, seeded_inputs

CPU, H200 = torch.device("cpu"), Device.named("H200")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FEW = {"moe_few_kernel": 2, "moe_sum_kernel": 1}
MANY = {"moe_count_kernel": 1, "moe_permute_kernel": 1, "moe_kernel": 2, "moe_sum_kernel": 1}


pytestmark = pytest.mark.usefixtures("inference")


def widened(inputs):
    return {name: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in inputs.items()}


def configs_of(problem):
    """The interpreter's configs, and the default and the last of a GPU."""
    gpu = op.space(problem, H200)
    return list(dict.fromkeys((*op.space(problem, Device.named("CPU")), gpu[0], gpu[-1])))


def test_it_is_the_loop_over_experts_of_transformers():
    x, gate_up, down = torch.randn(11, 32), torch.randn(4, 48, 32) / 6, torch.randn(4, 32, 24) / 5
    weights, ids = moe_route(torch.randn(11, 4), 2)
    wanted = torch.zeros_like(x)
    for expert in range(4):
        slot, token = (expert == ids.T).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        wanted.index_add_(0, token, F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None])
    truth = op.reference(*(t.double() for t in (x, gate_up, down)), weights=weights.double(), ids=ids)
    torch.testing.assert_close(truth.float(), wanted)


IDS = {
    "all to one": [[3, 3], [3, 3], [3, 3], [3, 3], [3, 3]],
    "twice the same": [[1, 1], [1, 1], [0, 2], [2, 2], [4, 4]],
    "none": [[-1, 5], [5, -1], [-1, -1], [2**31 - 1, -(2**31)], [6, 7]],
    "one": [[-1, 5], [5, -1], [-1, 4], [-7, 100], [6, 7]],
    "every second foreign": [[0, -1], [9, 1], [2, 9], [-1, 3], [4, 9]],
    "few experts": [[0, 4], [4, 0], [0, 4], [0, 4], [4, 0]],
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_ids_of_any_kind(ids):
    dtypes = (torch.int32, torch.int64)[:: (-1) ** list(IDS.values()).index(ids)]
    for tokens, dtype in zip((5, 1), dtypes, strict=True):
        problem = Problem(tokens, 2, 5, 40, 48)
        inputs = {**seeded_inputs(op, problem, CPU), "ids": torch.tensor(ids, dtype=dtype)[:tokens]}
        for config in configs_of(problem):
            with interpret.checking(races=True):
                found = run_op(op, inputs, config)
            assert_accurate(found, op.reference(**inputs), op.reference(**widened(inputs)), f"{config}")


def test_ids_beyond_32_bits_are_not_wrapped():
    inputs = {**seeded_inputs(op, Problem(3, 2, 4, 16, 16), CPU), "ids": torch.full((3, 2), 2**32 + 1)}
    for config in configs_of(Problem(3, 2, 4, 16, 16)):
        assert run_op(op, inputs, config).eq(0).all()


@pytest.mark.parametrize("scaling", [Scaling.NONE, Scaling.ROW, Scaling.BLOCK])
@pytest.mark.parametrize("tokens", [1, 6])
def test_weights_of_experts_that_nobody_chose_are_not_used(tokens, scaling):
    """They are NaN, as is memory before it is written."""
    problem = Problem(tokens, 2, 6, 40, 128, scaling=scaling, bias=True, only=(1, 4), foreign=1)
    inputs = seeded_inputs(op, problem, CPU)
    for name in ("gate_up", "down", "bias_gate_up", "bias_down"):
        inputs[name][[0, 2, 3, 5]] = torch.full((), torch.nan).to(inputs[name].dtype)
    for config in configs_of(problem):
        assert run_op(op, inputs, config).isfinite().all(), config


def test_the_same_launch_follows_new_ids():
    """As in a replayed graph: the plan does not depend on the ids."""
    problem = Problem(30, 2, 5, 24, 32)
    inputs = seeded_inputs(op, problem, CPU)
    for only in ((0,), (3, 4), (0, 1, 2, 3, 4)):
        inputs["ids"].copy_(seeded_inputs(op, Problem(30, 2, 5, 24, 32, only=only), CPU)["ids"])
        assert_accurate(moe(**inputs), op.reference(**inputs), op.reference(**widened(inputs)))


def test_few_tokens_need_few_launches():
    for problem, wanted in (
        (Problem(1, 2, 4, 32, 16), {"moe_one_up_kernel": 1, "moe_one_down_kernel": 1}),
        (Problem(16, 2, 4, 32, 16), FEW),
        (Problem(17, 2, 4, 32, 16), MANY),
        (Problem(17, 2, 4, 128, 128, scaling=Scaling.BLOCK), MANY),
    ):
        with counted() as counts:
            moe(**seeded_inputs(op, problem, CPU))
        assert counts == wanted
        launches = op.plan(problem, op.space(problem, H200)[0], H200)
        assert len(launches) <= (2 if problem.tokens == 1 else 3 if problem.tokens <= 16 else 5)


def test_a_decode_pads_nothing_to_128_rows():
    """h and each expert's results have a row for each token, padded to a power of two; from two
    tokens on at least 8.
    """
    for tokens in (1, 2, 4, 16):
        problem = Problem(tokens, 8, 128, 2048, 768)
        config = op.space(problem, H200)[0]
        assert config.few
        assert config.tile_m == (1 if tokens == 1 else max(8, tokens))


def test_quantised_activations_are_as_good_as_those_of_the_reference():
    problem = Problem(40, 2, 4, 272, 256, scaling=Scaling.BLOCK)
    config = next(c for c in op.space(problem, Device.named("CPU")) if c.quantized)
    check_op(op, problem, CPU, config)
    with counted() as counts:
        run_op(op, seeded_inputs(op, problem, CPU), config)
    assert counts == {**MANY, "moe_quantize_kernel": 1}


def test_sizes_are_no_constants():
    """Every number of tokens from 17 on runs the same few kernels; decode of up to 16 tokens a few
    more.
    """
    problems = [Problem(tokens, 8, 128, 2048, 768) for tokens in (*range(1, 17), *range(17, 20_000, 331))]
    assert len(compiled_kernels(op, problems, H200)) <= 48


@pytest.mark.parametrize("device", ["H200", "B200", "GB10"])
@pytest.mark.parametrize("scaling", [Scaling.NONE, Scaling.ROW, Scaling.BLOCK])
def test_many_tokens_fit_a_grid(device, scaling):
    """With a block for each tile that there could be, x had more blocks than a launch takes."""
    device = Device.named(device)
    problem = Problem((1 << 24) - 1, 2, 4, 256, 2048, scaling=scaling)
    configs = op.space(problem, device)
    assert configs
    for config in configs:
        for launch in op.plan(problem, config, device):
            assert launch.grid[0] < 1 << 24
            assert all(n < 1 << 16 for n in launch.grid[1:])


def test_more_tokens_than_a_grid_has_blocks_are_refused():
    x, gate_up, down, weights, ids = (INPUTS[name] for name in ("x", "gate_up", "down", "weights", "ids"))
    tokens = 1 << 24
    many = {"x": x[:1].expand(tokens, -1), "weights": weights[:1].expand(tokens, -1), "ids": ids[:1].expand(tokens, -1)}
    with counted() as counts, pytest.raises(ValueError, match=r"x.shape\[0\] must be at most 16777215 tokens, got 16777216"):
        moe(gate_up=gate_up, down=down, **many)
    assert not counts


def test_slices_are_read_in_place_and_ids_may_lie_in_a_wider_tensor():
    inputs = seeded_inputs(op, Problem(6, 2, 3, 32, 16), CPU)
    wanted = moe(**inputs)
    x = torch.randn(6, 96).bfloat16()
    x[:, 16:48] = inputs["x"]
    gate_up = torch.randn(3, 40, 64).bfloat16()
    gate_up[:, 4:36, 8:40] = inputs["gate_up"]
    changed = {
        "x": x[:, 16:48],
        "gate_up": gate_up[:, 4:36, 8:40],
        "ids": torch.cat((inputs["ids"], inputs["ids"]), 1)[:, 2:],
        "weights": torch.cat((inputs["weights"], inputs["weights"]), 1)[:, :2],
    }
    assert torch.equal(moe(**{**inputs, **changed}), wanted)


def test_rows_and_biases_of_gate_and_up_may_take_turns():
    """As gpt-oss stores them."""
    for tokens in (1, 5, 20):
        inputs = seeded_inputs(op, Problem(tokens, 2, 3, 32, 16, bias=True, alpha=1.702, limit=1.0, up_offset=1.0), CPU)
        turns = {name: inputs[name].unflatten(1, (2, -1)).transpose(1, 2).contiguous().transpose(1, 2) for name in ("gate_up", "bias_gate_up")}
        assert torch.equal(moe(**{**inputs, **turns}), moe(**inputs))
        assert torch.equal(op.reference(**{**inputs, **turns}), op.reference(**inputs))


def test_it_is_the_activation_of_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = gpt_oss.GptOssConfig(hidden_size=24, intermediate_size=16, num_local_experts=4, swiglu_limit=0.8)
    experts = gpt_oss.GptOssExperts(config)
    for parameter in experts.parameters():
        parameter.normal_()
    x, (weights, ids) = torch.randn(9, 24), moe_route(torch.randn(9, 4), 2)
    found = op.reference(
        x,
        experts.gate_up_proj.mT.unflatten(1, (-1, 2)).transpose(1, 2),
        experts.down_proj.mT,
        weights=weights,
        ids=ids,
        bias_gate_up=experts.gate_up_proj_bias.unflatten(1, (-1, 2)).transpose(1, 2),
        bias_down=experts.down_proj_bias,
        alpha=experts.alpha,
        limit=experts.limit,
        up_offset=1.0,
    )
    torch.testing.assert_close(found, experts(x, ids.long(), weights))


def test_nothing_to_do():
    inputs = seeded_inputs(op, Problem(4, 2, 3, 32, 16), CPU)
    with counted() as counts:
        none = {name: inputs[name][:0] for name in ("x", "weights", "ids")}
        assert moe(**{**inputs, **none}).shape == (0, 32)
        assert moe(**{**inputs, "gate_up": inputs["gate_up"][:, :0], "down": inputs["down"][..., :0]}).eq(0).all()
    assert not counts


INPUTS = {
    "x": torch.zeros(4, 16, dtype=BF16),
    "gate_up": torch.zeros(3, 24, 16, dtype=BF16),
    "down": torch.zeros(3, 16, 12, dtype=BF16),
    "weights": torch.zeros(4, 2),
    "ids": torch.zeros(4, 2, dtype=torch.int32),
}
FP8 = {"gate_up": INPUTS["gate_up"].to(E4M3), "down": INPUTS["down"].to(E4M3), "scale_gate_up": torch.zeros(3, 24), "scale_down": torch.zeros(3, 16)}
BIASES = {"bias_gate_up": torch.zeros(3, 24, dtype=BF16), "bias_down": torch.zeros(3, 16, dtype=BF16)}
BAD = [
    ({"x": torch.zeros(4, 16)}, ValueError, r"x.dtype must be one of bfloat16, float16, got float32"),
    ({"x": INPUTS["x"][0]}, ValueError, r"x.dim\(\) must be 2, got 1"),
    ({"gate_up": INPUTS["gate_up"].half()}, ValueError, r"gate_up.dtype must be bfloat16, got float16"),
    ({"gate_up": INPUTS["gate_up"][:, :23]}, ValueError, r"gate_up.shape must be \(3, 24, 16\), got \(3, 23, 16\)"),
    ({"down": INPUTS["down"][:, :8]}, ValueError, r"down.shape\[1\] must be 16, the hidden size of x, got 8"),
    ({"down": INPUTS["down"][:0]}, ValueError, r"down.shape\[0\] must be 1 to 1024, the number of experts, got 0"),
    ({"weights": torch.zeros(3, 2)}, ValueError, r"weights.shape must be \(4, top_k\) with top_k from 1 to 64, got \(3, 2\)"),
    ({"weights": torch.zeros(4, 2, dtype=BF16)}, ValueError, r"weights.dtype must be float32, got bfloat16"),
    ({"ids": torch.zeros(4, 2)}, ValueError, r"ids.dtype must be one of int32, int64, got float32"),
    ({"ids": torch.zeros(4, 3, dtype=torch.int32)}, ValueError, r"ids.shape must be \(4, 2\), got \(4, 3\)"),
    ({"scale_down": torch.zeros(3, 16)}, ValueError, r"gate_up.dtype must be float8_e4m3fn, got bfloat16"),
    ({**FP8, "scale_down": None}, ValueError, r"scale_down must be given together with the other scale, got None"),
    ({**FP8, "scale_gate_up": torch.zeros(3, 23)}, ValueError, r"scale_gate_up.shape must be \(3, 24\) for rows or \(3, 1, 1\) for blocks"),
    ({**FP8, "scale_down": torch.zeros(3, 1, 1)}, ValueError, r"scale_down.shape must be \(3, 16\) for rows or \(3, 1, 1\) for blocks, both"),
    ({**FP8, "scale_gate_up": torch.zeros(3, 1, 1), "scale_down": torch.zeros(3, 1, 1)}, ValueError, r"down.shape\[2\] must be a multiple of 128"),
    ({**FP8, "scale_down": torch.zeros(3, 16).half()}, ValueError, r"scale_down.dtype must be float32, got float16"),
    ({"bias_down": BIASES["bias_down"]}, ValueError, r"bias_gate_up must be given together with the other bias, got None"),
    ({**BIASES, "bias_gate_up": torch.zeros(3, 23, dtype=BF16)}, ValueError, r"bias_gate_up.shape must be \(3, 24\), got \(3, 23\)"),
    ({**BIASES, "bias_down": torch.zeros(3, 16)}, ValueError, r"bias_down.dtype must be bfloat16, got float32"),
    ({"alpha": 0.0}, ValueError, r"alpha must be positive, got 0.0"),
    ({"limit": 0.0}, ValueError, r"limit must be positive, got 0.0"),
    ({"up_offset": float("inf")}, ValueError, r"up_offset must be finite, got inf"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        moe(**{**INPUTS, **change})
    assert not counts


def test_shared_experts_are_views_of_one_mlp_and_cost_no_launch():
    x, gate_up, down, weights, ids = (INPUTS[name] for name in ("x", "gate_up", "down", "weights", "ids"))
    x, weights, ids = x[:1], weights[:1], ids[:1]
    _, hidden, inter = down.shape
    matrix, last = torch.randn(2 * inter, 2, hidden).to(x.dtype), torch.randn(hidden, 2 * inter).to(x.dtype)
    both = {
        "shared_gate_up": matrix.view(2, inter, 2, hidden).transpose(1, 2),
        "shared_down": last.view(hidden, 2, inter).transpose(0, 1),
    }
    with counted() as counts:
        found = moe(x, gate_up, down, weights=weights, ids=ids, **both)
    assert counts == {"moe_one_up_kernel": 1, "moe_one_down_kernel": 1}
    whole = F.linear(F.silu(F.linear(x.float(), matrix[:, 0].float())) * F.linear(x.float(), matrix[:, 1].float()), last.float())
    torch.testing.assert_close(found.float(), moe(x, gate_up, down, weights=weights, ids=ids).float() + whole, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match=r"x.shape\[0\] must be 1 with shared experts, got "):
        moe(**{**INPUTS, **both})
    with pytest.raises(ValueError, match=r"alpha, limit and up_offset must be left out with shared experts, got \(1.702, None, 0.0\)"):
        moe(x, gate_up, down, weights=weights, ids=ids, alpha=1.702, **both)
    with pytest.raises(ValueError, match=r"shared_down must be given together with the other matrix, got None"):
        moe(x, gate_up, down, weights=weights, ids=ids, shared_gate_up=both["shared_gate_up"])


def test_without_8_bit_tensor_cores_there_is_no_config_for_8_bit_weights():
    """Configs that a compiler refuses are not in the space: sm_80 has no fp8."""
    problem = Problem(4, 2, 4, 128, 128, scaling=Scaling.BLOCK)
    assert op.space(problem, Device.named("A100")) == []
    assert op.space(problem, H200)


@pytest.mark.parametrize("which", range(4))
def test_biases_are_read_one_by_one(which):
    """Read as pairs, half of them had odd addresses: "misaligned address" (gpt-oss, one token,
    H200).
    """
    problem = Problem(1, 4, 32, 2880, 2880, BF16, bias=True, alpha=1.702, limit=7.0, up_offset=1.0)
    with traced(H200) as launches:
        run_op(op, problem.inputs(torch.device("meta")), op.space(problem, H200)[which])
    assert re.search(r"\bLDG\.E\.U16", disassembled(Job.of(launches[0], "sm_90").build()))  # ids and weights of the choices are 32 bits wide


def test_one_token_takes_the_tiles_of_the_table():
    found = {(c.up.tile_n, c.up.tile_k) for c in op.CHOICES.candidates(Problem(1, 8, 128, 2048, 768), H200) if c.few}
    assert found == {(32, 128), (16, 128), (16, 256), (8, 512)}


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 6, 64, 2048, 1408, BF16, shared=2),
        Problem(1, 8, 128, 2048, 768, BF16),
        Problem(1, 4, 32, 2880, 2880, BF16, bias=True, alpha=1.702, limit=7.0, up_offset=1.0),
    ],
    ids=["DeepSeek-V2-Lite", "Qwen3-30B-A3B", "gpt-oss-20b"],
)
def test_one_token_of_known_models_does_not_spill(problem):
    with traced(H200) as launches:
        run_op(op, problem.inputs(torch.device("meta")), op.space(problem, H200)[0])
    assert not [launch.launch.name for launch in launches if binaries.made(Job.of(launch, "sm_90")).resources.spills]


@pytest.mark.parametrize("shared", [1, 2, 5])
def test_weights_of_shared_experts_are_read_before_the_launch_in_front_has_ended(shared):
    """More experts than a block of the second product has room for: of these none."""
    problem = Problem(1, 6, 64, 2048, 1408, BF16, shared=shared)
    with traced(H200) as launches:
        run_op(op, problem.inputs(torch.device("meta")), op.space(problem, H200)[0])
    for launch, ahead in zip(launches, (True, shared <= 4), strict=True):
        code = disassembled(Job.of(launch, "sm_90").build())
        assert bool(re.search(r"\bLDG\.E\.128", code[: code.index("ACQBULK")])) == ahead


@pytest.mark.parametrize("ids", [[1, 9, 3], [-1, 7, 9], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("shared", [0, 2])
def test_blocks_that_walk_add_nothing_for_other_ranks(ids, shared):
    problem = Problem(1, 3, 4, 64, 48, BF16, shared=shared)
    (walking,) = {c for c in op.space(problem, Device.named("CPU")) if c.up.persistent and c.few}
    inputs = seeded_inputs(op, problem, CPU) | {"ids": torch.tensor([ids], dtype=torch.int32)}
    found = run_op(op, inputs, walking)
    assert_accurate(found, op.reference(**inputs), op.reference(**widened(inputs)))


def test_a_config_of_another_problem_is_right_or_illegal():
    """A tuned row, or a caller, may name any config that is legal."""
    device = Device.named("CPU")
    problems = [Problem(tokens, 2, 3, 136, 128, scaling=scaling) for scaling in (Scaling.NONE, Scaling.BLOCK) for tokens in (1, 17)]
    every = dict.fromkeys(c for p in (*problems, Problem(4, 2, 3, 136, 128)) for c in op.space(p, device))
    for problem in problems:
        legal = [c for c in every if op.CHOICES.legal(problem, c, device)]
        assert set(op.space(problem, device)) <= set(legal) < set(every)
        for config in legal:
            check_op(op, problem, CPU, config)
