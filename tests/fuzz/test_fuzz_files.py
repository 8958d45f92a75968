"""Files of models with random damage, and that the driver finds what is wrong.

python tests/support/broken_files.py --seed 3 --seconds 600 runs more.
"""

from dataclasses import replace

import broken_files
import numpy as np
import pytest

from tilewright.models import ModelFileError


def test_broken_files_load_or_are_refused():
    counts, wrong = broken_files.run(0, most=800)
    assert not wrong
    assert min(counts.values()) > 100


def test_every_sound_file_loads(monkeypatch):
    monkeypatch.setattr(broken_files, "broken", lambda draw, name, content: content)
    counts, wrong = broken_files.run(0, most=40)
    assert (counts, wrong) == ({"refused": 0, "loaded": 40}, [])


FOLDER = {"folder": broken_files.sound()["folder"]}


def _other_weights(loaded):
    loaded.model.model.norm.weight.data[0] += 1
    return loaded


def _no_memory(loaded):
    return loaded, np.empty(2 * broken_files.BYTES, np.uint8)


def _hang(loaded):
    while True:
        pass


def _two_lines(loaded):
    error = ModelFileError("")
    error.args = (f"{loaded.source} must be\nright",)
    raise error


PLANTED = {
    "other values in model.norm.weight": _other_weights,
    "MemoryError": _no_memory,
    "TimeoutError": _hang,
    "must be\nright": _two_lines,
    "KeyError": lambda loaded: {}[loaded],
}


@pytest.mark.parametrize("message", PLANTED)
def test_what_is_wrong_is_found_and_its_line_repeats_it(message, monkeypatch, capsys):
    right = broken_files.load
    monkeypatch.setattr(broken_files, "SECONDS", 1)
    monkeypatch.setattr(broken_files, "broken", lambda draw, name, content: content)
    monkeypatch.setattr(broken_files, "sound", lambda: FOLDER)
    monkeypatch.setattr(broken_files, "load", lambda *given, **options: PLANTED[message](replace(right(*given, **options))))
    _, (line,) = broken_files.run(5, first=2, most=3)
    assert line.startswith("--seed 5 --case 2 (folder/")
    assert message in line
    assert line in capsys.readouterr().out
