"""ctinterp: run cuTile kernels on the CPU by executing their typed IR.

    from ctinterp import launch          # same signature as ct.launch
    launch(None, grid, kernel, args)     # CPU tensors -> interpreter, CUDA tensors -> ct.launch
"""
import collections
import contextlib
import itertools
import os
import random
import numpy as np
import cuda.tile as ct
from . import frontend, runtime, codegen
from .runtime import KernelError

_cache = {}
_uninit = {}
DEFAULTS = dict(debug=False, strict=True, races=False, order="forward",
                optimized=True, quantum=64)


class Deadlock(KernelError):
    pass


def mark_uninitialized(*tensors):
    """Reads of elements of these tensors before the kernels write them raise KernelError."""
    for t in tensors:
        b = runtime.array_view(t, "int64").ptr.buf
        _uninit[b.key] = np.zeros(len(b.raw), bool)


def _key(cons):
    def one(c):
        name = type(c).__name__
        if name == "ConstantConstraint":
            return type(c.value), repr(c.value)
        if name == "TupleConstraint":
            return tuple(map(one, c.items))
        return name, repr(c)
    return tuple(map(one, cons))


def prepare(kernel, args, debug=False, optimized=True):
    cons = frontend.constraints_of(kernel, args)
    key = (kernel._pyfunc, debug, optimized, _key(cons))
    if key not in _cache:
        block = frontend.typed_ir(kernel, cons, optimized and not debug)
        gen = codegen.Gen(block, kernel._pyfunc, debug)
        _cache[key] = gen.compile(), gen.coop
    return (*_cache[key], [f for v, c in zip(args, cons) for f in frontend.flat_values(v, c)])


def interpret(grid, kernel, args, **options):
    o = {**DEFAULTS, **options}
    fn, coop, flat = prepare(kernel, args, o["debug"], o["optimized"])
    grid = (tuple(grid) + (1, 1))[:3]
    blocks = list(itertools.product(*(range(g) for g in grid[::-1])))
    order = list(range(len(blocks)))
    if o["order"] == "reverse":
        order.reverse()
    elif o["order"] != "forward":
        random.Random(o["order"]).shuffle(order)
    M = runtime.Machine(grid, o["strict"], o["races"], _uninit)
    with np.errstate(all="ignore"):
        if not coop:
            for b in order:
                M.block, M.bid = b, blocks[b][::-1]
                _call(fn, M, flat)
            return
        live = collections.deque((b, fn(M, *flat)) for b in order)
        idle = 0
        while live:             # round robin at atomic operations: spin locks make progress
            b, g = live.popleft()
            M.block, M.bid = b, blocks[b][::-1]
            try:
                for _ in range(o["quantum"]):
                    next(g)
                live.append((b, g))
                idle += 1
            except StopIteration:
                idle = 0
            except Exception as e:
                _note(e, M)
                raise
            if idle > 1000 * (len(live) + 1):
                raise Deadlock(f"{len(live)} blocks spin on atomics without progress")


def _call(fn, M, flat):
    try:
        fn(M, *flat)
    except Exception as e:
        _note(e, M)
        raise


def _note(e, M):
    if hasattr(e, "add_note"):
        e.add_note(f"in block {tuple(M.bid)} of grid {tuple(M.grid)}")


def compiled_count():
    return len(_cache)


@contextlib.contextmanager
def checking(*, races=False, order="forward", strict=True):
    before = dict(DEFAULTS)
    DEFAULTS.update(races=races, order=order, strict=strict)
    try:
        yield
    finally:
        DEFAULTS.clear(), DEFAULTS.update(before)
