"""Runs code written for cuTile on a GPU on this machine's CPU, by `tilewright.interpret`.

Tensors for "cuda" are made on the CPU, and `ct.launch` interprets. Questions to a CUDA driver
(streams, compute capability, the signature of a launch) get fixed answers. This is not for
production: it exists to run other people's tests unchanged.
"""

import contextlib
import dataclasses
import sys
import types

import cuda.tile as ct
import torch
from cuda.tile import _cext, _compile, compilation
from torch.overrides import TorchFunctionMode

from tilewright.interpret import cutile
from tilewright.interpret.run import execute

ARCHITECTURE = (10, 0)


def on_cpu(value):
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(on_cpu, args), **kwargs)


class Stream:
    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, on_cpu(device))


def launch(stream, grid, kernel, args, /, *, programmatic_dependent_launch=None):
    if not isinstance(kernel, ct.kernel):
        raise TypeError(f"launch() kernel must be a tile kernel, got {type(kernel).__name__}")
    execute(kernel, tuple(grid), args)


def without_shapes(constraint):
    """The constraint in version 1 of the calling convention: nothing about extents of 1."""
    if not isinstance(constraint, compilation.ArrayConstraint):
        return constraint
    fields = {field.name: getattr(constraint, field.name) for field in dataclasses.fields(constraint)}
    return compilation.ArrayConstraint(**fields | {"shape_constant": None})


def signature_of(kernel, args, calling_convention, *, symbol=None):
    constraints = cutile.constraints_of(kernel, tuple(args), jit=True)
    if calling_convention == compilation.CallingConvention.cutile_python_v1():
        constraints = [without_shapes(c) for c in constraints]
    made = compilation.KernelSignature(constraints, calling_convention, symbol)
    return made.with_mangled_symbol(cutile.python_function(kernel).__name__) if symbol is None else made


def replace_everywhere(old, new):
    """Rebinds every module-level name of cuda.tile from `old` to `new`."""
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("cuda.tile") and isinstance(m, types.ModuleType)]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def install():
    """Must run before the redirected code imports anything from cuda.tile."""
    replace_everywhere(ct.launch, launch)
    replace_everywhere(_cext.get_compute_capability, lambda: ARCHITECTURE)
    replace_everywhere(_compile.get_sm_arch, lambda *args: f"sm_{ARCHITECTURE[0]}{ARCHITECTURE[1]}")
    compilation.KernelSignature.from_kernel_args = staticmethod(signature_of)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.init = torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args, **kwargs: None
    torch.cuda.get_device_capability = lambda *args: ARCHITECTURE
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        multi_processor_count=4, major=ARCHITECTURE[0], minor=ARCHITECTURE[1], name="CPU", total_memory=1 << 33, L2_cache_size=1 << 25
    )
    torch.cuda.current_stream = torch.cuda.default_stream = torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.stream = contextlib.nullcontext
    torch.cuda.device = lambda *args: contextlib.nullcontext()
    torch.Generator = Generator
    CudaIsCpu().__enter__()
