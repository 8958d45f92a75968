"""One case: checked, then timed beside its peers."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from ..launch import Device, decisions
from ..testing import check_op, op_name, outputs, run_op, seeded_inputs
from .ceilings import Ceilings
from .libraries import LIBRARIES, backend_of, library_peers, strays
from .meter import Meter
from .peers import Peer, peers_of
from .report import Row, make_row
from .timer import Timing, input_sets, time_interleaved


def measure_case(
    op: ModuleType,
    problem: Any,
    device: torch.device,
    ceilings: Ceilings,
    *,
    config: Any = None,
    with_peers: bool = True,
    check: bool = True,
    meter: Meter | None = None,
    beside: Sequence[Peer] = (),
) -> Row:
    """Measures one problem. Raises AssertionError, and measures nothing, if the answer breaks the accuracy rule.

    config: the one to force; None takes what a user's call would take, from a table or the default.
    beside: contenders of our own, timed like peers.
    """
    found = check_op(op, problem, device, config) if check else []
    inputs = seeded_inputs(op, problem, device)
    with decisions() as decided:
        ours = outputs(run_op(op, inputs, config))
    decision = next((d for d in decided if d.plan is op.plan), decided[0])
    here = Device.of(next(value for value in inputs.values() if isinstance(value, torch.Tensor)))
    size_bytes = problem.cost().size_bytes
    sets = input_sets(lambda: problem.inputs(device), size_bytes, here.l2_bytes)
    contenders: dict[str, Callable[..., Any]] = {"ours": lambda **kw: run_op(op, kw, config)}
    absent: dict[str, str] = {}
    backends: dict[str, str] = {}
    for peer in [*peers_of(op_name(op), inputs), *library_peers(op_name(op), inputs), *beside] if with_peers else []:
        why = _unable(peer, seeded_inputs(op, problem, device), ours)  # its own: ours may be overwritten, as q and k of rope are
        if why:
            absent[peer.name] = why
        else:
            contenders[peer.name] = peer.call
            if peer not in beside:
                backends[peer.name] = backend_of(peer.name)
    written = sum(t.nbytes for t in ours)
    del inputs, ours, decided
    with (meter or Meter(None)).watching() as clocks:
        times = time_interleaved(contenders, sets)
    warm: dict[str, Timing] = {}
    if 2 * size_bytes <= here.l2_bytes:  # half of it: the rest is for what the contenders write
        warm = time_interleaved(contenders, sets[:1])
    return make_row(
        op=op_name(op),
        problem=problem,
        gpu=here.name,
        time_us=times["ours"].time_us,
        spread_us=times["ours"].spread_us,
        written_bytes=written,
        peer_us={name: t.time_us for name, t in times.items() if name != "ours"},
        config=decision.config,
        source="search" if decision.source == "forced" else decision.source,
        found=found,
        ceilings=ceilings,
        absent=absent,
        clocks=clocks[0],
        warm_us=warm["ours"].time_us if warm else None,
        peer_warm_us={name: t.time_us for name, t in warm.items() if name != "ours"},
        backends=backends,
    )


def _unable(peer: Peer, inputs: dict[str, Any], ours: list[torch.Tensor]) -> str:
    """Why a peer cannot stand beside us in this case, "" if it can: it raises, or it computes something else."""
    try:
        theirs = outputs(peer.call(**inputs))
    except Exception as error:  # whatever another library raises; the case is then reported without it
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return strays(ours, theirs) if peer.name in LIBRARIES else ""
