"""What each launch of a layer takes within a decode step, on a GPU.

    python benchmarks/step_timeline.py Llama-3.1-8B --weights int4-128 [--max-len 96]

Launches overlap, so a line has, of one launch of a layer: the time from the end of the launch
before to its own end (these sum to the step), its duration, and by how much it began before that
end. They are means over the layers of several steps, in us, without the first two layers and the
last. Then come the last launches of the step, as the head.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tilewright.engine import Engine
from tilewright.engine.measure import launched
from tilewright.models import load
from tilewright.models.quantized import quantize

TOKENS, LAST = 40, 5  # of a run; launches behind the layers that are shown


class Event(NamedTuple):
    """A launch: when it began and ended, us, and its kernel's name."""

    start: float
    end: float
    name: str


def period_of(names: Sequence[str], layers: int) -> int:
    """Launches of a layer: the shortest distance at which most names are those before."""
    found = range(1, len(names) // layers + 1)
    return min(found, key=lambda n: (sum(a != b for a, b in zip(names, names[n:], strict=False)), n))


def steps_of(events: Sequence[Event]) -> list[list[Event]]:
    """The launches of each decode step, of which all have the most usual number. The first kernel
    of a step is `embedding_kernel`.
    """
    first = [i for i, event in enumerate(events) if "embedding" in event.name]
    found = [list(events[a:b]) for a, b in zip(first, [*first[1:], len(events)], strict=True)]
    usual = statistics.mode(map(len, found))
    return [step for step in found if len(step) == usual]


def lines_of(steps: Sequence[Sequence[Event]], layers: int) -> list[tuple[str, float, float, float]]:
    """Kernel, time from end to end, duration and overlap of each launch of a layer, and of the last
    ones of a step.
    """
    period = period_of([event.name for event in steps[0]][1:], layers)
    places = [range(1 + n + 2 * period, 1 + period * (layers - 1), period) for n in range(period)]
    places += [range(i, i + 1) for i in range(len(steps[0]) - LAST, len(steps[0]))]

    def mean(at: range, of: Callable[[Event, Event], float]) -> float:
        return statistics.mean(of(step[i - 1], step[i]) for step in steps for i in at)

    return [
        (
            steps[0][at[0]].name.partition("_kernel")[0],
            mean(at, lambda before, own: own.end - before.end),
            mean(at, lambda before, own: own.end - own.start),
            mean(at, lambda before, own: before.end - own.start),
        )
        for at in places
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", help="a format of small weights; by default 16 bits")
    parser.add_argument("--max-len", type=int, default=96)
    given = parser.parse_args()
    model = load(given.model, device="cuda", dtype=torch.bfloat16).model
    if given.weights:
        quantize(model, given.weights, undoable=False)
    prompt = torch.randint(0, model.config.vocab_size, (32,), generator=torch.Generator().manual_seed(1)).tolist()
    with Engine(model, max_len=given.max_len, mode="graph") as engine:
        engine.generate([prompt], TOKENS)
        timed = engine.generate([prompt], TOKENS)
        found = launched(lambda: engine.generate([prompt], TOKENS))
    steps = steps_of(sorted(Event(start, end, name) for name, start, end in found if not name.startswith("Mem")))
    alone, whole = statistics.median(timed.step_s) * 1e6, statistics.median(step[-1].end - step[0].start for step in steps)
    print(f"{given.model}, weights {given.weights or 'bfloat16'}: {alone:.1f} us a step, {whole:.1f} with the profiler")
    print(f"{'kernel':40} {'end to end':>10} {'duration':>9} {'overlap':>8}")
    for name, between, own, before in lines_of(steps, model.config.num_hidden_layers):
        print(f"{name:40} {between:10.2f} {own:9.2f} {before:8.2f}")


if __name__ == "__main__":
    main()
