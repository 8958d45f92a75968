"""Problems of real models and the odd sizes that break kernels: one file per op with three lists.

small   seconds in the interpreter: odd, prime, tiny, ragged. CPU tests, and `verify` on a GPU with
        every config of the space.
real    shapes of real models: `verify` and tests/gpu.
bench   what `tilewright bench` times.
"""

from importlib import import_module
from types import ModuleType
from typing import Any


def cases(op: ModuleType, kind: str) -> list[Any]:
    """Problems of an op. kind: "small", "real" or "bench"."""
    module = import_module(f"{__name__}.{op.__name__.rpartition('.')[2]}")
    return list(getattr(module, kind))
