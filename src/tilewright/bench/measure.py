"""Checks one case, then times it beside its peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..launch import Device, decisions
from ..testing import check_op, op_name, outputs, run_op, seeded_inputs
from ..testing.accuracy import Accuracy
from .ceilings import Ceilings
from .libraries import LIBRARIES, backend_of, library_peers, strays
from .meter import Meter
from .peers import Peer, peers_of
from .report import Measured, Row, make_row
from .stopwatch import Stopwatch
from .timer import ROUNDS, Timing, input_sets, time_interleaved


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run measures with.

    ceilings: of the device, measured in the run. meter: of clocks and power, None for none.
    peers: other libraries are timed too.
    warm: each case is also timed on inputs in the L2 cache. rounds: of which the median counts.
    """

    device: torch.device
    ceilings: Ceilings
    meter: Meter | None = None
    peers: bool = True
    warm: bool = True
    rounds: int = ROUNDS


def measure_case(
    op: ModuleType,
    problem: Any,
    setup: Setup,
    *,
    config: Any = None,
    beside: Sequence[Peer] = (),
    found: list[Accuracy] | None = None,
) -> Row:
    """Measures one problem. If its answer is wrong, raises AssertionError and measures nothing.

    config: None for the one that a user's call would take, from a table or the default.
    beside: contenders of our own, timed like peers. found: of its check, if that was made.
    """
    device, watch = setup.device, Stopwatch()
    if found is None:
        with watch.phase("check"):
            found = check_op(op, problem, device, config)
    with watch.phase("inputs"):
        inputs = seeded_inputs(op, problem, device)
        here = Device.of(next(value for value in inputs.values() if isinstance(value, torch.Tensor)))
        size_bytes = problem.cost().size_bytes
        sets = input_sets(lambda: problem.inputs(device), size_bytes, here.l2_bytes)
    with decisions() as decided:
        ours = outputs(run_op(op, inputs, config))
    decision = next((d for d in decided if d.plan is op.plan), decided[0])
    contenders: dict[str, Callable[..., Any]] = {"ours": lambda **kw: run_op(op, kw, config)}
    absent: dict[str, str] = {}
    backends: dict[str, str] = {}
    for peer in [*all_peers(op, inputs), *beside] if setup.peers else []:
        with watch.phase(f"first call of {peer.name}"):
            # Inputs of its own: a call may overwrite them, as rope does q and k.
            why = _unable(peer, seeded_inputs(op, problem, device), ours)
        if why:
            absent[peer.name] = why
        else:
            contenders[peer.name] = peer.call
            if peer not in beside:
                backends[peer.name] = backend_of(peer.name)
    written = sum(t.nbytes for t in ours)
    del inputs, ours, decided
    with (setup.meter or Meter(None)).watching() as clocks, watch.phase("timing"):
        times = time_interleaved(contenders, sets, setup.rounds)
    warm: dict[str, Timing] = {}
    if setup.warm and 2 * size_bytes <= here.l2_bytes:  # half of the memory: contenders need the rest for what they write
        with watch.phase("timing in L2"):
            warm = time_interleaved(contenders, sets[:1], setup.rounds)
    source = "search" if decision.source == "forced" else decision.source
    known: Any = {"absent": absent, "clocks": clocks[0], "backends": backends, "took_s": watch.seconds}
    return make_row(op_name(op), problem, here.name, setup.ceilings, Measured(times, warm, written, decision.config, source, found, **known))


def all_peers(op: ModuleType, inputs: dict[str, Any]) -> list[Peer]:
    """What computes the same on these inputs: PyTorch and the libraries that are installed."""
    return [*peers_of(op_name(op), inputs), *library_peers(op_name(op), inputs)]


def _unable(peer: Peer, inputs: dict[str, Any], ours: list[torch.Tensor]) -> str:
    """Why a peer is not timed in this case, or "": it raises, or computes something else."""
    try:
        theirs = outputs(peer.call(**inputs))
    except Exception as error:  # whatever another library raises: the case is reported without it
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return strays(ours, theirs) if peer.name in LIBRARIES else ""
