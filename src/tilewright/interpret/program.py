"""A kernel specialised for its arguments' types: `codegen` makes it, `run` runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Place
from .live import LiveTile


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that exists at run time.

    path: its place among the arguments: an index, then indices into tuples.
    kind: "array", "list" or "scalar".
    dtype: of a scalar, or of an array's extents.
    """

    name: str
    path: tuple[int, ...]
    kind: str
    dtype: str = ""

    def of(self, args: tuple[Any, ...]) -> Any:
        """Its value."""
        found: Any = args
        for place in self.path:
            found = found[place]
        return found


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel specialised for the types of its arguments.

    function: called once per block with the machine and the parameters. If `cooperative`, it is a
        generator function that yields wherever a block may have to wait for another one.
    code: the globals of `function`.
    written: indices into `parameters` of arrays that it may write.
    live: line of the running code -> the tiles that hold values there; empty unless traced.
    """

    name: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    cooperative: bool
    source: str
    code: dict[str, Any]
    line_places: tuple[tuple[Place, ...], ...]
    written: frozenset[int]
    live: Mapping[int, tuple[LiveTile, ...]]

    def places(self, line: int) -> tuple[Place, ...]:
        """Where line `line` (from 1) of the running code comes from: the innermost place first."""
        return self.line_places[line - 1] if 0 < line <= len(self.line_places) else ()
