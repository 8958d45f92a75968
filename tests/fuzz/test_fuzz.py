"""Drawn calls on a CPU, and that the fuzz finds what is wrong."""

import pytest
import torch

from tilewright import ops
from tilewright.cli import app
from tilewright.ops import layer_norm, moe_route, rms_norm
from tilewright.testing import fuzz, op_name
from tilewright.testing.check import outputs, run_op
from tilewright.testing.definitions import DEFINITIONS, attention
from tilewright.testing.definitions.products import code_sums
from tilewright.testing.fuzz import Family, Layout, fuzz_command
from tilewright.testing.fuzz_draws import DRAWS

CPU = torch.device("cpu")


@pytest.mark.slow
def test_rounds_of_every_op():
    """In 20 s, on one free core, some 300 calls of 50 families."""
    assert fuzz_command(None, seconds=20, device="cpu") == 0


def test_every_op_is_drawn_and_defined():
    names = {op_name(op) for op in ops.ALL}
    assert set(DRAWS) == names
    assert {*DEFINITIONS, "rms_norm_route", "sample"} == names  # these two are judged in fuzz.py


def test_one_seed_is_one_sequence_of_problems():
    def drawn(seed):
        family = Family(rms_norm, seed, 3, CPU)
        return family.fixed, family.layout, family.forced

    for number in range(8):  # a case that runs alone has the config that it had among others
        alone, among = (Family(rms_norm, 5, number, CPU) for _ in range(2))
        assert among._config(0) == Family(rms_norm, 5, number, CPU)._config(0)
        assert among._config(2) == alone._config(2)

    assert drawn(5) == drawn(5)
    assert len({str(drawn(seed)) for seed in range(20)}) > 10


def test_of_equal_groups_the_first_take_part():
    logits = torch.randint(0, 3, (64, 16), generator=torch.Generator().manual_seed(0)).float()
    options = {"sigmoid": False, "bias": None, "normalize": True, "scale": 1.0, "groups": 8, "top_groups": 3}
    found = DEFINITIONS["moe_route"](logits, 5, **options)[0]
    assert torch.allclose(found, moe_route.reference(logits, 5, **options)[0])


def test_a_result_has_as_many_elements_as_carry_its_rms():
    assert fuzz.carrying(torch.ones(8, 64), rows=False) == pytest.approx(512)
    assert fuzz.carrying(torch.ones(8, 64), rows=True) == pytest.approx(8)
    assert fuzz.carrying(torch.tensor([1.0, *[1e-3] * 500, torch.inf]), rows=False) == pytest.approx(1, abs=0.01)
    assert fuzz.carrying(torch.zeros(3), rows=False) == 0.0


EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("elements", "first", "later", "draws"),
    [
        (1, (4 * EPS, 0.0), (2 * EPS, 2 * EPS), 0),  # beside an error of 0, any is too large
        (1, (4 * EPS, 0.0), (8 * EPS, 2 * EPS), 64),
        (1, (torch.nan, 0.0), (0.0, 0.0), 1),
        (100, (6 * EPS, 2 * EPS), (3 * EPS, 3 * EPS), 0),
        (100, (6 * EPS, 2 * EPS), (6 * EPS, 2 * EPS), 64),
        (100, (16 * EPS, 2 * EPS), (2 * EPS, 2 * EPS), 1),
    ],
)
def test_what_may_be_luck_is_judged_over_many_draws(elements, first, later, draws):
    """Each draw by itself was right or wrong: four unlucky ones of one element called a call wrong,
    and one with an error of torch's near 0 did so at once.
    """

    def drawn(number, again=0):
        ours, theirs = later if again else first
        truth = torch.ones(elements, dtype=torch.float64)
        return "it", [((truth + ours).float(), (truth + theirs).float(), truth)]

    family = Family(layer_norm, 0, 0, CPU)
    family._case = drawn
    if draws:
        with pytest.raises(AssertionError, match=rf"^it output 0 \(draws: {draws}\): rms "):
            family.case(0)
    else:
        family.case(0)


@pytest.mark.parametrize("m", [1, 4, 15])
def test_few_rows_are_judged_as_many_are(m):
    """Of few rows alone, PyTorch sums fp32 products with less error on a CPU."""
    torch.manual_seed(0)
    a, b = torch.randn(m, 328), torch.randn(193, 328)
    given = {"trans_a": False, "trans_b": True, "stored": torch.float32, "tf32": False}
    errors = []
    for rows in (a, torch.cat((a, torch.randn(64, 328)))):
        (found,) = DEFINITIONS["matmul"](rows, b, None, exact=False, **given)
        errors.append((found[:m] - a.double() @ b.double().T).square().mean().sqrt().item())
    assert errors[0] == pytest.approx(errors[1], rel=0.25)


def test_one_query_is_judged_as_many_are():
    """Calls of fp32 sparse_decode were called wrong beside the smaller error of one row."""
    torch.manual_seed(0)
    q, k = torch.randn(64, 1, 256), torch.randn(64, 65, 256)
    errors = []
    for rows in (q, torch.cat((q, torch.randn(64, 20, 256)), 1)):
        found = attention.scores_of_fp32(rows, k, False)[:, :1]
        errors.append((found - q.double() @ k.double().mT).square().mean().sqrt().item())
    assert errors[0] == pytest.approx(errors[1], rel=0.25)


def test_a_wrong_element_is_found_and_its_line_repeats_it(monkeypatch, capsys):
    right = layer_norm.layer_norm

    def wrong(x, *args, **kwargs):
        out = right(x, *args, **kwargs)
        out[-1, -1] += 1.0
        return out

    monkeypatch.setattr(fuzz, "CASES", {"cpu": 1})
    monkeypatch.setattr(layer_norm, "layer_norm", wrong)
    assert fuzz_command(["layer_norm"], seconds=1, seed=7, device="cpu") == 1
    told = capsys.readouterr().out.splitlines()
    total = next(i for i, line in enumerate(told) if " cases in " in line)
    line = told[total + 1]  # what a cut log keeps
    assert line in told[:total]
    assert line.startswith("wrong: tilewright verify layer_norm --fuzz 0 --seed 7 --case 0.0")
    arguments = line.removeprefix("wrong: tilewright ").split()
    assert app(arguments, standalone_mode=False) == 1
    assert capsys.readouterr().out.startswith("wrong: layer_norm Problem")
    monkeypatch.setattr(layer_norm, "layer_norm", right)
    app(arguments, standalone_mode=False)
    assert "right" in capsys.readouterr().out


def test_an_op_that_reads_beyond_its_rows_is_found(monkeypatch):
    right = layer_norm.layer_norm

    def reads_on(x, *args, **kwargs):
        behind = x.as_strided((1,), (1,), x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + x.shape[1])
        return right(x, *args, **kwargs) + 0 * behind.to(x.dtype)

    monkeypatch.setattr(layer_norm, "layer_norm", reads_on)
    with pytest.raises(AssertionError, match="nan"):
        Family(layer_norm, 0, 0, CPU).case(0)


@pytest.mark.parametrize("layout", [Layout(), Layout(pad=1, shift=3), Layout(pad=8), Layout(expand=True)])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4), (1, 1)])
def test_a_layout_keeps_values(layout, shape):
    x = torch.randn(shape)
    placed = layout.placed(x, "a")
    assert torch.equal(placed, x[:1].expand_as(x) if layout.expand and x.dim() == 3 else x)
    assert placed.stride(-1) == 1
    if layout.pad and x.dim() > 1:
        assert placed.stride(-2) == shape[-1] + layout.pad


def test_case_needs_one_op_and_fuzz():
    with pytest.raises(ValueError, match="--case must come with one op"):
        fuzz_command(None, seconds=1, case="0.0", device="cpu")


@pytest.mark.parametrize(("op", "sizes"), [("matmul", {"m": 40}), ("bmm", {"m": 40, "batch": 2}), ("grouped_gemm", {"rows": 40, "groups": 2})])
def test_an_fp32_result_is_judged_as_one(op, sizes):
    """One that was rounded to the operands' 16 bits on its way is wrong."""
    module = getattr(ops, op)
    inputs = module.Problem(**sizes, n=24, k=50, dtype=torch.bfloat16, out_dtype=torch.float32).inputs(CPU)
    right = outputs(run_op(module, inputs))
    rounded = [y.bfloat16().float() for y in right]
    assert not fuzz.beyond([fuzz.compared(op, right, inputs, "")])
    assert "of the bound" in fuzz.beyond([fuzz.compared(op, rounded, inputs, "")])


@pytest.mark.parametrize(("k", "fresh", "least", "most"), [(512, 128, 1.0e-4, 1.4e-4), (7168, 7168, 1.6e-3, 2.2e-3)])
def test_sums_of_codes_have_the_error_that_an_h200_showed(k, fresh, least, most):
    """The second was 2.5e-3 with the rounding to bf16, which alone is 1.7e-3."""
    torch.manual_seed(0)
    a, b = (torch.randn(32, k).to(torch.float8_e4m3fn).float() for _ in range(2))
    truth = a.double() @ b.double().mT
    error = (code_sums(a, b, fresh) - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert least < error < most


@pytest.mark.parametrize(
    ("dtype", "a", "b", "on_h200"),
    [
        ("float8_e4m3fn", "b0ad233a2a29abb8b3b0bc352c34281c32", "98053a3729b6c1a92727a92eacb0ab38b8", 1.6766357421875),
        (
            "float8_e4m3fn",
            "ae3db23635382a1d3a3a39ae33380a3cc137c140b8bf1d3db2bbc22f2632acb98f3e3034b2ac33a8bbb8beb6a1bf39b2",
            "38b1be163021249b3c24b234afb587992b9c36110bb438413939bdbbbd16213c25bc36293d3c8485ae1f2d39a13ca72e",
            -6.39013671875,
        ),
        (
            "float8_e5m2",
            "b0b63938bf2836acb43b32b8bac03a3b3f9fbdbdbd3da9b8b5b435b8bb2aa93d",
            "c0b6b53b35b4a03d3dbb38383db2b5b23ab4b5b52f3929adbf2a3db8a8c03ab8",
            1.0343017578125,
        ),
        ("float8_e5m2", "838b000320038080818080001a000b0017", "a00080330580803602029225008b91a400", 1.0836869478225708e-05),
    ],
    ids=["e4m3-17", "e4m3-48", "e5m2-32", "subnormal"],
)
def test_sums_of_codes_are_those_of_an_h200_bit_for_bit(dtype, a, b, on_h200):
    """tests/gpu compares more of them."""
    a, b = (torch.frombuffer(bytearray.fromhex(codes), dtype=torch.uint8).view(getattr(torch, dtype))[None] for codes in (a, b))
    assert code_sums(a, b).item() == on_h200


@pytest.mark.parametrize(("planted", "right"), [({}, True), ({"kv_len": -1}, False), ({"scale": 1.01}, False), ({"k_scale": 1.005}, False)])
def test_scores_of_codes_are_bound_by_the_same_sums(monkeypatch, planted, right):
    """One sum in some thousands loses ten times what others lose, on a GPU and here."""
    monkeypatch.setattr(attention, "has_tensor_cores", lambda x: True)
    torch.manual_seed(11)
    inputs = ops.mla.Problem(batch=2, heads=3, q_len=18, kv_len=41, dtype=torch.float8_e4m3fn, causal=False, has_len=True, return_lse=True).inputs(
        CPU
    )
    inputs = {**inputs, "scale": 192**-0.5}
    on_gpu = {name: (x + planted[name] if name == "kv_len" else x * planted[name]) if name in planted else x for name, x in inputs.items()}
    assert (fuzz.beyond([fuzz.compared("mla", DEFINITIONS["mla"](**on_gpu), inputs, "")]) == "") == right


def test_scores_of_codes_have_one_sum_of_all_columns(monkeypatch):
    monkeypatch.setattr(attention, "has_tensor_cores", lambda x: True)
    torch.manual_seed(0)
    inputs = ops.mla.Problem(batch=1, heads=2, q_len=9, kv_len=12, dtype=torch.float8_e4m3fn, causal=False, return_lse=True).inputs(CPU)
    q = torch.cat((inputs["q_nope"].float(), inputs["q_rope"].float()), -1)
    k = torch.cat((inputs["k_nope"].float(), inputs["k_rope"].float().expand(-1, 2, -1, -1)), -1)
    scores = code_sums(q, k, 192) * 192**-0.5 * (inputs["q_scale"] * inputs["k_scale"])[:, None, None]
    torch.testing.assert_close(DEFINITIONS["mla"](**inputs)[1], scores.logsumexp(-1), rtol=0, atol=4e-6)  # cut sums differ by 1e-4
