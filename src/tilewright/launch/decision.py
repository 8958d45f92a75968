"""Decides what a call launches for its problem."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .check import argument_error
from .context import CONTEXT, Context, changed
from .device import Device
from .far import LONGEST
from .launches import GridError, Launch, check_grid, most_blocks
from .run import Bound

type_space = Callable[[Any, Device], list[Any]]
type_plan = Callable[[Any, Any, Device], Sequence[Launch]]

FEW = 1024  # the size that a problem is tried with, to find which of its sizes is too large
MOST_KNOWN = 1 << 14  # decisions of an op, of 2 to 4 KB each: every step of a server may have sizes of its own
caches: list[Callable[[], None]] = []  # clears of all that remembers a decision


class Decision:
    """How an op decides, as one object.

    A call is `DECISION.launches(device, **fields of its Problem).run(*its arguments)`.

    op: its name. problem: its Problem, a frozen dataclass.
    arguments: names of what `run` takes, in order; the first is a tensor.
    space: (problem, device) -> configs, the untuned default first; none if the device can't run it.
    plan: (problem, config, device) -> launches in order.
    any_length: its kernels count in 64 bits along axes that are too long for others (far.LONGEST).
    launches: (device, **fields) -> the bound launches of `problem(**fields)`. Their config is the
        forced one, else a tuned one, else the first of `space`. Never tunes. Raises ValueError if
        the device can't run the problem, or if `plan` uses a name that its kernels don't have.
    """

    launches: Callable[..., Bound]

    def __init__(self, op: str, *, problem: type, arguments: Sequence[str], space: type_space, plan: type_plan, any_length: bool = False) -> None:
        self.op, self.problem, self.arguments, self.space, self.plan = op, problem, tuple(arguments), space, plan
        self.any_length = any_length
        self._known = lru_cache(maxsize=MOST_KNOWN)(self._decided)
        self._bound = lru_cache(maxsize=1 << 12)(self._bind)
        self.launches = self._written()
        self._formed = lru_cache(maxsize=1 << 12)(self._form)
        caches.extend((self._known.cache_clear, self._bound.cache_clear, self._formed.cache_clear))

    def _written(self) -> Callable[..., Bound]:
        """`launches`, written out with the Problem's fields as its parameters.

        So Python binds the names: for a known problem a call with 16 of them takes 0.35 us, with
        **fields 1.7 us.
        """
        fields = dataclasses.fields(self.problem)
        names = ", ".join(field.name for field in fields)
        parameters = ", ".join(f"{f.name}=defaults[{f.name!r}]" if f.default is not dataclasses.MISSING else f.name for f in fields)
        scope: dict[str, Any] = {
            "defaults": {field.name: field.default for field in fields},
            "context": CONTEXT.get,
            "known": self._known,
            "decided_in": self._decided_in,
        }
        lines = (
            f"def launches(device, {parameters}):",
            "    if context() is None:",
            f"        return known(device, {names})",
            f"    return decided_in(context(), device, {names})",
        )
        exec("\n".join(lines), scope)
        launches: Callable[..., Bound] = scope["launches"]
        return launches

    def _decided_in(self, context: Context, device: Device, *fields: Any) -> Bound:
        forced = context.forced.get(self.plan)
        if not context.on_choice and forced is None:
            return self._known(device, *fields)
        if not context.on_choice and callable(forced):
            return self._formed(forced, device, *fields)
        problem = self.problem(*fields)
        config, source = forced(problem, device) if callable(forced) else forced, "forced"
        if config is None:
            config, source = self.decide(problem, device)
        for listen in context.on_choice:
            listen(Choice(self, problem, device, config, source))
        return self._bound(problem, config, device)

    def _form(self, form: Callable[[Any, Device], Any], device: Device, *fields: Any) -> Bound:
        problem = self.problem(*fields)
        config = form(problem, device)
        return self._known(device, *fields) if config is None else self._bound(problem, config, device)

    def _decided(self, device: Device, *fields: Any) -> Bound:
        from .table import show  # msgspec and the tables: loaded by the first call of an op, not by the import

        problem = self.problem(*fields)
        config, source = self.decide(problem, device)
        show(self.op, problem, device, config, source)
        return self._bound(problem, config, device)

    def _bind(self, problem: Any, config: Any, device: Device) -> Bound:
        try:
            sizes = (getattr(problem, field.name) for field in dataclasses.fields(problem))
            long = not self.any_length and any(type(size) is int and size > LONGEST for size in sizes)
            return Bound(self.plan(problem, config, device), self.arguments, device, long=long)
        except GridError as error:
            raise self._too_large(problem, device) or error from None

    def decide(self, problem: Any, device: Device) -> tuple[Any, str]:
        """The config of an unforced call and where it comes from.

        Raises: ValueError if the device can't run the problem.
        """
        from .table import find

        configs = self.space(problem, device)
        if not configs:
            raise self._too_large(problem, device) or argument_error("device", f"one that can run {problem}", f"{device.name} ({device.arch})")
        legal = getattr(configs, "legal", configs)  # an ordered space is cut; a row may name any legal config
        return find(self, problem, legal, device) or (configs[0], getattr(configs, "source", "default"))

    def _too_large(self, problem: Any, device: Device) -> ValueError | None:
        """The error that names the sizes without which the device could run the problem: any of
        them or, where none alone is to blame, all that are large. None if it could not anyway.
        """
        sizes = [f.name for f in dataclasses.fields(problem) if type(size := getattr(problem, f.name)) is int and size > FEW]
        large: list[tuple[str, ...]] = [(name,) for name in sizes if self._runs(problem, (name,), device)]
        if not large and self._runs(problem, sizes, device):
            large = [tuple(sizes)]
        if not large:
            return None
        be = f"smaller on {device.name}, whose grids have {most_blocks()} blocks at most (call the op on parts of its input)"
        was = " and ".join(str(getattr(problem, name)) for names in large for name in names)
        return argument_error(f"{' or '.join(map(' and '.join, large))} of {self.op}", be, was)

    def _runs(self, problem: Any, names: Sequence[str], device: Device) -> bool:
        """Whether the device could run the problem if these sizes were small."""
        try:
            problem = dataclasses.replace(problem, **dict.fromkeys(names, FEW))
            configs = self.space(problem, device)
            for launch in self.plan(problem, configs[0], device) if configs else ():
                check_grid(launch)
        except (ValueError, ArithmeticError):  # sizes that no call would have together
            return False
        return bool(configs)


def usual(problem: Any, **values: Any) -> None:
    """For `__post_init__` of a problem: a field that says what its default stands for becomes the
    default. Then the problem of a call is the one that was timed.
    """
    for name, value in values.items():
        if getattr(problem, name) == value:
            object.__setattr__(problem, name, type(problem).__dataclass_fields__[name].default)


def decision_of(op: Any) -> Decision:
    """The decision of an op's module."""
    decision: Decision = op.DECISION
    return decision


@dataclass(frozen=True, slots=True)
class Choice:
    """What a decision came to.

    source: "forced", or the table that the config came from. Else it is the first of the space, and
        this says what ordered that: "model", "model + 3 neighbours" or "first" if the op states
        `Choices` (select/), "default" if it does not.
    """

    decision: Decision
    problem: Any
    device: Device
    config: Any
    source: str

    @property
    def plan(self) -> type_plan:
        return self.decision.plan


def forget_plans() -> None:
    """Forgets all decisions and reads the tables again at the next call. Call it after tuning in
    this process.
    """
    from .table import forget

    forget()
    for clear in caches:
        clear()


@contextmanager
def decisions() -> Iterator[list[Choice]]:
    """Collects what ops called inside the context decide, forced configs included."""
    found: list[Choice] = []
    with changed(lambda context: {"on_choice": (*context.on_choice, found.append)}):
        yield found


@contextmanager
def forced_config(plan: Callable[..., Any], config: Any) -> Iterator[None]:
    """Within the context every call whose op decides with `plan` uses `config`.

    config: or a function of problem and device; where it returns None, the op chooses.
    """
    with changed(lambda context: {"forced": {**context.forced, plan: config}}):
        yield
