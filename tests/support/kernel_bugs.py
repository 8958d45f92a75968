"""Runs a kernel with a bug; small tensors for it."""

import linecache
import re

import pytest
import torch

from tilewright.interpret import KernelError, checking, interpret

zeros = torch.zeros


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bug(grid, kernel, args, what: str, block: tuple[int, ...], **options) -> KernelError:
    """Runs a kernel that has a line marked BUG, which the error must name."""
    with checking(**options), pytest.raises(KernelError, match=re.escape(what)) as caught:
        interpret(grid, kernel, args)
    error = caught.value
    file, line, function = error.places[0]
    assert "# BUG" in linecache.getline(file, line), linecache.getline(file, line)
    assert function
    assert error.block == block
    assert error.kernel == kernel._pyfunc.__name__
    text = str(error)
    assert f'File "{file}", line {line}' in text
    assert f"block {block} of {error.grid}" in text
    return error
