"""What README and docs say holds: numbers come from the results, links and paths lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notes").glob("*.md"))]


def test_numbers_in_the_readme_are_what_the_results_say():
    run = subprocess.run([sys.executable, "tools/readme_numbers.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_name_files_that_exist(page):
    for path in re.findall(r"\b((?:docs|notes|tests|tools|benchmarks|src)/[\w/.-]+\.(?:md|py|jsonl|txt))\b", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
