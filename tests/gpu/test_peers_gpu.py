"""The exchanges of ranks, on one GPU (ranks_as_streams.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120


@pytest.mark.alone
def test_ranks_as_streams_exchange_what_they_should() -> None:
    """In a process of its own, which ends even if they wait for ever, and beside no other: what
    waits for each other must be resident together.
    """
    script = Path(__file__).with_name("ranks_as_streams.py")
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.returncode == 0, found.stderr
