"""What `import tilewright` shows, and what its commonest mistakes say."""

import gc
import inspect
import os
import pydoc
import re
import subprocess
import sys
import warnings

import pytest
import torch

import tilewright
import tilewright.cli
from tilewright import ops
from tilewright.launch.environment import KNOWN, warn_of_unknown, warn_of_value
from tilewright.testing import public_function

BESIDE_OPS = {"Engine", "QuantizedExperts", "QuantizedWeight", "__version__", "compile_report", "interpret", "load", "patch", "testing"}


def test_the_docstring_lists_every_op_in_a_group_and_nothing_else():
    """The site's reference and gallery are made of these groups (tools/site.py)."""
    groups = tilewright.__doc__.split("\n\n")[1]
    listed = re.findall(r"\w+", re.sub(r"^.{18}", "", groups, flags=re.MULTILINE))
    own = {public_function(op).__name__ for op in ops.ALL} | {
        "cascade_decode",
        "grouped_gemm_list",
        "pack_kv",
        "unpack_kv",
        "QuantizedWeight",
        "QuantizedExperts",
    }
    assert sorted(listed) == sorted(own)


@pytest.fixture(scope="module")
def imported() -> subprocess.CompletedProcess[str]:
    """A new process that prints its names, then what the command line has imported that it need
    not.
    """
    code = (
        "import tilewright, sys; print(*(n for n in vars(tilewright) if not n.startswith('_'))); import tilewright.cli\n"
        "print(*(m for m in ('transformers', 'matplotlib', 'tilewright.models', 'tilewright.bench') if m in sys.modules))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"TILEWRIGHT_CHEK": "1"})


def test_dir_shows_the_ops_and_the_front_doors_and_nothing_else(imported: subprocess.CompletedProcess[str]) -> None:
    own = {public_function(op).__name__ for op in ops.ALL} | {"cascade_decode", "grouped_gemm_list", "pack_kv", "unpack_kv"}
    assert set(dir(tilewright)) == own | BESIDE_OPS
    for name in dir(tilewright):
        assert getattr(tilewright, name) is not None
    names, _ = imported.stdout.splitlines()
    assert imported.stderr.count("TILEWRIGHT_CHEK (TILEWRIGHT_CHECK is one)") == 1
    assert set(names.split()) - set(dir(tilewright)) == {"launch", "ops", "select"}  # packages of its own: Python puts them there


def test_no_heavy_import_before_a_verb_runs(imported: subprocess.CompletedProcess[str]) -> None:
    assert imported.stdout.splitlines()[1] == ""


def test_help_lists_every_name_by_group():
    text = pydoc.plain(pydoc.render_doc(tilewright)).partition("PACKAGE CONTENTS")[0]
    for name in set(dir(tilewright)) - {"__version__"}:
        assert name in text
    assert text.index("Matrix products") < text.index("Attention") < text.index("Your own kernels")


def test_variables_that_are_none_are_one_warning():
    known = [*KNOWN, "TILEWRIGHT_TEST_TOKENS", "PATH"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown(known)
    with pytest.warns(RuntimeWarning) as told:
        warn_of_unknown([*known, "tilewright_show_plan", "TILEWRIGHT_ZZZ"])
    assert len(told) == 1
    assert "is called TILEWRIGHT_ZZZ, tilewright_show_plan (TILEWRIGHT_SHOW_PLANS is one); they are" in str(told[0].message)


def test_a_value_that_means_nothing_is_a_warning(monkeypatch):
    """`off` switched the checks on, without a word."""
    ids, weight = torch.tensor([0]), torch.ones(2, 8)
    for value in ("", "0", "1"):
        monkeypatch.setenv("TILEWRIGHT_CHECK", value)
        tilewright.embedding(ids, weight)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "off")
    with pytest.warns(RuntimeWarning, match="TILEWRIGHT_CHECK must be 0 or 1, got 'off', which counts as 1"):
        tilewright.embedding(ids, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_value("TILEWRIGHT_SHOW_PLANS", "log")
    with pytest.warns(RuntimeWarning, match="TILEWRIGHT_SHOW_PLANS must be 0, 1 or log, got 'LOG', which counts as 1"):
        warn_of_value("TILEWRIGHT_SHOW_PLANS", "LOG")


def test_a_python_without_docstrings_is_one_sentence():
    """cuda-tile adds to its own, and raised a TypeError."""
    for given, mode in (("import tilewright", []), ("tilewright", ["-m"])):
        ended = subprocess.run([sys.executable, "-OO", *(mode or ["-c"]), given], capture_output=True, text=True)
        last = ended.stderr.splitlines()[-1]
        assert "Python must keep docstrings, which cuda-tile adds to: take -O or PYTHONOPTIMIZE=1, got -OO or PYTHONOPTIMIZE=2" in last
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) if mode else last.startswith("ImportError")


def test_interpret_is_a_package_that_can_be_called():
    from tilewright.interpret import checking, interpret

    assert tilewright.interpret.checking is checking
    assert tilewright.interpret.interpret is interpret
    assert callable(tilewright.interpret)
    assert next(iter(inspect.signature(tilewright.interpret).parameters)) == "kernel"


def test_a_transposed_weight_is_named_with_its_mend():
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    with pytest.raises(ValueError, match=r"b.stride\(-1\) must be 1, got 16, a transposed view: give .* or b.mT and the other trans_b"):
        tilewright.matmul(x, w.t())
    torch.testing.assert_close(tilewright.matmul(x, w.t().mT, trans_b=True), x @ w.t())


def test_without_transformers_each_front_door_says_what_to_install():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('transformers', 'gguf', 'safetensors')))\n"
        "import tilewright, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "for call in (lambda: tilewright.patch(model), lambda: tilewright.load('Llama-3.2-1B'), lambda: tilewright.Engine(model)):\n"
        "    try:\n        call()\n"
        "    except ModuleNotFoundError as error:\n        print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [f"tilewright.{name} needs transformers: pip install 'tilewright[models]'" for name in ("patch", "load", "Engine")]


def test_a_run_does_not_walk_its_objects_again_and_again_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilewright.cli, "app", lambda: None)
    before = gc.get_threshold()
    try:
        tilewright.cli.main()
        assert gc.get_threshold()[0] >= 1_000_000
    finally:
        gc.set_threshold(*before)
