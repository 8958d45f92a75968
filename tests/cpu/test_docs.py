"""README and docs are true: numbers come from the results, links, commands and snippets name what
exists.
"""

import ast
import importlib
import inspect
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import typer
from page_names import NAMES, NOT_RUN, ON_A_CPU, tiny_llama

import tilewright
from tilewright import QuantizedWeight, ops
from tilewright.bench.report import case_name
from tilewright.cli import app
from tilewright.launch.environment import KNOWN
from tilewright.models import CONFIGS
from tilewright.ops.common.weight_formats import FORMATS
from tilewright.testing import op_name
from tilewright.testing.cases import cases

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import tilings  # noqa: E402
from notebooks import output, run, written  # noqa: E402

GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, *sorted((ROOT / "notes").glob("*.md"))]
VERBS = typer.main.get_command(app).commands
EVERY_GUIDE = pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.name)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE) if found == language]


def test_numbers_in_the_readme_are_what_the_results_say(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["readme_numbers.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "readme_numbers.py"), run_name="__main__")
    assert not ended.value.code, capsys.readouterr().err


def test_the_page_of_the_ops_has_the_errors_of_its_formats():
    """On normally distributed weights; a change of how they are rounded makes the table stale."""
    weight, said = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)), {}
    for names, errors in re.findall(r"^\| (.*?) \|.*\| ([\d., ]+) % \|$", (ROOT / "docs" / "ops.md").read_text(), re.MULTILINE):
        formats = re.findall(r"`([a-z]+\d[\w-]*)`", names) or [f"int4-{group}-zeros" for group in (128, 64, 32)]
        said |= zip(formats, [*map(float, errors.split(", "))] * (len(formats) if "," not in errors else 1), strict=True)
    assert said.keys() == FORMATS.keys()
    assert {name: 100 * QuantizedWeight.of(weight, name).error(weight) for name in FORMATS} == pytest.approx(said, abs=0.1)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_name_files_that_exist(page):
    for path in re.findall(r"\b((?:docs|notes|tests|tools|benchmarks|src)/[\w/.-]+\.(?:md|py|jsonl(?:\.gz)?|txt))\b", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize(
    ("page", "folder"), [("engine.md", "engine"), ("megakernel.md", "engine/mega"), ("architecture.md", "ops/common")], ids=lambda name: name
)
def test_a_table_of_files_names_each_file_of_its_folder(page, folder):
    text = (ROOT / "docs" / page).read_text()
    files = [file.name for file in (ROOT / "src" / "tilewright" / folder).glob("*.py") if file.name != "__init__.py"]
    assert files
    assert not [name for name in files if not re.search(rf"[`/]{name}`", text)]


def test_every_environment_variable_is_explained():
    text = (ROOT / "docs" / "command-line.md").read_text()
    assert set(re.findall(r"^\| `(TILEWRIGHT_\w+)` \|", text, re.MULTILINE)) == set(KNOWN)


def test_the_source_names_pages_that_exist():
    for file in (ROOT / "src").rglob("*.py"):
        for path in re.findall(r"\((docs/[\w-]+\.md)", file.read_text()):
            assert (ROOT / path).exists(), f"{file.relative_to(ROOT)} names {path}"


def test_the_readme_leads_to_every_page_and_the_site_to_every_verb():
    text, site = (ROOT / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in text, f"README does not name docs/{page.name}"
        assert re.search(rf"\b{page.name}", site), f"mkdocs.yml has no docs/{page.name}"
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{notebook.stem}.md" in site, f"mkdocs.yml has no {notebook.name}"
    for verb in VERBS:
        assert f"| `tilewright {verb}" in (ROOT / "docs" / "command-line.md").read_text(), f"docs/command-line.md has no tilewright {verb}"


def test_the_readmes_links_are_whole_and_lead_to_what_is_there():
    """PyPI shows the README alone: a relative link is dead there."""
    text = (ROOT / "README.md").read_text()
    found = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.MULTILINE))
    used = {
        label or name
        for name, label in re.findall(r"\[([^\[\]]+)\](?:\[([\w-]+)\])?(?![(:\w])", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
    }
    assert found.keys() == used
    for url in found.values():
        here = re.fullmatch(
            r"https://(?:github.com/tilewright/tilewright/(?:blob|tree)|raw.githubusercontent.com/tilewright/tilewright)/main/(.+)", url
        )
        assert here is not None, url
        assert (ROOT / here[1]).exists(), url


def test_every_public_name_is_in_some_guide():
    text = "".join(page.read_text() for page in GUIDES)
    assert [name for name in tilewright.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", text)] == []
    assert [name for name in CONFIGS if f"`{name}`" not in (ROOT / "docs" / "models.md").read_text()] == []


@EVERY_GUIDE
def test_commands_in_code_blocks_parse(page):
    for line in "\n".join(blocks(page, "")).replace("\\\n", "").splitlines():
        if line.startswith("tilewright ") and "[" not in line:
            _, verb, *words = shlex.split(line, comments=True)
            VERBS[verb].make_context(verb, words)  # raises a usage error on what the verb doesn't take


@EVERY_GUIDE
def test_commands_in_sentences_name_verbs_and_options_that_exist(page):
    for verb, rest in re.findall(r"`(?:\w+=\w+ )?tilewright (\w+)([^`\n]*)`", page.read_text()):
        assert verb in VERBS, f"{page.name} names tilewright {verb}"
        known = {option for parameter in VERBS[verb].params for option in (*parameter.opts, *parameter.secondary_opts, "--help")}
        assert set(re.findall(r"(?<!\w)--[\w-]+", re.sub('"[^"]*"', "", rest))) <= known, f"{page.name}: tilewright {verb}{rest}"


def test_each_feature_of_the_reference_has_a_command_that_runs_as_written():
    rows = re.findall(r"^\| (?!feature \|)(.+?) \| (.+?) \| .+? \|$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    for feature, command in rows:
        found = re.findall(r"`tilewright (\w+) ?([^`]*)`", command)
        assert found or re.search(r"`tilewright\.(\w+)|the same|benchmarks/all.sh|docker build", command), feature
        for verb, rest in found:
            given = VERBS[verb].make_context(verb, shlex.split(rest)).params
            if given.get("case") and not given.get("suite"):
                chosen = [op for op in ops.ALL if op_name(op) in (given.get("ops") or [given.get("what")])]
                assert any(given["case"] in case_name(p) for op in chosen for p in cases(op, "bench")), (feature, given)


@EVERY_GUIDE
def test_snippets_call_what_exists_with_arguments_it_takes(page):
    names = {"tilewright": tilewright}
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "tilewright":
                module = importlib.import_module(node.module)
                names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
        for node in ast.walk(tree):
            called = _object(node.func, names) if isinstance(node, ast.Call) else None
            if called is not None and ... not in [getattr(a, "value", None) for a in (*node.args, *(k.value for k in node.keywords))]:
                keywords = {k.arg: None for k in node.keywords if k.arg}
                signature = inspect.signature(called)
                (signature.bind if len(keywords) == len(node.keywords) else signature.bind_partial)(*node.args, **keywords)


def _object(node, names):
    """The object of an expression like tilewright.rms_norm; None if it is not ours."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tilewright":
        return getattr(tilewright, node.attr)
    return None


def too_long(text: str) -> list[str]:
    """Lines of prose beyond 100 columns and table rows beyond 150, outside code fences and HTML
    comments.
    """
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in outside.splitlines() if not line.startswith("<!--")]
    return [line for line in lines if len(line) > (150 if line.startswith("|") else 100)]


WRITTEN = [ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *(page for page in PAGES if page.name != "LOG.md")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: p.name)
def test_lines_fit_beside_code(page):
    """Generated parts of a page too."""
    assert too_long(page.read_text()) == []


def test_lines_of_notebooks_fit_beside_code():
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert [line for cell in cells if cell["cell_type"] == "markdown" for line in too_long(cell["source"])] == [], path.name


def test_the_help_of_public_names_fits_beside_code():
    """Comments and other docstrings are held by ruff's W505."""
    for name in tilewright.__all__:
        found = getattr(tilewright, name)
        members = [found, *vars(found).values()] if inspect.isclass(found) else [found]
        for text in (inspect.getdoc(member) or "" for member in members if callable(member) or inspect.ismodule(member)):
            assert [line for line in text.splitlines() if len(line) > 100] == [], name
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "W" in lint["select"]
    assert lint["pycodestyle"]["max-doc-length"] <= 100


def test_long_lines_are_found():
    word = "x" * 101
    text = f"{word}\n```\n{word}\n```\n| {word} |\n<!-- {word} -->\n| {word}{word} |"
    assert too_long(text) == [word, f"| {word}{word} |"]


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")], ids=lambda p: p.name)
def test_code_runs_as_a_reader_would_run_it(page, tmp_path, monkeypatch, capsys):
    """From top to bottom in one session, on this CPU."""
    monkeypatch.chdir(tmp_path)
    found = NAMES.get(page.name, dict)() | {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python")):
        if (page.name, number) not in NOT_RUN:
            for there, here in ON_A_CPU.items():
                code = code.replace(there, here)
            output(code, f"{page.name}:{number}", found)


def test_every_public_name_has_an_example_that_is_run():
    """In a page, a notebook or a file of examples/, all of which are run by tests here or by
    tools/notebooks.py.
    """
    codes = [code for page in GUIDES for number, code in enumerate(blocks(page, "python")) if (page.name, number) not in NOT_RUN]
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        codes += [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    codes += [path.read_text() for path in (ROOT / "examples").rglob("*.py")]
    used = set()
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tilewright":
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "tilewright":
            used |= {alias.name for alias in node.names}
    assert set(tilewright.__all__) - used == {"__version__"}  # tilewright --version prints it


def test_what_is_not_run_is_there():
    for page, number in NOT_RUN:
        assert number < len(blocks(ROOT / "docs" / page, "python")), f"{page} has no block {number}"


@pytest.mark.parametrize("name", ["first-kernel", "softmax-and-a-race", "gemm", "patch-a-model", "engine", "profile"])
def test_a_notebook_holds_the_outputs_of_a_run(name):
    """The other compiles for 40 s where nothing is cached: `python tools/notebooks.py --check`."""
    path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    assert written(run(json.loads(path.read_text()), name)) == path.read_text()


@pytest.mark.parametrize("name", ["torch_compile", "transformers_model"])
def test_an_example_runs(name, monkeypatch, capsys, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search("the same result|stock transformers: True", capsys.readouterr().out)


def test_the_example_of_transformers_serve_patches_what_it_loads(monkeypatch, capsys):
    from transformers.cli import transformers as command
    from transformers.cli.serving.model_manager import ModelManager

    started = []
    monkeypatch.setattr(ModelManager, "_load_model", lambda *args, **more: tiny_llama())
    monkeypatch.setattr(command, "app", started.append)
    monkeypatch.setattr(sys, "argv", ["transformers_serve.py", "FOLDER", "--port", "1"])
    runpy.run_path(str(ROOT / "examples" / "transformers_serve.py"), run_name="__main__")
    assert started == [["serve", "FOLDER", "--port", "1"]]
    assert ModelManager._load_model(None).config._attn_implementation == "tilewright"
    assert "on tilewright kernels" in capsys.readouterr().err


def test_an_op_in_a_package_of_ones_own(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "own_op" / "src"))
    tests = runpy.run_path(str(ROOT / "examples" / "own_op" / "tests" / "test_scaled_add.py"))
    for name, test in tests.items():
        if name.startswith("test_"):
            test()


def test_the_tiling_pictures_are_what_the_interpreter_sees():
    committed = {found["op"]: found for found in json.loads(tilings.FILE.read_text())}
    assert committed.keys() == {*map(op_name, ops.ALL), "cascade_decode"}, "run python tools/tilings.py"
    for found in (tilings.tiling(ops.softmax), tilings.cascade()):
        assert json.loads(json.dumps(found)) == committed[found["op"]], "run python tools/tilings.py"
    for found in committed.values():
        ElementTree.fromstring(tilings.svg(found))
        assert str(tuple(found["block"])) in tilings.caption(found)


def test_elements_become_rectangles():
    elements = np.array([3, 4, 13, 14, 40, 41, 42])  # of rows of 10
    assert tilings.rectangles(elements, 10) == [(0, 3, 2, 2), (4, 0, 1, 3)]
