"""Runs a kernel with a bug, or with every check; what such kernels share."""

import linecache
import re

import cuda.tile as ct
import pytest
import torch

from tilewright.interpret import KernelError, checking, interpret

ACQUIRE, RELEASE, RELAXED = ct.MemoryOrder.ACQUIRE, ct.MemoryOrder.RELEASE, ct.MemoryOrder.RELAXED

zeros = torch.zeros


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bug(grid, kernel, args, what: str, block: tuple[int, ...], **options) -> KernelError:
    """Runs a kernel that has a line marked BUG, which the error must name."""
    with checking(**options), pytest.raises(KernelError, match=re.escape(what)) as caught:
        interpret(kernel, grid, args)
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


def run_with_everything(blocks, kernel, arguments, **options):
    """Every check there is, blocks in the usual order unless an option says otherwise."""
    with checking(races=True, uninitialised=True, unwritten=True, strict_bounds=True, **options):
        held = tuple(make() for make in arguments)  # an output that somebody holds
        interpret(kernel, (blocks,), held)


def rows(*shape):
    return lambda: zeros(*shape)


def ints(*shape):
    return lambda: integers(*shape)


def lock(locks, i):
    while ct.atomic_cas(locks, i, 0, 1, memory_order=ACQUIRE) == 1:
        pass


def unlock(locks, i):
    ct.atomic_xchg(locks, i, 0, memory_order=RELEASE)


def add_one(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,)) + 1)
