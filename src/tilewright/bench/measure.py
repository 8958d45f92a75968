"""One case: checked, then timed beside its peers."""

from types import ModuleType
from typing import Any

import torch

from ..launch import Device
from ..testing import check_op, op_name, outputs, run_op, seeded_inputs
from .ceilings import Ceilings
from .peers import peers_of
from .report import Row, make_row
from .timer import input_sets, time_interleaved


def measure_case(
    op: ModuleType,
    problem: Any,
    device: torch.device,
    ceilings: Ceilings,
    *,
    config: Any = None,
    with_peers: bool = True,
    check: bool = True,
) -> Row:
    """Measures one problem. Raises AssertionError, and measures nothing, if the answer breaks the accuracy rule."""
    found = check_op(op, problem, device, config) if check else []
    inputs = seeded_inputs(op, problem, device)
    written = sum(t.nbytes for t in outputs(run_op(op, inputs, config)))
    here = Device.of(next(iter(inputs.values())))
    sets = input_sets(lambda: problem.inputs(device), problem.cost().size_bytes, here.l2_bytes)
    contenders = {"ours": lambda **kw: run_op(op, kw, config)}
    absent: dict[str, str] = {}
    for peer in peers_of(op_name(op), inputs) if with_peers else ():
        try:
            peer.call(**inputs)
            contenders[peer.name] = peer.call
        except Exception as error:  # whatever another library raises; the case is then reported without it
            absent[peer.name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    del inputs
    times = time_interleaved(contenders, sets)
    ours = times.pop("ours")
    return make_row(
        op=op_name(op),
        problem=problem,
        gpu=here.name,
        time_us=ours.time_us,
        spread_us=ours.spread_us,
        written_bytes=written,
        peer_us={name: t.time_us for name, t in times.items()},
        config=config if config is not None else op.space(problem, here)[0],
        source="search" if config is not None else "default",
        found=found,
        ceilings=ceilings,
        absent=absent,
    )
