"""What a row of a tuned table belongs to: which changes of a kernel or of a plan let it lapse, and
that somebody says so.
"""

import dataclasses
import linecache
import warnings

import msgspec
import pytest
import torch
from made_up import H200, PROBLEM, SPACE, own_folder, row_for  # noqa: F401  (a fixture)

from tilewright.launch import Decision, Launch, decision_of, forget_plans, table
from tilewright.launch.identity import kernel_digest, launches_digest
from tilewright.launch.table import digest_of, plain, rebuilt
from tilewright.ops import matmul, moe, rms_norm, sparse_decode
from tilewright.testing.cases import cases
from tilewright.tune.command import state
from tilewright.tune.store import Store

SOURCE = """
import enum
import math
import cuda.tile as ct

class Kind(enum.IntEnum):
    ONE = 1
    TWO = 2

SCALE = 2.0
KIND = Kind.ONE

def scaled(tile, by, *, twice=False):
    'Times by.'
    if twice:
        by = by * 2
    return tile * by

@ct.kernel
def some_kernel(X, OUT, eps: float, TILE: ct.Constant[int], FLAG: ct.Constant[bool]):
    '''Doubles.'''
    i = ct.bid(0)
    values: tuple = ()

    def load(j, WHOLE):
        return ct.load(X, (j,), (TILE,), check_bounds=not WHOLE)

    x = load(i, WHOLE=FLAG)
    if KIND == 1:
        x = scaled(x, SCALE, twice=True)
    ct.store(OUT, (i,), x + eps + math.inf)
"""
_count = iter(range(1000))


def digest_of_source(*changes):
    text = SOURCE
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    name = f"<kernel {next(_count)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"__name__": "made_up_kernel"}
    exec(compile(text, name, "exec"), scope)
    return kernel_digest(scope["some_kernel"])


@pytest.mark.parametrize(
    "changes",
    [
        [("    i = ct.bid(0)\n", "    # which tile\n\n    i = ct.bid(0)  # of many\n")],
        [("'Times by.'", "'Times by, or twice that.'"), ("Doubles.", "Doubles X.")],
        [("    'Times by.'\n", "")],
        [("    x = load(i, WHOLE=FLAG)", "    x = (\n        load(\n            i,\n            WHOLE=FLAG,\n        )\n    )")],
        [("values: tuple = ()", "values = ()")],
        [("def load(j", "def fetch(k"), ("(j,)", "(k,)"), ("= load(", "= fetch(")],
        [("WHOLE", "INSIDE"), ("TILE", "TILE_M"), ("OUT", "Y")],
        [("scaled", "multiplied"), ("twice", "doubled"), ("by", "factor")],
        [("some_kernel(X", "some_kernel(A"), ("ct.load(X", "ct.load(A")],
        [("SCALE", "FACTOR"), ("Kind", "Sort")],
        [("import math\n", "from math import inf\n"), ("math.inf", "inf")],
        [("def scaled", "def unused(x):\n    return x\n\ndef scaled")],
    ],
    ids=[
        "comment",
        "docstring",
        "no docstring",
        "format",
        "annotation",
        "nested",
        "parameters",
        "function",
        "array",
        "constants",
        "import",
        "beside",
    ],
)
def test_what_changes_no_binary_changes_no_identity(changes):
    assert digest_of_source(*changes) == digest_of_source()


@pytest.mark.parametrize(
    "change",
    [
        ("SCALE = 2.0", "SCALE = 2.5"),
        ("KIND = Kind.ONE", "KIND = Kind.TWO"),
        ("x + eps", "x - eps"),
        ("tile * by", "tile / by"),
        ("by * 2", "by * 3"),
        ("twice=True", "twice=False"),
        ("twice=False):", "twice=True):"),
        ("math.inf", "math.pi"),
        ("check_bounds=not WHOLE", "check_bounds=WHOLE"),
        ("(j,), (TILE,)", "(TILE,), (j,)"),
        ("x = scaled(x", "x = scaled(i"),
        ("FLAG: ct.Constant[bool]", "FLAG: bool"),
        ("@ct.kernel", "@ct.kernel(opt_level=2)"),
    ],
    ids=lambda change: f"{change[0]} -> {change[1]}" if isinstance(change, tuple) else None,
)
def test_what_may_change_the_binary_changes_the_identity(change):
    assert digest_of_source(change) != digest_of_source()


def test_a_global_that_a_nested_function_also_binds_counts():
    shadow = ("    x = load(i, WHOLE=FLAG)", "    def other(SCALE):\n        return SCALE\n\n    x = other(load(i, WHOLE=FLAG))")
    assert digest_of_source(shadow) != digest_of_source(shadow, ("SCALE = 2.0", "SCALE = 2.5"))


# -------------------------------------------------------------------------------- launches and rows
def test_a_launch_is_told_by_all_that_it_runs():
    (launch,) = rms_norm.plan(PROBLEM, SPACE[0], H200)
    same = dataclasses.replace(launch, constants=dict(reversed(launch.constants.items())), unused=())
    assert launches_digest([same]) == launches_digest([launch])
    changes = {"grid": (3,), "constants": launch.constants | {"latency": 9}, "occupancy": 7, "pdl": not launch.pdl, "num_ctas": 4}
    changes["kernel"] = next(k for k in (rms_norm.rms_norm_kernel, rms_norm.rms_norm_reread_kernel) if k is not launch.kernel)
    for name, value in changes.items():
        assert launches_digest([dataclasses.replace(launch, **{name: value})]) != launches_digest([launch]), name
    assert launches_digest([launch, launch]) != launches_digest([launch])


def planned_with(change):
    """rms_norm's decision with another plan."""

    def plan(p, c, device):
        return tuple(map(change, rms_norm.plan(p, c, device)))

    d = rms_norm.DECISION
    return Decision("rms_norm", problem=d.problem, arguments=d.arguments, space=d.space, plan=plan)


def test_a_plan_that_launches_the_same_keeps_its_rows_and_one_that_does_not_loses_them():
    row = row_for(PROBLEM, SPACE[2])
    assert state(row) == "holds"
    assert table.state(row, planned_with(lambda launch: dataclasses.replace(launch)), rms_norm.Config) == "holds"
    another = planned_with(lambda launch: Launch(launch.kernel, launch.grid, launch.constants | {"latency": 9}))
    assert table.state(row, another, rms_norm.Config) == "kernel changed"


@dataclasses.dataclass(frozen=True)
class Wider(rms_norm.Config):
    """A config with one more field."""

    more: int = 0


def test_a_new_field_with_a_default_keeps_rows_and_a_field_that_is_gone_does_not():
    row = row_for(PROBLEM, SPACE[2])
    assert table.state(row, rms_norm.DECISION, Wider) == "holds"
    gone = msgspec.structs.replace(row, config=row.config | {"unknown": 3})
    assert state(gone) == "config changed"
    Store().add([gone])
    forget_plans()
    with pytest.warns(UserWarning, match="tilewright tune rms_norm"):
        assert rms_norm.DECISION.decide(PROBLEM, H200) == (SPACE[0], SPACE.source)


def test_a_row_of_a_gpu_that_nobody_knows_is_neither_used_nor_pruned():
    assert state(row_for(PROBLEM, SPACE[2], gpu="NVIDIA Unheard 9000")) == "unknown GPU"


@pytest.mark.parametrize("op", [rms_norm, matmul, moe, sparse_decode], ids=lambda op: op.__name__)
def test_problems_and_configs_come_back_from_json(op):
    for problem in cases(op, "bench")[:5]:
        assert rebuilt(op.Problem, plain(problem)) == problem
        for config in op.space(problem, H200):
            assert rebuilt(op.Config, plain(config)) == config


def test_one_warning_when_more_than_a_tenth_of_the_rows_lapse():
    problems = [rms_norm.Problem(rows, 4096, torch.bfloat16) for rows in range(1, 21)]

    def warned(lapsed):
        Store().keep(lambda row: False)
        Store().add([row_for(p, SPACE[0], **({"digest": "0"} if i < lapsed else {})) for i, p in enumerate(problems)])
        forget_plans()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for problem in problems:
                rms_norm.DECISION.decide(problem, H200)
        return [str(w.message) for w in found]

    assert not warned(2)
    (text,) = warned(3)
    assert "tuned.json: 3 of 20 problems of rms_norm" in text
    assert "`tilewright tune rms_norm`" in text


def test_digests_need_no_gpu_and_tell_kernels_of_one_op_apart():
    p = cases(matmul, "bench")[0]
    found = {digest_of(decision_of(matmul), p, c, H200) for c in matmul.space(p, H200)}
    assert len(found) > 1
