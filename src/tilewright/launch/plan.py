"""The decision of a call, as data: Problem -> Plan."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .check import must
from .device import Device


@dataclass(frozen=True)
class Plan:
    """One kernel launch, all but its tensors: printable, hashable, made without a GPU.

    kernel: the cuTile kernel object.
    grid: blocks in x, y, z (1 to 3 entries).
    constants: values of the kernel's trailing `ct.Constant` parameters.
    num_ctas, occupancy, num_worker_warps: compiler hints; None leaves the compiler's choice.
    workspace: (shape, dtype) of each scratch tensor the op passes to this launch and to `then`.
    then: the launch that follows in the same stream (a merge of partial results).
    early: its blocks may be placed while those of the launch before still run; its kernel begins with `overlap_previous`. Not for blocks that
        walk over tiles, unless each fills an SM: the first free SMs would get more of them than others, and keep them.
    """

    kernel: Any
    grid: tuple[int, ...]
    constants: tuple = ()
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None
    workspace: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    then: "Plan | None" = None
    early: bool = False

    @property
    def name(self) -> str:
        return self.kernel._pyfunc.__name__

    @cached_property
    def hinted_kernel(self) -> Any:
        return _hinted(self.kernel, self.num_ctas, self.occupancy, self.num_worker_warps)

    def scratch(self, device: torch.device) -> list[Tensor]:
        """Uninitialised workspace from the caching allocator: stream-ordered, and under graph capture from the graph's pool."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.workspace]

    def __str__(self) -> str:
        hints = [f"{name}={value}" for name in ("num_ctas", "occupancy", "num_worker_warps") if (value := getattr(self, name)) is not None]
        own = f"{self.name} grid={self.grid} constants={self.constants} {' '.join(hints)}".rstrip()
        return f"{own} -> {self.then}" if self.then else own


@cache
def _hinted(kernel: Any, num_ctas: int | None, occupancy: int | None, num_worker_warps: int | None) -> Any:
    # cuTile keeps its compiled code on the hinted kernel object, so one object per set of hints, for ever.
    hints = {"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": num_worker_warps}
    hints = {name: value for name, value in hints.items() if value is not None}
    return kernel.replace_hints(**hints) if hints else kernel


type_space = Callable[[Any, Device], list]
type_plan = Callable[[Any, Any, Device], Plan]

_forced: dict[type_plan, Any] = {}
_listeners: list[Callable[["Decision"], None]] = []


@dataclass(frozen=True, slots=True)
class Decision:
    """What `best_plan` decided: source is "forced", "default" (the first of the space), or the table that the config came from."""

    space: type_space
    plan: type_plan
    problem: Any
    device: Device
    config: Any
    source: str


def best_plan(space: type_space, plan: type_plan, device: Device, problem: Callable[..., Any], *fields: Any) -> Plan:
    """The plan for `problem(*fields)` on `device`: of the forced config if one is set, else a tuned one, else the first of `space`. Never tunes.

    Takes the problem in parts because a known one is then neither built nor hashed by Python code: 3 us less for each call of an op.
    """
    if _forced or _listeners:
        wanted = problem(*fields)
        config, source = _forced.get(plan), "forced"
        if config is None:
            config, source = decide(space, plan, wanted, device)
        for listen in _listeners:
            listen(Decision(space, plan, wanted, device, config, source))
        return plan(wanted, config, device)
    return _chosen_plan(space, plan, device, problem, *fields)


@lru_cache(maxsize=1 << 16)
def _chosen_plan(space: type_space, plan: type_plan, device: Device, problem: Callable[..., Any], *fields: Any) -> Plan:
    from .table import op_of, show  # msgspec and the tables: loaded by the first call of an op, not by the import

    wanted = problem(*fields)
    config, source = decide(space, plan, wanted, device)
    show(op_of(plan), wanted, device, config, source)
    return plan(wanted, config, device)


def decide(space: type_space, plan: type_plan, problem: Any, device: Device) -> tuple[Any, str]:
    """The config of an unforced call and where it comes from. Raises ValueError if the device can't run the problem."""
    from .table import find

    configs = space(problem, device)
    if not configs:
        raise must("device", f"one that can run {problem}", f"{device.name} ({device.arch})")
    return find(plan, problem, configs, device) or (configs[0], "default")


def forget_plans() -> None:
    """Decides anew from here on, with the tables read anew: after tuning in this process."""
    from .table import forget

    forget()
    _chosen_plan.cache_clear()


@contextmanager
def decisions() -> Iterator[list[Decision]]:
    """Collects what ops called inside the context decide, forced configs included."""
    found: list[Decision] = []
    _listeners.append(found.append)
    try:
        yield found
    finally:
        _listeners.remove(found.append)


@contextmanager
def forced_config(plan: type_plan, config: Any) -> Iterator[None]:
    """Within the context every call whose op decides with `plan` uses `config`. For tests, tuner and benchmark."""
    before = _forced.get(plan)
    _forced[plan] = config
    try:
        yield
    finally:
        if before is None:
            del _forced[plan]
        else:
            _forced[plan] = before
