"""The text that the code generator writes: lines with their places in the source, names, operands.

Every generated name contains "__", so none clashes with a name of the kernel. A broadcast tile
stays small until an operation needs all of it.
"""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import cutile, formats, memory, numerics
from .errors import Place
from .program import Parameter


class Writer:
    """The text of one program so far, and the meaning of its names.

    inline: IR value -> an expression that stands for it.
    spread: IR value -> the smaller value that it broadcasts, and its own shape.
    origin: IR pointer, array or view -> index of the parameter it comes from.
    arrays: IR base pointer of an array parameter -> the array's name, its constraint, its IR
        extents and strides.
    values: expression -> the name of its value, of those that this place of the program has. None
        while each operation has to have a statement of its own.
    """

    def __init__(self, kernel: Any, debug: bool):
        self.function, self.debug = cutile.python_function(kernel), debug
        self.file = self.function.__code__.co_filename
        self.top: Place = (self.file, self.function.__code__.co_firstlineno, self.function.__name__)
        self.env: dict[str, Any] = {"__np": np, "__fm": formats, "__nu": numerics, "__me": memory}
        self.lines: list[str] = []
        self.line_places: list[tuple[Place, ...]] = []
        self.depth = 1
        self.names: dict[str, str] = {}
        self.taken: set[str] = set()
        self.inline: dict[str, str] = {}
        self.spread: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.origin: dict[str, int] = {}
        self.arrays: dict[str, tuple[str, Any, list[Any]]] = {}
        self.values: dict[str, str] | None = None

    # ----------------------------------------------------------------------------------- parameters
    def declare(self, variables: Iterable[Any], flat: list[tuple[str, tuple[int, ...], Any]]) -> tuple[Parameter, ...]:
        """Names the parameters.

        Code reads an array's base, shape and strides where it uses them.
        """
        rest, parameters, arguments = list(variables), [], []
        for index, (name, path, constraint) in enumerate(flat):
            argument = self.new_name(name)
            arguments.append(argument)
            if hasattr(constraint, "element"):
                pointer, length = rest[:2]
                del rest[:2]
                parameters.append(Parameter(name, path, "list"))
                self.inline[pointer.name] = argument
                self.inline[length.name] = f"__np.int32(len({argument}))"
                self.origin[pointer.name] = index
            elif (rank := getattr(constraint, "ndim", None)) is not None:
                pointer, extents = rest[0], rest[1 : 1 + 2 * rank]
                del rest[: 1 + 2 * rank]
                parameters.append(Parameter(name, path, "array", constraint.index_dtype.name))
                integer = f"__np.{constraint.index_dtype.name}"
                self.inline[pointer.name] = f"__me.Pointer({argument}.buffer, __np.int64(0))"
                for axis, variable in enumerate(extents):
                    field = f"shape[{axis}]" if axis < rank else f"strides[{axis - rank}]"
                    self.inline[variable.name] = f"{integer}({argument}.{field})"
                self.arrays[pointer.name] = (argument, constraint, extents)
                self.origin[pointer.name] = index
            else:
                (scalar,) = rest[:1]
                del rest[:1]
                parameters.append(Parameter(name, path, "scalar", constraint.dtype.name))
                self.names[scalar.name] = argument
        self.put(f"def kernel__({', '.join(['__m', *arguments])}):", indent=0)
        for variable in variables:
            self.show(variable, self.use(variable))
        return tuple(parameters)

    # -------------------------------------------------------------------------------------- writing
    def put(self, text: str, loc: Any = None, indent: int | None = None) -> None:
        self.lines.append("    " * (self.depth if indent is None else indent) + text)
        self.line_places.append(self.places(loc))

    def places(self, loc: Any) -> tuple[Place, ...]:
        """Innermost place first, the kernel's own line last."""
        found: list[Place] = []
        while loc is not None and not loc.is_unknown():
            found.append((loc.filename, loc.line, loc.function.name if loc.function is not None and loc.function.name else "<lambda>"))
            loc = loc.call_site
        if self.debug and found:
            found = [p for p in found if p[0] == self.file][:1]
        return tuple(found) or (self.line_places[-1] if self.line_places else (self.top,))

    def name(self, variable: Any) -> str:
        name = self.names.get(variable.name)
        if name is None:
            name = self.names[variable.name] = self.new_name(variable.name)
        return name

    def new_name(self, like: str) -> str:
        stem = re.sub(r"\W+", "_", like).strip("_")
        name = (f"t{stem}" if stem[:1].isdigit() else stem) + "__"
        while name in self.taken or name in self.env:
            name += "_"
        self.taken.add(name)
        return name

    def keep(self, value: Any, hint: str) -> str:
        """Assigns a value to a new name."""
        name = f"{hint}__{len(self.env)}"
        self.env[name] = value
        return name

    def constant(self, value: Any, dtype: str) -> str:
        name = re.sub(r"\W", lambda m: {"-": "m", ".": "p"}.get(m.group(0), ""), f"{dtype.rstrip('_')}__{value}")
        if name not in self.env:
            self.env[name] = formats.constant(value, dtype)
        return name

    def use(self, variable: Any) -> str:
        """An operand in its full shape."""
        if variable is None or cutile.is_token(variable):  # tokens order memory operations; a block runs in program order
            return "None"
        if variable.name in self.inline:
            return self.inline[variable.name]
        if variable.name in self.spread:
            small, shape = self.spread[variable.name]
            return f"__nu.broadcast({small}, {shape})"
        if variable.is_constant() and cutile.is_tensor(variable) and cutile.shape_of(variable) == ():
            return self.constant(variable.get_constant(), cutile.dtype_of(variable))
        return self.name(variable)

    def uses(self, variables: Iterable[Any]) -> str:
        return "(" + "".join(self.use(v) + ", " for v in variables) + ")"

    def targets(self, op: Any) -> str:
        return "(" + "".join(self.name(v) + ", " for v in op.result_vars) + ")"

    def small(self, variable: Any) -> str:
        """An operand before it is broadcast."""
        return self.spread[variable.name][0] if variable.name in self.spread else self.use(variable)

    def out(self, op: Any, expression: str) -> None:
        """Names what an operation computes. Equal expressions are equal values, unless the machine
        makes them: a name keeps its value as long as `values` has it.
        """
        result = op.result_vars[0]
        merged = self.values if not expression.startswith("__m.") else None
        if merged is not None and expression in merged:
            self.names[result.name] = merged[expression]
            return
        self.put(f"{self.name(result)} = {expression}", op.loc)
        self.show(result, self.name(result), op.loc)
        if merged is not None:
            merged[expression] = self.name(result)

    def elementwise(self, op: Any, form: str, *operands: Any) -> None:
        """`form` with the operands, which numpy broadcasts.

        The result stays small if all of them are.
        """
        expression = form.format(*map(self.small, operands))
        shape = cutile.shape_of(op.result_vars[0])
        self.out(op, expression)
        if shape and not any(cutile.shape_of(v) == shape and v.name not in self.spread for v in operands):
            self.spread[op.result_vars[0].name] = (self.name(op.result_vars[0]), shape)

    def show(self, variable: Any, expression: str, loc: Any = None) -> None:
        """For a debugger: the kernel's own variable as one more local."""
        function = variable.loc.function
        if self.debug and (function is None or function.name == self.function.__name__):
            name = variable.get_original_name()
            if name.isidentifier() and name in self.function.__code__.co_varnames:
                self.put(f"{name} = {expression}", loc)
