"""benchmarks/step_timeline.py: a step's launches, by their places in a layer."""

from pathlib import Path

import pytest


@pytest.fixture
def timeline(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import step_timeline

    return step_timeline


def test_launches_of_a_layer_are_found_and_their_times_add_up_to_it(timeline):
    """Six layers of three launches, each of which begins 1 us before the one in front ends."""
    names = ["embedding_kernel", *["rows_kernel_a", "product_kernel_b", "product_kernel_c"] * 6, *(f"tail{i}_kernel" for i in range(5))]
    assert timeline.period_of(names[1:], 6) == 3
    events, end = [], 0.0
    for _ in range(3):
        for name in names:
            took = {"rows_kernel_a": 2.0, "product_kernel_b": 5.0}.get(name, 4.0)
            events.append(timeline.Event(end - 1, end + took, name))
            end += took
    steps = timeline.steps_of([*events, *events[:4]])
    assert [len(step) for step in steps] == [len(names)] * 3
    lines = timeline.lines_of(steps, 6)
    assert lines[:3] == [("rows", 2.0, 3.0, 1.0), ("product", 5.0, 6.0, 1.0), ("product", 4.0, 5.0, 1.0)]
    assert [line[0] for line in lines[3:]] == [f"tail{i}" for i in range(5)]
