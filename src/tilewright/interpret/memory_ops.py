"""The code generator's memory operations: arrays, views, pointers, loads, stores, atomics."""

from typing import Any

from . import arrays, cutile
from .program import Parameter
from .trim import Axes
from .writer import Writer


class MemoryOps(Writer):
    """parameters: of the kernel. written: indices of those that it may write. short: see `trim`.
    used: names of the values that an operation uses.
    """

    def __init__(self, kernel: Any, debug: bool):
        super().__init__(kernel, debug)
        self.parameters: tuple[Parameter, ...] = ()
        self.written: set[int] = set()
        self.short: Axes = {}
        self.used: set[str] = set()

    def derive(self, op: Any, *sources: Any) -> None:
        """Notes that a pointer, array or view comes from the same parameter as its sources."""
        origins = {self.origin.get(v.name) for v in sources}
        origin = origins.pop() if len(origins) == 1 else None
        if origin is not None:
            for result in op.result_vars:
                self.origin[result.name] = origin

    def writes(self, target: Any) -> None:
        origin = self.origin.get(target.name)
        self.written |= set(range(len(self.parameters))) if origin is None else {origin}

    def emit_make_tensor_view(self, op: Any) -> None:
        self.derive(op, op.base_ptr)
        known = self.arrays.get(op.base_ptr.name)
        result = op.result_vars[0]
        if known is not None and self.is_argument(op, *known):
            self.inline[result.name] = known[0]
            self.show(result, known[0], op.loc)
        else:
            self.out(op, f"__me.Array.made({self.use(op.base_ptr)}, {self.uses(op.shape)}, {self.uses(op.strides)})")

    def is_argument(self, op: Any, argument: str, constraint: Any, extents: list[Any]) -> bool:
        """Whether the view is the whole array that was passed."""
        static = [*constraint.shape_constant, *constraint.stride_constant]
        for variable, own, value in zip((*op.shape, *op.strides), extents, static, strict=True):
            same = self.use(variable) == self.inline[own.name]
            if not same and not (value is not None and variable.is_constant() and variable.get_constant() == value):
                return False
        return True

    def emit_make_list_view(self, op: Any) -> None:
        self.derive(op, op.base_ptr)
        self.inline[op.result_vars[0].name] = self.use(op.base_ptr)

    def emit_get_array_list_item(self, op: Any) -> None:
        item = f"item__{len(self.lines)}"
        self.put(f"{item} = __m.item({self.use(op.x)}, {self.use(op.index)})", op.loc)
        pointer, *extents = op.result_vars
        self.derive(op, op.x)
        self.put(f"{self.name(pointer)} = __me.Pointer({item}.buffer, __np.int64(0))", op.loc)
        integers = [f"__np.{cutile.dtype_of(v)}" for v in extents]
        fields = [f"shape[{i}]" for i in range(len(extents) // 2)] + [f"strides[{i}]" for i in range(len(extents) // 2)]
        for variable, integer, field in zip(extents, integers, fields, strict=True):
            self.put(f"{self.name(variable)} = {integer}({item}.{field})", op.loc)

    def emit_foreign_pointer_cast(self, op: Any) -> None:
        self.derive(op, op.pointer)
        self.out(op, self.use(op.pointer))

    def emit_make_partition_view(self, op: Any) -> None:
        self.derive(op, op.array)
        view = self.keep(arrays.TileView(**cutile.view_of(op.result_vars[0])), "view")
        self.inline[op.result_vars[0].name] = f"({self.use(op.array)}, {view})"

    emit_make_strided_view = emit_make_gather_scatter_view = emit_make_partition_view

    def emit_num_tiles(self, op: Any) -> None:
        self.put(f"{self.targets(op)} = __m.num_tiles({self.use(op.view)})", op.loc)

    @staticmethod
    def sync(op: Any) -> str:
        order = op.memory_order.name
        return "None" if order == "WEAK" else repr((order, op.memory_scope.name))

    def emit_tile_load(self, op: Any) -> None:
        axis = self.short.get(op.result_vars[0].name)
        short = cutile.view_of(op.view)["order"][axis] if axis is not None else None
        self.out(op, f"__m.load({self.use(op.view)}, {self.uses(op.index)}, {any(op.inbounds)}, {self.sync(op)}, {short})")

    def emit_tile_store(self, op: Any) -> None:
        self.writes(op.view)
        self.put(f"__m.store({self.use(op.view)}, {self.uses(op.index)}, {self.use(op.tile)}, {any(op.inbounds)}, {self.sync(op)})", op.loc)

    def emit_index_check(self, op: Any) -> None:
        """Checks the index of a gather, scatter or atomic: always if the access has no check of its
        own, otherwise only with strict_bounds.
        """
        mask = op.mask if op.mask is not None and cutile.is_tensor(op.mask) else None
        note = ", which only strict_bounds reports: a GPU reads padding_value or drops the write" if op.checked else ""
        check = f"__m.check_index({op.what!r}, {self.uses(op.index)}, {self.uses(op.extents)}, {self.use(mask)}, {note!r})"
        self.put(f"if __m.strict_bounds: {check}" if op.checked else check, op.loc)

    def emit_pointer_offset(self, op: Any) -> None:
        self.derive(op, op.pointer)
        self.out(op, f"{self.use(op.pointer)}.moved({self.use(op.offset)})")

    def emit_load_pointer(self, op: Any) -> None:
        self.out(op, f"__m.load_pointer({self.use(op.pointer)}, {self.use(op.mask)}, {self.use(op.padding_value)})")

    def emit_store_pointer(self, op: Any) -> None:
        self.writes(op.pointer)
        self.put(f"__m.store_pointer({self.use(op.pointer)}, {self.use(op.value)}, {self.use(op.mask)})", op.loc)

    def emit_tile_atomic_rmw(self, op: Any) -> None:
        self.writes(op.pointer)
        operands = ", ".join(map(self.use, (op.pointer, op.update, op.mask)))
        self.out(op, f"__m.atomic({operands}, {op.mode.name!r}, {self.sync(op)}, {op.result_vars[0].name in self.used})")

    def emit_tile_atomic_cas(self, op: Any) -> None:
        self.writes(op.pointer)
        operands = ", ".join(map(self.use, (op.pointer, op.expected, op.desired, op.mask)))
        self.out(op, f"__m.compare_and_swap({operands}, {self.sync(op)})")

    def emit_tile_atomic_red_view(self, op: Any) -> None:
        self.writes(op.view)
        operands = f"{self.use(op.view)}, {self.uses(op.index)}, {self.use(op.update)}"
        self.put(f"__m.store_atomic({operands}, {op.mode.name!r}, {self.sync(op)})", op.loc)
