"""Problems that stand in no list: drawn with a seed, from sizes of published models.

What was chosen on listed problems is judged on these. `drawn` beside each op's cases draws one,
`drawn_fp8` one with 8-bit operands, `drawn_few` one with few rows. None has the sizes of a case or
of a row of a shipped table.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any

import torch

from .. import ops
from ..launch import check_name, dtype_name
from ..launch.table import plain, read_rows, shipped_file
from ..select.neighbours import size_names
from .cases import cases
from .check import op_name
from .sizes import Sizes

FITTING_SEEDS = range(1000, 3000)  # what `tilewright tune --survey` draws with: nothing is judged on these
MOST_BYTES = 6 << 30  # of the inputs of one problem
MOST_US = 1500.0  # the least time that a problem may need on an H200; a kernel at half the roof takes 3 ms
READ_GBS, TFLOPS = 4490.0, 790.0  # of an H200, bf16
TRIES = 200
Sized = tuple[str, tuple[int, ...]]  # dtype and sizes of a problem

# Share of each kind in a draw of all of them. docs/bench.md has bars for the first ones.
WEIGHTS = {
    "rope": 8, "rms_norm": 6, "layer_norm": 6, "silu_mul": 6, "softmax": 6, "quantize_fp8": 6, "matmul": 13, "matmul fp8": 12,
    "attention": 9, "attention_decode": 9, "mla_decode": 6, "grouped_gemm": 6, "bmm": 6, "moe": 6,
    "rms_norm_matmul": 1, "mla": 1, "kv_append": 1, "merge_states": 1, "sparse_decode": 1, "dropout": 1, "embedding": 1, "argmax": 1,
    "sparse_index": 1,
    "rms_norm_quant": 1, "silu_mul_quant": 1, "sample": 1, "moe_route": 1, "rms_norm_route": 1, "grouped_gemm fp8": 1, "moe fp8": 1,
    "quantized_matmul": 1, "quantized_moe": 1, "quantize_mx": 1, "mx_matmul": 1, "adjust_logits": 1,
    "gated_delta_rule": 1, "ssd": 1, "causal_conv1d": 1, "rms_norm_gated": 1,
}  # fmt: skip


# Kinds of a survey: few rows, as in decode, decide most of what a user waits for; few tiles, short
# sums and long ones, and narrow matrices are hard to choose for.
SURVEYED = (
    *WEIGHTS, "matmul few", "matmul wave", "matmul thin", "matmul heavy", "matmul ragged", "matmul fp8 deep",
    "bmm wide", "softmax wide", "softmax large", "rms_norm large", "layer_norm large", "rope large", "quantized_matmul few",
    "attention_decode short", "attention_decode long", "attention_decode codes",
)  # fmt: skip


def draw(kind: str, count: int, seed: int) -> list[Any]:
    """So many problems of an op; the same for the same seed, and the first ones of a larger count.

    kind: the name of an op, or "matmul fp8", "grouped_gemm fp8", "moe fp8" for 8-bit operands, or
        one of SURVEYED, such as "matmul few" for up to 64 rows.
    Raises: ValueError for another kind.
    """
    return list(islice(_problems(kind, seed), count))


def draw_all(names: Iterable[str], count: int, seed: int) -> list[tuple[ModuleType, Any]]:
    """So many problems of ops, by `WEIGHTS`; a matmul of 8-bit operands is one of matmul's.

    At least one of each if the count allows it.

    In an order in which every part is as mixed as the whole.
    """
    wanted = set(names)
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind.partition(" ")[0] in wanted}
    return [(op_of_kind(kind), problem) for kind, problem in mixed({kind: draw(kind, n, seed) for kind, n in _shares(weights, count).items()})]


def mixed(problems: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """Problems by kind in an order in which every part is as mixed as the whole."""
    places = [((i + 0.5) / len(of), kind, problem) for kind, of in problems.items() for i, problem in enumerate(of)]
    return [(kind, problem) for _, kind, problem in sorted(places, key=lambda place: place[:2])]


def op_of_kind(kind: str) -> ModuleType:
    (op,) = ops.named([kind.partition(" ")[0]])
    return op


def input_bytes(problem: Any) -> int:
    """Of all tensors of the problem's inputs; makes none."""
    values = problem.inputs(torch.device("meta")).values()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def least_us(problem: Any) -> float:
    """What an H200 needs for it at its data-sheet rates."""
    return float(max(problem.cost().times_us(READ_GBS, TFLOPS * (2 if problem.dtype.itemsize == 1 else 1))))


def sized(problem: Any) -> Sized:
    return dtype_name(problem.dtype), tuple(getattr(problem, name) for name in size_names(problem.__class__))


@cache
def listed(op: ModuleType) -> frozenset[Sized]:
    """Dtype and sizes of every case of an op and of every row of a shipped table."""
    known = [problem for kind in ("small", "real", "bench") for problem in cases(op, kind)]
    found, names, name = set(map(sized, known)), size_names(known[0].__class__), op_name(op)
    for path in sorted(shipped_file("x").parent.glob("*.json")):
        for row in read_rows(path):
            if row.op == name and all(type(row.problem.get(size)) is int for size in names):
                found.add((plain(row.problem.get("dtype")), tuple(row.problem[size] for size in names)))
    return frozenset(found)


def _problems(kind: str, seed: int) -> Iterator[Any]:
    check_name("kind", SURVEYED, kind)
    op, sizes = op_of_kind(kind), Sizes(f"{kind} {seed}")
    one: Callable[[Sizes], Any] = getattr(import_module(f"{__package__}.cases.{op_name(op)}"), "_".join(("drawn", *kind.split()[1:])))
    taken = set(listed(op))
    while True:
        for _ in range(TRIES):
            problem = one(sizes)
            if sized(problem) not in taken and least_us(problem) <= MOST_US and input_bytes(problem) <= MOST_BYTES:
                break
        else:
            raise RuntimeError(f"a problem of {kind} must be found in {TRIES} draws, got none that is new, small and fast enough")
        taken.add(sized(problem))
        yield problem


def _shares(weights: dict[str, int], count: int) -> dict[str, int]:
    """How many of each kind: by largest remainder, the first kinds first."""
    total = sum(weights.values())
    exact = {kind: count * weight / total for kind, weight in weights.items()}
    shares = {kind: int(value) for kind, value in exact.items()}
    left = sorted(exact, key=lambda kind: (shares[kind] > 0, shares[kind] - exact[kind]))  # those without any before all
    for kind in left[: count - sum(shares.values())]:
        shares[kind] += 1
    return {kind: n for kind, n in shares.items() if n}
