"""Runs the examples of cuTile's documentation on a CPU and compares what they print.

    python tools/conformance/doc_examples.py               docstrings of the installed package
    python tools/conformance/doc_examples.py --source DIR  also the documentation in a checkout

An example is a `testcode` block, usually with a `testoutput` block after it. Exits with 1 unless
all pass.
"""

import argparse
import contextlib
import doctest
import inspect
import io
import linecache
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import cpu_shim

# Packages and hardware that a CPU machine lacks. An example that needs them counts as left out.
NOT_HERE = {
    "jax_setup.py": "needs JAX",
    "import cupy": "needs CuPy",
    "exhaustive_search": "times kernels on a GPU",
    "torch.cuda.graph": "captures a CUDA graph",
}
TEMPLATES = {
    "kernel_wrapper.py": "import cuda.tile as ct\nimport torch\n\n@ct.kernel\ndef kernel():\n{indented}\n\nct.launch(None, (1,), kernel, ())\n",
    "setup_only.py": "import cuda.tile as ct\nimport torch\nstream = None\n\n{body}\n",
    "": "{body}\n",
}


@dataclass
class Example:
    where: str
    template: str
    code: str
    output: str | None

    @property
    def left_out(self) -> str | None:
        return next((why for mark, why in NOT_HERE.items() if mark in self.template + self.code), None)


@dataclass
class Block:
    kind: str
    line: int
    options: dict[str, str]
    text: str


def blocks(text: str) -> Iterator[Block]:
    """The testcode and testoutput directives of a file."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        found = re.match(r"( *)\.\. (testcode|testoutput)::", line)
        if found is None:
            continue
        indent, body = len(found[1]), []
        for inner in lines[at + 1 :]:
            if inner.strip() and len(inner) - len(inner.lstrip()) <= indent:
                break
            body.append(inner)
        options = {}
        while body and (option := re.match(r"\s+:(\w+):\s*(.*)", body[0])):
            options[option[1]] = option[2].strip()
            body.pop(0)
        yield Block(found[2], at + 1, options, textwrap.dedent("\n".join(body)).strip("\n"))


def examples(text: str, where: str) -> Iterator[Example]:
    waiting: Example | None = None
    for block in blocks(text):
        if block.kind == "testcode":
            if waiting is not None:
                yield waiting
            waiting = Example(f"{where}:{block.line}", block.options.get("template", ""), block.text, None)
        elif waiting is not None:
            waiting.output = block.text
            yield waiting
            waiting = None
    if waiting is not None:
        yield waiting


def docstrings(package: ModuleType) -> Iterator[tuple[str, str]]:
    """(name, docstring) of the functions, classes and members of a package, each docstring once."""
    seen: set[int] = set()
    modules = [m for name, m in sorted(sys.modules.items()) if name.split(".")[:2] == package.__name__.split(".") and isinstance(m, ModuleType)]
    for module in modules:
        owners = [o for o in vars(module).values() if inspect.isclass(o) or inspect.isroutine(o)]
        members = [m for o in owners if inspect.isclass(o) for m in vars(o).values()]
        for item in [*owners, *members]:
            item = getattr(item, "__func__", item)
            text = getattr(item, "__doc__", None)
            if isinstance(text, str) and "testcode::" in text and hash(text) not in seen:
                seen.add(hash(text))
                yield getattr(item, "__qualname__", str(item)), inspect.cleandoc(text)


def run(example: Example) -> str | None:
    """The difference, or None."""
    # The markers say which lines the documentation shows. All lines run.
    body = "\n".join(line for line in example.code.splitlines() if line.strip() not in ("# begin-snippet", "# end-snippet"))
    source = TEMPLATES[example.template].format(body=body, indented=textwrap.indent(body, "    "))
    name = f"<{example.where}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    printed = io.StringIO()
    namespace = {"__name__": name}
    sys.modules[name] = type(sys)(name)
    sys.modules[name].__dict__.update(namespace)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, name, "exec"), sys.modules[name].__dict__)
    except Exception as error:
        if example.output is None or not example.output.startswith("Traceback"):
            return "".join(traceback.format_exception(error)[-3:])
        expected = example.output.rstrip().splitlines()[-1].split(":")[0]
        return None if type(error).__name__ == expected.rpartition(".")[2] else f"expected {expected}, got {type(error).__name__}: {error}"
    if example.output is None:
        return None
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if doctest.OutputChecker().check_output(example.output + "\n", printed.getvalue(), flags):
        return None
    return f"expected\n{example.output}\ngot\n{printed.getvalue()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of cutile-python")
    options = parser.parse_args()
    cpu_shim.install()
    import cuda.tile

    found = [e for where, text in docstrings(cuda.tile) for e in examples(text, where)]
    if options.source is not None:
        documentation = options.source / "docs" / "source"
        found += [e for path in sorted(documentation.rglob("*.rst")) for e in examples(path.read_text(), str(path.relative_to(documentation)))]
    failed = left_out = 0
    for example in found:
        if example.left_out is not None:
            left_out += 1
            print(f"{example.where}: left out, {example.left_out}")
        elif (wrong := run(example)) is not None:
            failed += 1
            print(f"{example.where}: {wrong}")
    print(f"{len(found) - failed - left_out} passed, {failed} failed, {left_out} left out")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
