"""Which tiles hold values at each operation: what a block keeps in registers, before a compiler
chooses an order of its own.
"""

import linecache
import math
import re
from itertools import zip_longest
from typing import Any, NamedTuple

from . import cutile

VIEWS = {"assign", "tile_reshape", "tile_broadcast", "tile_permute"}  # the same values as their operand
PLACE = {"tile_mma", "tile_mma_scaled"}  # the result takes the accumulator's place
LOADS = {"tile_load", "load_pointer"}


class LiveTile(NamedTuple):
    """name: the kernel's own for it, or "" for an intermediate value."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        bits = 8 if self.dtype == "bool_" else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(self.shape) * bits // 8


class Uses:
    """When each tile is made and last used, counted in operations."""

    def __init__(self, body: Any):
        self.count = 0
        self.at: dict[int, tuple[int, int]] = {}  # id of an operation -> its first number, and that behind its blocks
        self.tiles: dict[str, LiveTile] = {}
        self.root: dict[str, str] = {}
        self.made: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.loops: list[tuple[int, int]] = []
        self.walk(body)
        for name, last in self.last.items():
            ends = [end for start, end in self.loops if self.made[name] < start < last <= end]
            self.last[name] = max([last, *ends])

    def walk(self, block: Any) -> None:
        for op in block:
            start = self.count = self.count + 1
            for variable in op.all_inputs():
                self.use(variable)
            if op.op == "loop":
                for variable in op.body_vars:
                    self.make(variable)
            for inner in op.nested_blocks if op.op in ("loop", "ifelse") else ():
                self.walk(inner)
            if op.op == "loop":
                self.loops.append((start, self.count))
            sources = op.body_vars if op.op == "loop" else (op.acc,) if op.op in PLACE else tuple(op.all_inputs())[:1] if op.op in VIEWS else ()
            for variable, source in zip_longest(op.result_vars, sources):
                self.make(variable, source, _assigned(op.loc) if op.op in LOADS else "")
            self.at[id(op)] = start, self.count

    def make(self, variable: Any, source: Any = None, hint: str = "") -> None:
        if not cutile.is_tensor(variable) or cutile.is_pointer(variable) or not cutile.shape_of(variable):
            return
        if source is not None and source.name in self.root:
            self.root[variable.name] = self.root[source.name]
        elif source is None or cutile.shape_of(source):
            own = variable.get_original_name()
            name = own if own.isidentifier() else hint
            self.tiles[variable.name] = LiveTile(name, cutile.dtype_of(variable), cutile.shape_of(variable))
            self.root[variable.name] = variable.name
            self.made[variable.name] = self.last[variable.name] = self.count

    def use(self, variable: Any) -> None:
        root = self.root.get(variable.name)
        if root is not None:
            self.last[root] = self.count


def _assigned(loc: Any) -> str:
    """The name that the line of a load gives to what it loads, if it begins with `name =`."""
    found = re.match(r"\s*(\w+)\s*=[^=]", linecache.getline(loc.filename, loc.line)) if not loc.is_unknown() else None
    return found[1] if found else ""


def live_tiles(body: Any) -> dict[int, tuple[LiveTile, ...]]:
    """id of an operation -> the tiles that hold values while it runs, its results among them."""
    uses = Uses(body)
    return {
        op: tuple(tile for name, tile in uses.tiles.items() if uses.made[name] <= end and uses.last[name] >= start)
        for op, (start, end) in uses.at.items()
        if start == end
    }
