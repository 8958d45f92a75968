"""One kernel launch as data, by names, and what binds it to the arguments of an op."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch

from .check import argument_error

Shape = tuple[int, ...]
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel launch, all but its arguments: printable, hashable, made without a GPU.

    Names are those of the kernel's parameters in lower case. Every other parameter takes the op's
    argument or the scratch array of its name, unless `renames` or `unused` says otherwise.

    kernel: the cuTile kernel object.
    grid: blocks in x, y, z (1 to 3 entries).
    constants: values of all `ct.Constant` parameters.
    num_ctas, occupancy, num_worker_warps: compiler hints; None leaves the compiler's choice.
    pdl: its blocks may start while those of the previous launch still run; its kernel begins with
        `pdl_overlap`. Not for a persistent kernel, unless each block fills an SM: the first free
        SMs would get more blocks than others, and keep them.
    scratch: (shape, dtype) of arrays that exist for the length of the call. The op's other launches
        may use them by name.
    views: (scratch array, shape, strides) of other views of them, likewise.
    renames: parameter -> the argument or scratch array that it takes.
    unused: array parameters that the kernel does not touch with these constants. Another array of
        the kernel is passed in their place.
    """

    kernel: Any
    grid: tuple[int, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None
    pdl: bool = False
    scratch: Mapping[str, tuple[Shape, torch.dtype]] = field(default_factory=dict)
    views: Mapping[str, tuple[str, Shape, Shape]] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        kernel: Any,
        grid: tuple[int, ...],
        problem: Any,
        config: Any,
        constants: Mapping[str, Any] = MappingProxyType({}),
        *,
        optional: Mapping[str, Any] = MappingProxyType({}),
        **how: Any,
    ) -> "Launch":
        """A launch with the hints of a config, and with its fields as constants.

        constants: those that are computed, or have other names. The kernel's others are the fields
            of the config that have their names, else of the problem.
        optional: arrays that may be absent: whether each is there. Those that are not are `unused`.
        how: other fields; a hint takes the place of the config's.
        """
        found = {}
        for name in _constants(kernel):
            if name not in constants:
                value = getattr(config, name, _MISSING)
                if value is _MISSING:
                    value = getattr(problem, name, _MISSING)
                if value is not _MISSING:
                    found[name] = value
        absent = tuple(name for name, there in optional.items() if not there)
        return cls(kernel, grid, {**constants, **found}, **{**hints(config), "unused": absent, **how})

    def with_others(self, others: Mapping[str, str]) -> "Launch":
        """The launch with other arrays in place of some: argument or scratch array -> what it
        takes.
        """
        taken = {name: others[source] for name, source in _sources(self).items() if source in others}
        return replace(self, renames={**self.renames, **taken})

    def __hash__(self) -> int:
        return hash((self.compiled, self.grid))

    def __str__(self) -> str:
        given = {**self.constants} | {name: value for name in HINTS if (value := getattr(self, name)) is not None}
        return " ".join([f"{self.name} grid={self.grid}", *(f"{name}={value}" for name, value in given.items())])

    @property
    def name(self) -> str:
        return str(self.kernel._pyfunc.__name__)

    @property
    def values(self) -> Values:
        """Of its constants, in the order of the kernel's parameters, whose names may change."""
        return tuple([self.constants[name] for name in _constants(self.kernel)])

    @property
    def compiled(self) -> Values:
        """What the compiler sees: kernel, constants, hints. Who shares it shares a binary."""
        return self.kernel, tuple(self.constants.items()), self.num_ctas, self.occupancy, self.num_worker_warps

    @property
    def hinted_kernel(self) -> Any:
        """The kernel object with its hints: one for each set of them.

        cuTile keeps its compiled code on the object.
        """
        return hinted(self.kernel, self.num_ctas, self.occupancy, self.num_worker_warps)


HINTS = ("num_ctas", "occupancy", "num_worker_warps")
_MISSING = object()


def hints(config: Any) -> dict[str, Any]:
    """The compiler hints that a config has, as keywords of `Launch`."""
    return {name: value for name in HINTS if (value := getattr(config, name, _MISSING)) is not _MISSING}


@cache
def hinted(kernel: Any, num_ctas: int | None, occupancy: int | None, num_worker_warps: int | None) -> Any:
    """The kernel with these hints, the same object each time."""
    given = {name: value for name, value in zip(HINTS, (num_ctas, occupancy, num_worker_warps), strict=True) if value is not None}
    return kernel.replace_hints(**given) if given else kernel


# ------------------------------------------------------------------------------- names -> positions
@dataclass(frozen=True, slots=True)
class Step:
    """A launch bound to its arguments: kernel(*pick(arguments + scratch), *constants).

    names: of all the kernel's parameters, in order.
    """

    launch: Launch
    kernel: Any
    grid: tuple[int, ...]
    pick: Callable[[Values], Values]
    constants: Values
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a call allocates behind its arguments: arrays, and then views of them by their index."""

    arrays: tuple[tuple[Shape, torch.dtype], ...]
    views: tuple[tuple[int, Shape, Shape], ...]

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Uninitialised and stream-ordered; in a capture from the graph's pool."""
        arrays = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.arrays]
        return tuple(arrays + [arrays[i].as_strided(shape, strides) for i, shape, strides in self.views])


def bind(launches: Sequence[Launch], arguments: Sequence[str]) -> tuple[list[Step], Scratch | None]:
    """Each launch bound to an op's arguments and the scratch arrays of all, None for none.

    Raises: ValueError naming kernel and parameter for a name that is unknown, missing, given twice
        or of the wrong kind; naming the kernel for a grid that no GPU would launch.
    """
    for launch in launches:
        check_grid(launch)
    arrays = [(name, array) for launch in launches for name, array in launch.scratch.items()]
    views = [(name, view) for launch in launches for name, view in launch.views.items()]
    made = [name for name, _ in (*arrays, *views)]
    names = [*arguments, *made]
    for name in names:
        if names.count(name) > 1:
            raise argument_error(f"{name!r} of {launches[0].name}", "named once among arguments, scratch and views", ", ".join(names))
    index = {name: i for i, (name, _) in enumerate(arrays)}
    for name, (source, _, _) in views:
        if source not in index:
            raise argument_error(f"view {name!r}", f"of a scratch array, {', '.join(index) or 'of which there is none'}", repr(source))
    steps = [_step(launch, tuple(names), tuple(made)) for launch in launches]
    taken = {source for launch in launches for source in _sources(launch).values()} | {source for _, (source, _, _) in views}
    for name in made:
        if name not in taken:
            raise argument_error(
                f"scratch {name!r}", "a parameter of one of the launches, or left out", " and ".join(launch.name for launch in launches)
            )
    if not arrays:
        return steps, None
    return steps, Scratch(tuple(array for _, array in arrays), tuple((index[source], shape, strides) for _, (source, shape, strides) in views))


def most_blocks() -> str:
    """Of a grid along x, y and z."""
    from ..interpret.cutile import MOST_BLOCKS

    return " x ".join(map(str, MOST_BLOCKS))


class GridError(ValueError):
    """A grid that no GPU would launch."""


def check_grid(launch: Launch) -> None:
    """Raises GridError, which names the kernel, if no GPU would launch its grid."""
    from ..interpret.cutile import MOST_BLOCKS

    if not 1 <= len(launch.grid) <= 3 or any(n > most for n, most in zip(launch.grid, MOST_BLOCKS, strict=False)):
        be = f"at most {most_blocks()} blocks (call the op on parts of its input)"
        raise GridError(*argument_error(f"grid of {launch.name}", be, launch.grid).args)


def _sources(launch: Launch) -> dict[str, str]:
    """Parameter -> the argument or scratch array that it takes."""
    taken = (name for name, kind in _parameters(launch.kernel) if kind != "constant" and name not in launch.unused)
    return {name: launch.renames.get(name, name) for name in taken}


@cache
def _parameters(kernel: Any) -> tuple[tuple[str, str], ...]:
    """(name in lower case, "constant" | "scalar" | "array") of each parameter in order."""
    from ..interpret.cutile import parameter_kinds  # loaded by the first decision, not by the import

    return tuple((name.lower(), kind) for name, kind in parameter_kinds(kernel).items())


@cache
def _constants(kernel: Any) -> tuple[str, ...]:
    return tuple(name for name, kind in _parameters(kernel) if kind == "constant")


def _step(launch: Launch, names: Values, made: Values) -> Step:
    """names: of all that a kernel may take, in order. made: those of them that the call makes."""
    own = launch.kernel, tuple(launch.constants), tuple(launch.renames.items()), tuple(launch.unused)
    pick, parameters = _placed(*own, names, made)
    for name, value in launch.constants.items():
        if isinstance(value, torch.Tensor):
            raise argument_error(f"constant {name!r} of {launch.name}", "a number, or no ct.Constant in the kernel", "a tensor")
    return Step(launch, launch.hinted_kernel, launch.grid, pick, launch.values, parameters)


@lru_cache(4096)
def _placed(
    kernel: Any, constants: Values, renames: tuple[tuple[str, str], ...], unused: Values, names: Values, made: Values
) -> tuple[Callable[[Values], Values], tuple[str, ...]]:
    """What picks a kernel's arguments from the values of `names`, and the kernel's parameters."""
    from ..interpret.cutile import parameter_kinds

    parameters, renamed, own = _parameters(kernel), dict(renames), str(kernel._pyfunc.__name__)
    runtime = [(name, kind) for name, kind in parameters if kind != "constant"]
    constant = _constants(kernel)
    for name, kind in runtime:
        if [other for other, _ in runtime].count(name) > 1:
            raise argument_error(f"{kind} {name!r} of {own}", "unique among its parameters in lower case", "a name of two parameters")
    _check_names(own, constants, renamed, unused, dict(runtime), constant)
    if parameters[len(runtime) :] != tuple((name, "constant") for name in constant):
        raise argument_error(f"constants of {own}", "its last parameters", ", ".join(name for name, _ in parameters))
    found: list[int | None] = []
    for name, kind in runtime:
        source = renamed.get(name, name)
        if name in unused:
            found.append(None)
        elif source not in names:
            was = "a constant: annotate the parameter with ct.Constant" if name in constants else f"{source!r}, not one of {', '.join(names)}"
            raise argument_error(f"{kind} {name!r} of {own}", "an argument, a scratch array, or listed in renames or unused", was)
        elif source in made and kind == "scalar":
            raise argument_error(f"scalar {name!r} of {own}", "a scalar argument", f"scratch array {source!r}")
        else:
            found.append(names.index(source))
    stand_in = next((i for i, (_, kind) in zip(found, runtime, strict=True) if i is not None and kind == "array"), None)
    if stand_in is None:
        raise argument_error(f"unused of {own}", "without at least one of its arrays, to stand in for the others", unused)
    return _picker([stand_in if i is None else i for i in found]), tuple(parameter_kinds(kernel))


def _check_names(
    own: str, constants: Values, renames: Mapping[str, str], unused: Values, runtime: Mapping[str, str], constant: Sequence[str]
) -> None:
    """Raises ValueError unless all constants are there.

    Constants, renames and unused must name parameters of their kind.
    """
    for name in constants:
        if name not in constant:
            was = f"{'an' if runtime[name] == 'array' else 'a'} {runtime[name]} parameter: pass it as an argument" if name in runtime else "unknown"
            raise argument_error(f"constant {name!r} of {own}", f"one of {', '.join(constant) or 'none'}", was)
    for name in constant:
        if name not in constants:
            raise argument_error(f"constant {name!r} of {own}", "given by plan", ", ".join(constants) or "no constants")
    for name in renames:
        if name not in runtime:
            raise argument_error(f"renames of {own}", f"of its parameters {', '.join(runtime)}", repr(name))
    for name in unused:
        if runtime.get(name) != "array":
            raise argument_error(f"unused of {own}", f"of its arrays {', '.join(n for n in runtime if runtime[n] == 'array')}", repr(name))
        if name in renames:
            raise argument_error(f"{name!r} of {own}", "in renames or in unused", "in both")


def _picker(indices: Sequence[int]) -> Callable[[Values], Values]:
    """The values at these places of a tuple, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    (index,) = indices  # for one place itemgetter returns no tuple
    return lambda values: (values[index],)
