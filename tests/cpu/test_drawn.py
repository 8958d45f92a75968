"""Problems drawn with a seed: the same ones again, none that stands in a list, all of a size that
runs; and what bench says of them.
"""

import dataclasses

import pytest
import torch
from made_up import row_for

from tilewright import ops
from tilewright.bench.command import bench_command
from tilewright.bench.drawn import check_seeds, judged, lines, newest_seeds
from tilewright.launch import Device, table, traced
from tilewright.launch.table import shipped_file
from tilewright.ops import matmul, rms_norm
from tilewright.testing import drawn, op_name, run_op
from tilewright.testing.cases import cases
from tilewright.testing.drawn import FITTING_SEEDS, MOST_BYTES, MOST_US, SURVEYED, WEIGHTS, draw, draw_all, input_bytes, least_us, sized
from tilewright.tune.store import Store
from tilewright.tune.survey import PASS

NAMES = [op_name(op) for op in ops.ALL]
H200 = Device.named("H200")


def test_every_op_draws_and_a_seed_says_what():
    assert {kind.partition(" ")[0] for kind in WEIGHTS} == set(NAMES)
    assert set(PASS) <= set(SURVEYED)
    for kind in WEIGHTS:
        problems = draw(kind, 4, 7)
        assert problems == draw(kind, 6, 7)[:4], "a larger count begins with the same ones"
        assert len({sized(problem) for problem in problems}) == 4
        assert problems != draw(kind, 4, 8)
    with pytest.raises(ValueError, match=r"kind must be one of rope, .*, got 'nothing'"):
        draw("nothing", 1, 1)


@pytest.mark.parametrize("seed", [1, FITTING_SEEDS.start])
def test_drawn_problems_are_small_new_and_planned_on_an_h200(seed):
    tasks = draw_all(NAMES, 150, seed)
    assert len(tasks) == 150
    assert {op_name(op) for op, _ in tasks} == set(NAMES)
    for op, problem in tasks:
        listed = [case for kind in ("small", "real", "bench") for case in cases(op, kind)]
        assert sized(problem) not in {sized(case) for case in listed} | drawn.listed(op)
        assert input_bytes(problem) <= MOST_BYTES
        assert least_us(problem) <= MOST_US
        with traced(H200) as launches, torch.inference_mode():
            run_op(op, problem.inputs(torch.device("meta")))
        assert launches, f"{op_name(op)} {problem}"


def test_the_room_of_drawn_experts_is_checked_in_float64():
    problems = [problem for seed in range(60, 100) for problem in draw("grouped_gemm", 6, seed) if problem.masked]
    assert max(problem.groups * problem.rows * problem.n for problem in problems) < 1.2 * 2**30
    assert all(problem.rows >= 2 * problem.expected_rows for problem in problems)


def test_input_bytes_are_those_of_the_tensors():
    problem = matmul.Problem(3, 5, 7, torch.bfloat16, bias=True)
    assert input_bytes(problem) == 2 * (3 * 7 + 5 * 7 + 5)


def test_a_problem_of_a_list_or_a_table_is_drawn_again(monkeypatch, tmp_path):
    drawn.listed.cache_clear()  # another test of this process may have filled it from its own table
    row = "bfloat16", (16, 3072, 2048)
    assert row in drawn.listed(matmul), "of the table that ships for the H200"
    assert row not in {sized(case) for kind in ("small", "real", "bench") for case in cases(matmul, kind)}
    first, second, third = (rms_norm.Problem(rows, 4097, torch.bfloat16) for rows in (11, 12, 13))
    monkeypatch.setattr(table, "SHIPPED", tmp_path)
    Store(shipped_file("H200")).add([row_for(dataclasses.replace(second, residual=True), rms_norm.space(second, H200)[0])])
    drawn.listed.cache_clear()
    listed = cases(rms_norm, "bench")[0]
    stream = iter([listed, dataclasses.replace(listed, residual=True), first, first, second, third])
    monkeypatch.setattr("tilewright.testing.cases.rms_norm.drawn", lambda sizes: next(stream))
    try:
        assert draw("rms_norm", 2, 1) == [first, third]
    finally:
        drawn.listed.cache_clear()


def test_what_is_too_large_or_too_slow_is_drawn_again_and_an_empty_draw_is_an_error(monkeypatch):
    large, slow, fine = (matmul.Problem(*shape) for shape in ((1, 1 << 20, 1 << 12), (9999, 32_768, 32_768), (17, 999, 1001)))
    stream = iter([large, slow, fine])
    monkeypatch.setattr("tilewright.testing.cases.matmul.drawn", lambda sizes: next(stream))
    assert draw("matmul", 1, 1) == [fine]
    monkeypatch.setattr("tilewright.testing.cases.matmul.drawn", lambda sizes: slow)
    with pytest.raises(RuntimeError, match="a problem of matmul must be found in 200 draws"):
        draw("matmul", 1, 1)


def test_products_of_8_bits_are_drawn_with_every_scaling_and_deep_sums():
    problems = draw("matmul fp8", 60, 3)
    assert {problem.scaling.name for problem in problems} == {"TENSOR", "ROW", "BLOCK"}
    assert any(problem.scaling.name == "BLOCK" and problem.k >= 16_384 for problem in problems)


def test_shares_follow_the_weights_and_leave_nobody_out():
    names = ["matmul", "rope", "dropout"]
    count = {name: sum(op_name(op) == name for op, _ in draw_all(names, 34, 1)) for name in names}
    assert count == {"matmul": 25, "rope": 8, "dropout": 1}
    assert [op_name(op) for op, _ in draw_all(names, 4, 1)].count("dropout") == 1


def test_a_fitting_seed_judges_nothing():
    check_seeds([1, 999, 3000])
    with pytest.raises(ValueError, match="--seed must not be one of 1000 to 2999, whose problems `tune --survey` fits to, got 1500"):
        bench_command(["rope"], draw=3, draw_seeds=[1, 1500])
    for options in ({"draw": 3}, {"draw_seeds": [1]}, {"draw": 3, "draw_seeds": [1], "suite": "seeds"}):
        with pytest.raises(ValueError, match="--draw and --seed must come together, and without --suite"):
            bench_command(["rope"], **options)


def test_the_fastest_peer_of_each_case_judges():
    def row(m, time_us, scaling="NONE", **peer_us):
        return {
            "op": "matmul", "case": f"m={m}", "problem": {"m": m, "scaling": scaling}, "time_us": time_us, "spread_us": 0.1, "peer_us": peer_us,
            "peers": {name: us / time_us for name, us in peer_us.items()}, "config": "Config()", "source": "default", "draw_seed": 3,
        }  # fmt: skip

    rows = [
        row(1, 10.0, cublas=20.0, other=5.0),
        row(2, 10.0, cublas=20.0),
        row(3, 10.0),
        row(4, 10.0, cublas=9.0, rope=1.0),  # an op of ours is no peer
        row(5, 4.0, "ROW", scaled_mm=8.0),
    ]
    half, eight = judged(rows)
    assert (half.name, half.cases, half.ratios) == ("matmul", 4, (0.5, 0.9, 2.0))
    assert [loss["case"] for loss in half.losses] == ["m=1", "m=4"]
    assert half.peers == {"cublas": 2, "other": 1}
    head, worst, _ = lines(half)
    assert head == "matmul: 4 cases (1 without a peer), best peer over ours geomean 0.965x, worst 0.50x"
    assert worst == "  0.50  m=1 (seed 3) | 10.0 us +-0.1, other 5.0 | Config() default"
    assert lines(eight) == ["matmul fp8: 1 cases, best peer over ours geomean 2.000x, worst 2.00x"]
    assert lines(judged([row(3, 10.0)])[0]) == ["matmul: 1 cases, no peer"]


def test_the_newest_seeds_are_shown_whole_and_three_of_them():
    def row(seed: int, date: str, op: str = "rope", **problem) -> dict:
        return {"op": op, "draw_seed": seed, "date": date, "problem": problem}

    old, new = "2026-11-20", "2026-11-22"
    rows = [row(9, old), row(3, new), row(3, new), row(1, new), row(2, new), row(7, old)]
    rows += [row(5, old, "matmul"), row(5, old, "matmul", scaling="ROW")]

    def seeds(least: int) -> dict[str, list[int]]:
        return {kind: [row["draw_seed"] for row in of] for kind, of in newest_seeds(rows, least).items()}

    assert seeds(1) == {"rope": [3, 3, 2, 1], "matmul": [5], "matmul fp8": [5]}
    assert seeds(5)["rope"] == [3, 3, 2, 1, 9]
    assert seeds(99)["rope"] == [3, 3, 2, 1, 9, 7]
