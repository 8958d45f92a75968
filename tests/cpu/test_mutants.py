"""The list of planted bugs fits the tree."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools/mutants.py")
mutants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: f"{m.file}: {' '.join(m.new.split())}")
def test_each_stands_in_one_place_and_its_tests_exist(mutant):
    text = (ROOT / "src/tilewright" / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} must hold once: {mutant.old!r}"
    assert mutant.old != mutant.new
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    for path in mutant.tests.partition(" -k ")[0].split():
        assert (ROOT / "tests" / path).is_file()


def test_there_are_enough_and_none_twice():
    assert len(mutants.MUTANTS) >= 80
    assert len({(m.file, m.old, m.new) for m in mutants.MUTANTS}) == len(mutants.MUTANTS)
