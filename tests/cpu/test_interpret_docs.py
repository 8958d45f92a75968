"""Examples that must run: docs/interpreter.md, and cuTile's documentation in the installed
package.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_examples_of_the_installed_cuda_tile_print_what_they_say():
    tool = ROOT / "tools" / "conformance" / "doc_examples.py"
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed, 0 failed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 140


def test_the_example_of_our_own_documentation(tmp_path):
    text = (ROOT / "docs" / "interpreter.md").read_text()
    code, printed = re.search(r"```python\n([^`]*)```\n\nprints\n\n```\n([^`]*)```", text).groups()
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.replace(str(script), "example.py") == printed, done.stdout + done.stderr
