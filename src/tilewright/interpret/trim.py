"""Finds loads that may leave out zeros that only a matrix product would read.

A tile that does not fit into the array is padded. If the padding is zero and only one product reads
the tile, padding along the contracted axis adds nothing. Such a load returns a view of the array:
nothing to copy, no padding to multiply.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from . import cutile

Axes = dict[str, int]  # IR value -> its axis that may be shorter than its type says


def short_axes(body: Any) -> Axes:
    """The contracted axis of every value between such a load and its product."""
    ops = list(body.traverse())
    makers = {v.name: op for op in ops for v in op.result_vars}
    uses = Counter(v.name for op in ops for v in op.all_inputs())
    axes: Axes = {}
    for op in ops:
        if op.op == "tile_mma":
            for operand, from_end in ((op.x, 1), (op.y, 2)):
                axes |= _chain(operand, len(cutile.shape_of(operand)) - from_end, makers, uses)
    return axes


def _chain(value: Any, axis: int | None, makers: dict[str, Any], uses: Counter[str]) -> Axes:
    """The operations from a product's operand back to its load; empty if one of them needs the
    whole tile.
    """
    axes: Axes = {}
    while axis is not None and value is not None and uses[value.name] == 1 and (maker := makers.get(value.name)) is not None:
        axes[value.name] = axis
        if maker.op == "tile_load":
            view = cutile.view_of(maker.view)
            return axes if view["padding"] == "ZERO" and view["sparse_axis"] is None else {}
        if maker.op == "tile_permute":
            axis = maker.axes[axis]
        elif maker.op == "tile_reshape":
            axis = _same_axis(cutile.shape_of(value), axis, cutile.shape_of(maker.x))
        elif maker.op == "loop":
            value = _returned(maker, value)
            continue
        elif maker.op != "tile_astype":
            return {}
        value = maker.x
    return {}


def _returned(loop: Any, result: Any) -> Any:
    """A result of a function that returns early, which the IR has as a loop that its first pass
    ends; None of any other loop.
    """
    found = list(ends(loop.body))
    if loop.is_for_loop or len(found) > 1 or found[0].op != "break" or found[0] is not loop.body[-1]:
        return None
    return found[0].values[[v.name for v in loop.result_vars].index(result.name)]


def ends(block: Any) -> Iterator[Any]:
    """The ops that end a pass of the loop around a block."""
    for op in block:
        if op.op in ("break", "continue"):
            yield op
        elif op.op != "loop":
            for nested in op.nested_blocks:
                yield from ends(nested)


def _same_axis(shape: tuple[int, ...], axis: int, before: tuple[int, ...]) -> int | None:
    """The axis before a reshape that only added or dropped axes of extent 1."""
    now = [a for a, n in enumerate(shape) if n != 1]
    was = [a for a, n in enumerate(before) if n != 1]
    if axis not in now or [shape[a] for a in now] != [before[a] for a in was]:
        return None
    return was[now.index(axis)]
