"""Examples that must run: docs/interpreter.md, and cuTile's documentation in the installed
package.
"""

import re
from pathlib import Path

from forked import script

ROOT = Path(__file__).parents[2]


def test_examples_of_the_installed_cuda_tile_print_what_they_say():
    tool = ROOT / "tools" / "conformance" / "doc_examples.py"
    done = script(tool)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed, 0 failed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 140


def test_the_example_of_our_own_documentation(tmp_path):
    text = (ROOT / "docs" / "interpreter.md").read_text()
    code, printed = re.search(r"```python\n([^`]*)```\n\nprints\n\n```\n([^`]*)```", text).groups()
    example = tmp_path / "example.py"
    example.write_text(code)
    done = script(example)
    assert done.stdout.replace(str(example), "example.py") == printed, done.stdout + done.stderr
