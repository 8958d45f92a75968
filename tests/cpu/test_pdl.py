"""PDL: which plans use it, and that their kernels wait before they touch memory."""

import ast
import functools
import inspect
import textwrap
from functools import partial
from typing import Any

import binaries
import pytest
import torch

from tilewright import ops
from tilewright.compile.job import Job
from tilewright.launch import Device, Launch, traced
from tilewright.ops import attention_decode, matmul, rms_norm_matmul, softmax
from tilewright.ops.common.pdl import pdl_behind, whole_tiles
from tilewright.testing import op_name, run_op
from tilewright.testing.cases import cases

H200 = Device.named("H200")
LOADS = ("ct.load", "ct.gather", "_tiles_ahead", "_groups", "_columns", "_begun", "load_masked", "vector_chunk")
WEIGHTS = {"words", "scales", "zeros", "bias", "norm", "shared", "ROUTER", "WEIGHT"}
# which read and write no memory, or, as `weights` does, by calls that are looked at too
NO_MEMORY = {
    *("bid", "cdiv", "slice", "static_iter", "range", "astype", "reshape", "max", "min", "zeros"),
    *("_steps", "grouped_tile", "weights", "piece_unit"),
}


def called(statement: ast.stmt) -> str:
    """The name of the function that a statement calls."""
    value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


@functools.cache
def statements(kernel: Any) -> list[ast.stmt]:
    function = ast.parse(textwrap.dedent(inspect.getsource(kernel._pyfunc))).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.body[1:] if ast.get_docstring(function) else function.body


def chosen(body: list[ast.stmt], constants: dict) -> list[ast.stmt]:
    """The statements with the branches that constants take in place of `if CONSTANT`."""
    found: list[ast.stmt] = []
    for s in body:
        known = isinstance(s, ast.If) and isinstance(s.test, ast.Name) and s.test.id in constants.keys() - {"WHOLE"}
        found += chosen(s.body if constants[s.test.id] else s.orelse, constants) if known else [s]  # type: ignore[attr-defined]
    return found


def waits_first(plan: Launch, final: set[str]) -> bool:
    """Whether the kernel begins with `pdl_overlap` and is not persistent, or reads only weights
    between its halves.

    final: arguments that may be read too, as the launch begins behind a wait of the first.
    """
    body = chosen(statements(plan.kernel), constants(plan))
    if called(body[0]) == "pdl_wait":
        return True
    if isinstance(body[0], ast.If) and ast.unparse(body[0].test) == "WHOLE":
        if not constants(plan)["WHOLE"]:
            body = body[0].orelse
        else:
            begin, *between = body[0].body[: [called(s) for s in body[0].body].index("pdl_wait")]
            weights = {"ct.load": ("B",), "vector_masked": ("WEIGHT",), "operand": ("b",)}
            read = all(ast.unparse(s.value.args[0]) in weights[called(s)] for s in between)  # type: ignore[attr-defined]
            return called(begin) == "pdl_launch_dependents" and read
    if called(body[0]) == "pdl_launch_dependents":
        return waits_behind_weights(body[1:], WEIGHTS | {name for name, source in plan.renames.items() if source in final} | final)
    first = body[0]
    if called(first) != "pdl_overlap":
        return False
    walks = [ast.unparse(a) for a in first.value.args]  # type: ignore[attr-defined]
    return not walks or constants(plan)[walks[0]] is False


def waits_behind_weights(body: list[ast.stmt], may_read: set[str]) -> bool:
    """Whether statements wait, on each side of a branch, and read nothing else before."""
    for s in body:
        if isinstance(s, ast.FunctionDef):
            continue
        if called(s) == "pdl_wait":
            return True
        if isinstance(s, ast.If) and "pdl_wait" in ast.unparse(s):
            return waits_behind_weights(s.body, may_read) and waits_behind_weights(s.orelse, may_read)
        calls = [node for node in ast.walk(s) if isinstance(node, ast.Call)]
        loads = [call for call in calls if ast.unparse(call.func) in LOADS]
        rest = {ast.unparse(call.func).rpartition(".")[2] for call in calls if call not in loads}
        if not ({ast.unparse(load.args[0]) for load in loads} <= may_read and rest <= NO_MEMORY):
            return False
    return False


def constants(plan: Launch) -> dict:
    return {name.upper(): value for name, value in plan.constants.items()}


@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL])
def test_the_kernel_of_an_early_launch_waits_first(op):
    for problems in (cases(op, "small"), cases(op, "bench")[::3]):
        for problem in problems:
            for config in op.space(problem, H200):
                plans = op.plan(problem, config, H200)
                begins = [called(s) for s in statements(plans[0].kernel)[:2]]
                final = {"ids", "weights"} if begins == ["pdl_wait", "pdl_launch_dependents"] else set()
                for plan in plans:
                    assert not plan.pdl or waits_first(plan, final), f"{plan.name} {config}"


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_what_waits_is_in_the_binary(arch):
    device = Device.for_arch(arch)
    problem = rms_norm_matmul.Problem(1, 3072, 2048, residual=True)
    config = rms_norm_matmul.space(problem, device)[0]
    assert not config.persistent
    with traced(device) as launches, torch.inference_mode():
        run_op(rms_norm_matmul, problem.inputs(torch.device("meta")), config)
    (launch,) = launches
    assert launch.launch.pdl
    found = binaries.made(Job.of(launch, arch)).resources
    assert (found.count("PREEXIT"), found.count("ACQBULK")) == (1, 1)


def test_blocks_that_walk_do_neither():
    problem = matmul.Problem(16, 152064, 3584, torch.bfloat16, trans_b=True)
    config = next(c for c in matmul.space(problem, H200) if c.persistent)
    with traced(H200) as launches, torch.inference_mode():
        run_op(matmul, problem.inputs(torch.device("meta")), config)
    (launch,) = launches
    assert not launch.launch.pdl
    found = binaries.made(Job.of(launch, "sm_90")).resources
    assert (found.count("PREEXIT"), found.count("ACQBULK")) == (0, 0)


@pytest.mark.parametrize(
    ("m", "n", "k", "config", "early"),
    [
        (4, 6144, 6144, matmul.Config(8, 64, 512, swap_ab=True), False),  # 96 blocks read 75 MB: 20.9 us, early ones 25.2
        (4, 6144, 6144, matmul.Config(8, 64, 512, swap_ab=True, persistent=True), False),
        (8, 14_336, 4096, matmul.Config(8, 64, 512, swap_ab=True), True),  # 224 blocks: 30.5, 29.5
        (4, 2072, 736, matmul.Config(8, 64, 256, swap_ab=True), True),  # 33 blocks read little: 4.8, 3.6
        (434, 3072, 2048, matmul.Config(64, 128, 64, extra_n=64), True),  # 112 blocks that compute: 12.8, 11.8
        (114, 6144, 7168, matmul.Config(64, 128, 64), False),  # 96 blocks: 26.7, 33.3
        (8, 8192, 32_768, matmul.Config(8, 64, 128, swap_ab=True, occupancy=2), False),  # 128 of 264 places: 122.7, 131.6
        (16, 8192, 8192, matmul.Config(16, 64, 512, swap_ab=True), True),  # 128 of 132: 33.0, 32.5
    ],
)
def test_blocks_that_leave_places_free_are_not_early_where_memory_binds(m, n, k, config, early):
    """Times: us on an H200."""
    problem = matmul.Problem(m, n, k, torch.bfloat16)
    assert matmul.plan(problem, config, H200)[0].pdl is early


DECODE = partial(attention_decode.Problem, head_dim=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("problem", "config", "early"),
    [
        (DECODE(1, 64, 8, 16_384), {"tile_n": 128, "num_kv_splits": 16}, False),  # 64 behind 128: 22.9 us, early ones 26.0
        (DECODE(1, 16, 2, 16_384), {"tile_n": 128, "num_kv_splits": 16}, True),  # 32 behind 32: 7.3 us, later ones 7.3
        (softmax.Problem(1, 196_608, torch.bfloat16), {"tile_m": 1, "tile_n": 2048, "split": True}, False),  # 96 each: 4.0, 4.7
    ],
)
def test_a_few_blocks_do_not_share_what_the_launch_before_leaves_free(problem, config, early):
    """Times: us on an H200."""
    op = softmax if isinstance(problem, softmax.Problem) else attention_decode
    first, behind = op.plan(problem, op.Config(**config), H200)
    assert first.pdl
    assert behind.pdl is early


@pytest.mark.parametrize(("blocks", "before", "early"), [(100, 32, True), (101, 32, False), (1, 132, False), (500, 128, False), (529, 128, True)])
def test_blocks_that_get_an_sm_each_or_are_very_many_begin_early(blocks, before, early):
    assert pdl_behind(blocks, before, H200) is early


def test_all_of_k_in_one_step_is_for_rows_that_load_wide():
    assert whole_tiles(2048)
    assert whole_tiles(3600)
    assert not whole_tiles(2104), "its rows begin at multiples of 8 elements"
