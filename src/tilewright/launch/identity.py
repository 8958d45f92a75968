"""Identifies what a stored result belongs to: the kernels, their launches, and the compiler's
version.

Also the folder where results are kept.
"""

import ast
import copy
import enum
import hashlib
import inspect
import linecache
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct
import platformdirs

from ..interpret.cutile import compiler_banner, parameters_of, python_function


def cache_folder() -> Path:
    """Where Tilewright keeps what it can make again.

    That is TILEWRIGHT_CACHE_DIR, else the user's cache folder.
    """
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    return Path(chosen) if chosen else platformdirs.user_cache_path("tilewright")


@cache
def compiler() -> str:
    """`cuda-tile 1.7.0 tileiras 13.4.92`: the versions; without a compiler only the first."""
    found = re.search(r"\bV(\d+(?:\.\d+)+)", compiler_banner())
    return f"cuda-tile {version('cuda-tile')}" + (f" tileiras {found[1]}" if found else "")


def launches_digest(launches: Iterable[Any]) -> str:
    """A hash of everything that a plan runs.

    It covers each launch's kernel, values of constants, grid, hints and PDL.
    """
    digest = hashlib.sha256()
    for launch in launches:
        how = (launch.grid, launch.num_ctas, launch.occupancy, launch.num_worker_warps, launch.pdl)
        digest.update(f"{kernel_digest(launch.kernel)} {launch.values} {how}".encode())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------ kernels
@cache
def kernel_digest(kernel: Any) -> str:
    """A hash of what a kernel does.

    It covers the kernel's syntax tree, those of the tile functions that it reaches, and the module
    constants that they read. Comments, docstrings, formatting and the names of variables,
    parameters and functions do not count. Neither does the file of a function.
    Raises: OSError if there is no source.
    """
    kinds = list(parameters_of(kernel).values())  # of annotations only what they say of a kernel's parameters counts
    return hashlib.sha256(f"{kinds} {_digest(python_function(kernel))}".encode()).hexdigest()


_digests: dict[FunctionType, str] = {}


def _digest(function: FunctionType) -> str:
    function = inspect.unwrap(function)
    if function not in _digests:
        _digests[function] = "itself"  # for a function that calls itself
        normal = _Normal(function, _definition(function))
        _digests[function] = hashlib.sha256(normal.text().encode()).hexdigest()
    return _digests[function]


def _definition(function: FunctionType) -> ast.FunctionDef:
    """A copy of a function's tree."""
    code = function.__code__
    definitions = _definitions(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    if code.co_firstlineno not in definitions:
        raise OSError(f"source of {function.__qualname__} must be in {code.co_filename}, got none")
    return copy.deepcopy(definitions[code.co_firstlineno])


@cache
def _definitions(filename: str, source: str) -> dict[int, ast.FunctionDef]:
    """The functions of a file by the line in which they begin, decorators included."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {min([node.lineno, *(d.lineno for d in node.decorator_list)]): node for node in found}


class _Normal(ast.NodeTransformer):
    """A function's tree with names as numbers, in the order in which they appear.

    A name from outside the function is replaced by its value.
    """

    def __init__(self, function: FunctionType, tree: ast.FunctionDef) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.function, self.tree = function, tree
        self.outside = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
        self.numbers: dict[str, str] = {}
        self.own: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                self.own.add(node.arg)
            elif (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)) or (isinstance(node, ast.FunctionDef) and node is not tree):
                self.own.add(node.id if isinstance(node, ast.Name) else node.name)

    def text(self) -> str:
        # A name that one nested function binds may be the module's in another.
        both = sorted(self.own & self.outside.keys() & set(_names(self.function.__code__)))
        return _text(self.visit(self.tree)) + "".join(f" {name}={_text(self.known(self.outside[name], name))}" for name in both)

    def number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"v{len(self.numbers)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = "" if node is self.tree else self.number(node.name)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.number(node.arg))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.visit(ast.Assign([node.target], node.value)) if node.value else ast.Pass()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        callee = self.value(node.func)
        if isinstance(callee, FunctionType) and not _foreign(callee):
            places = {name: f"p{i}" for i, name in enumerate(inspect.signature(callee).parameters)}
            for keyword in node.keywords:
                keyword.arg = places.get(keyword.arg or "", keyword.arg)
        elif isinstance(node.func, ast.Name) and node.func.id in self.own:
            for keyword in node.keywords:
                keyword.arg = self.number(keyword.arg) if keyword.arg in self.own else keyword.arg
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.own:
            return ast.Name(self.number(node.id))
        return self.known(self.value(node), node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        found = self.value(node)
        return self.generic_visit(node) if found is _UNKNOWN else self.known(found, node.attr)

    def value(self, node: ast.AST) -> Any:
        """What a name, or an attribute of a module or class, stands for outside of the function."""
        if isinstance(node, ast.Name) and node.id not in self.own:
            return self.outside.get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute):
            parent = self.value(node.value)
            if isinstance(parent, (ModuleType, type)):
                return getattr(parent, node.attr, _UNKNOWN)
        return _UNKNOWN

    def known(self, found: Any, name: str) -> ast.AST:
        """What a value from outside comes to."""
        if found is _UNKNOWN:
            return ast.Name(name)  # a builtin
        if isinstance(found, ct.kernel):
            found = python_function(found)
        if isinstance(found, enum.Enum):
            found = found.value
        if isinstance(found, FunctionType) and not _foreign(found):
            text = _digest(found)
        elif isinstance(found, (FunctionType, ModuleType, type)):
            text = f"{found.__module__}.{found.__qualname__}" if not isinstance(found, ModuleType) else found.__name__
        else:
            text = type(found).__name__ if " at 0x" in repr(found) else repr(found)
        return ast.Name(text)


_UNKNOWN = object()


def _foreign(function: FunctionType) -> bool:
    """Whether it belongs to cuda-tile, whose version is compared separately."""
    return function.__module__.startswith(ct.__name__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _text(node: Any) -> str:
    """A tree as text that is the same for every version of Python, unlike ast.dump's."""
    if isinstance(node, list):
        return "[" + " ".join(map(_text, node)) + "]"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if not isinstance(node, ast.AST):
        return str(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "type_comment") and value not in (None, []))
    return f"{type(node).__name__}({' '.join(f'{name}={_text(value)}' for name, value in fields)})"
