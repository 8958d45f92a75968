"""MkDocs' hook for `make site`: pages that are made, not written, and links in what is written.

- api.md: every public name, from its docstring.
- gallery.md: each op with its formula, tiling, resources, rates and peers, from committed data.
- learn.md gets the ladders as plots, from the measured rows.
- notebooks/*.md: from the notebooks, with their committed outputs.
- changelog.md, contributing.md, examples.md: from the files of the repository's root.
- results.md and results/: the report of benchmarks/results, as `tilewright report` draws it.

In prose `docs/tune.md` becomes a link to that page, and `src/...` a link to the file on GitHub.
"""

import ast
import inspect
import json
import logging
import re
import statistics
import tempfile
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib
import tilings
from mkdocs.structure.files import File, Files
from rich.console import Console

import tilewright
from tilewright import ops
from tilewright.bench.figures import ladder_bars, peer_bars, roofline, svg
from tilewright.bench.page import report_command
from tilewright.bench.results import against_peers, kernels, newest, read
from tilewright.testing import op_name, public_function

matplotlib.use("Agg")
log = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).resolve().parent.parent
GITHUB = "https://github.com/tilewright/tilewright/blob/main/"
GROUPS = re.compile(r"^(\S.*?) {2,}(.*(?:\n {10,}.*)*)", re.MULTILINE)
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


# -------------------------------------------------------------------------------------- hook points
def on_files(files: Files, config: Any) -> Files:
    made = {"api.md": api(), "gallery.md": gallery(), "results.md": results(), "examples.md": examples()}
    made |= {f"{name.lower()}.md": (ROOT / f"{name}.md").read_text() for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")}
    made |= {f"notebooks/{path.stem}.md": notebook(path) for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))}
    with tempfile.TemporaryDirectory() as folder:
        report_command(RESULTS, out=Path(folder), console=Console(quiet=True))
        made["results/index.html"] = Path(folder, "index.html").read_text()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links in prose: code blocks, and what is a link already, stay as they are."""
    up = "../" * page.file.src_uri.count("/")
    parts = re.split(r"(^```.*?^```$|^<!--.*?-->$|`[^`\n]*`|\]\([^)]*\)|^#[^\n]*$)", markdown, flags=re.DOTALL | re.MULTILINE)

    def linked(text: str) -> str:
        text = re.sub(r"(?<![\w/])docs/([\w-]+)\.md\b", lambda m: f"[{title(m[1])}]({up}{m[1]}.md)", text)
        return re.sub(r"(?<![\w/])((?:notes|benchmarks|tests|tools|examples|src)/[\w/.-]*\w|CONTRIBUTING\.md)", on_github, text)

    def on_github(found: re.Match[str]) -> str:
        if not (ROOT / found[1]).exists():
            log.warning("%s names %s, which does not exist", page.file.src_uri, found[1])  # --strict makes it an error
        return f"[{found[1]}]({GITHUB}{found[1]})"

    text = "".join(part if i % 2 else linked(part) for i, part in enumerate(parts))
    if page.file.src_uri == "learn.md":
        for end, subject in (("<!-- /ladder -->", "learn attention"), ("<!-- /gemm steps -->", "learn matmul")):
            text = text.replace(end, f"{end}\n\n{ladders(subject)}\n")
    return text.replace("](../SECURITY.md)", f"]({up}security.md)")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Our docstrings begin a line with "Returns: ", which mkdocstrings takes for a sentence."""
    if page.file.src_uri != "api.md":
        return html
    return re.sub(r"(<p>|\s)(Returns|Raises): ", lambda m: f"{m[1] if m[1] == '<p>' else '</p><p>'}<strong>{m[2]}:</strong> ", html)


def title(name: str) -> str:
    if name in ("changelog", "contributing", "security"):
        return name.title()
    return next(line[2:] for line in (ROOT / "docs" / f"{name}.md").read_text().splitlines() if line.startswith("# "))


# -------------------------------------------------------------------------------------------- pages
def groups() -> dict[str, list[str]]:
    """The groups of ops that the package's docstring lists."""
    text = ast.get_docstring(ast.parse((ROOT / "src/tilewright/__init__.py").read_text())) or ""
    return {head: re.findall(r"\w+", names) for head, names in GROUPS.findall(text.split("\n\n")[1])}


HOMES = {
    "QuantizedExperts": "common.expert_weights",
    "QuantizedWeight": "common.weight_formats",
    "grouped_gemm_list": "grouped_gemm",
    "cascade_decode": "attention_decode.cascade",
    "pack_kv": "sparse_decode.packed",
    "unpack_kv": "sparse_decode.packed",
}
FRONT = {
    "Kernels of your own": [
        "tilewright.interpret.api.interpret",
        "tilewright.interpret.run.checking",
        "tilewright.interpret.trace.Trace",
        "tilewright.interpret.errors.KernelError",
        "tilewright.compile.own.compile_report",
        "tilewright.compile.own.KernelReport",
    ],
    "Models": [
        "tilewright.models.patch.patch",
        "tilewright.models.load.load",
        "tilewright.engine.engine.Engine",
        "tilewright.engine.state.Sampling",
    ],
    "Testing": ["tilewright.testing.accuracy.accuracy", "tilewright.testing.accuracy.assert_accurate", "tilewright.testing.check.check_op"],
}


def api() -> str:
    homes = {public_function(op).__name__: public_function(op).__module__ for op in ops.ALL}
    lines = ["# API reference", "", "From the docstrings. The names in `dir(tilewright)` are available as `tilewright.NAME`.", ""]
    for head, names in groups().items():
        lines += [f"## {head}", ""]
        lines += [f"::: {homes.get(name) or 'tilewright.ops.' + HOMES[name]}.{name}\n" for name in names]
    for head, paths in FRONT.items():
        lines += [f"## {head}", "", *(f"::: {path}\n" for path in paths)]
    return "\n".join(lines)


def ladders(subject: str) -> str:
    """Each ladder that was timed: a bar for each step, a line for the best peer of the same run."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for row in newest(read(RESULTS)):
        if row["op"] == subject:
            steps.setdefault(row["case"].partition(" step=")[0], []).append(row)
    return "\n\n".join(f"`{case}`:\n\n{picture(ladder_bars(rows), f'{subject} {i}')}" for i, (case, rows) in enumerate(steps.items()))


def gallery() -> str:
    rows = newest(read(RESULTS))
    tiled = {found["op"]: found for found in json.loads((ROOT / "docs" / "tilings.json").read_text())}
    compiled = json.loads((ROOT / "docs" / "resources.json").read_text())
    modules = {public_function(op).__name__: op for op in ops.ALL}
    lines = [
        "# Ops gallery",
        "",
        "For each op: what it computes, what limits it, what the compiler makes of it, and how it compares. Times are from "
        "`benchmarks/results`, on an H200; a ratio above 1 means that we are faster. Binaries are those of the default config for one "
        "large problem. No kernel ran on another GPU than an H200, and an op without rates was compiled and not timed.",
        "",
        picture(roofline(kernels(rows)), "roofline"),
        "",
    ]
    for head, names in groups().items():
        lines += [f"## {head}", ""]
        for name in names:
            if name not in modules:
                lines += [f"### {name}", "", summary(getattr(tilewright, name)), "", *tiles(name, tiled.get(name))]
                lines += [call(name, f"tilewright.ops.{HOMES[name]}"), ""]
            else:
                lines += entry(name, modules[name], rows, compiled["rows"], tiled.get(op_name(modules[name])))
    return "\n".join([*lines, "", f"Compiled with {compiled['toolchain']}."])


def summary(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def tiles(name: str, tiled: Any) -> list[str]:
    return [drawn(tilings.svg(tiled), f"tiles of {name}"), "", tilings.caption(tiled), ""] if tiled else []


def call(name: str, module: str) -> str:
    return f"[The call](api.md#{module}.{name})"


def entry(name: str, op: Any, rows: list[dict[str, Any]], compiled: list[dict[str, Any]], tiled: Any) -> list[str]:
    text = (op.__doc__ or "").strip()
    head, _, rest = text.partition("\n\n")
    formula = textwrap.dedent("\n".join(takewhile(lambda line: line.startswith("    "), rest.splitlines())))
    bound = re.search(r"^Bound +(.*(?:\n +.*)*)", text, re.MULTILINE)
    told = textwrap.wrap(" ".join(head.split()), 84, break_long_words=False, break_on_hyphens=False)
    lines = [f"### {name}", "", "```text", *told, *(["", formula] if formula else []), "```", ""]
    if bound:
        lines += ["Bound: " + " ".join(bound[1].split()), ""]
    lines += tiles(name, tiled)
    mine = [row for row in kernels(rows) if row["op"] == op_name(op)]
    if mine:
        lines += [picture(roofline(mine, height=3.2), f"{name} under the roof"), ""]
        memory, compute = ([row for row in mine if row["bound"] == kind] for kind in ("memory", "compute"))
        rates = [f"{max(row['gbs'] for row in memory) / 1000:.2f} TB/s"] if memory else []
        rates += [f"{max(row['tflops'] for row in compute):.0f} TFLOP/s"] if compute else []
        roof = statistics.median(row["roof_pct"] for row in mine)
        lines += [f"{len(mine)} cases. Best rate: {' and '.join(rates)}; median: {roof:.0f} % of the roof.", ""]
        against = against_peers(mine)
        if against:
            lines += [picture(peer_bars(against), f"{name} and its peers"), ""]
    here = [line for line in compiled if line["op"] == op_name(op)]
    if here:
        lines += ["| kernel | architecture | registers | stack, B | shared memory, B | MMA |", "|---|---|---|---|---|---|"]
        for line in here:
            numbers = " | ".join(str(line.get(key, "-")) for key in ("registers", "stack", "shared"))
            lines.append(f"| `{line['kernel']}` | {line['arch']} | {numbers} | {' '.join(line.get('matrix', [])) or '-'} |")
        lines += ["", f"Of the problem `{here[0]['problem']}`.", ""]
    return [*lines, call(name, public_function(op).__module__), ""]


def picture(drawing: Any, name: str) -> str:
    """A drawing of matplotlib's in the page."""
    return drawn(svg(drawing, name), name)


def drawn(code: str, name: str) -> str:
    """An SVG in the page, readable on a dark ground too."""
    return f'<div class="drawing" role="img" aria-label="{name}">{code}</div>'


def notebook(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", source))
        else:
            parts.append(f"```python\n{source}\n```")
            text = "".join(out.get("text", "") for out in cell["outputs"]).rstrip()
            parts += [f"```text\n{text}\n```"] if text else []
            parts += [drawn(out["data"]["image/svg+xml"], path.stem) for out in cell["outputs"] if "data" in out]
    link = f"[The notebook]({GITHUB}docs/notebooks/{path.name}), run on a CPU."
    head, _, rest = "\n\n".join(parts).partition("\n\n")
    return f"{head}\n\n{link}\n\n{rest}\n"


def results() -> str:
    return "\n".join([
        "# Results",
        "",
        "[The whole report](results/index.html): roofline, peers, scaling, published figures of other platforms, every case, "
        "losses included. It is drawn from `benchmarks/results` by `tilewright report`.",
        "",
        "[![The roofline of the report](report.png)](results/index.html)",
        "",
    ])  # fmt: skip


def examples() -> str:
    lines = ["# Examples", "", "Small programs that use the library. Each says how to run it.", ""]
    for path in sorted((ROOT / "examples").rglob("*.py")):
        tree = ast.parse(path.read_text())
        told = ast.get_docstring(tree)
        if told and "test" not in path.name and path.name != "__init__.py":
            name = path.relative_to(ROOT).as_posix()
            lines += [
                f"## {re.split('[.:]', told)[0]}",
                "",
                f"[{name}]({GITHUB}{name})",
                "",
                f"```python\n{path.read_text().rstrip()}\n```",
                "",
            ]
    return "\n".join(lines)
