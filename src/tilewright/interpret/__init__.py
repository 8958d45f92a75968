"""Runs the same kernel without a GPU: cuda-tile's own front end types it, and numpy runs the typed
IR.

checking(races=True)      WHAT IS WATCHED
 `- interpret(kernel, grid, args)       api.py       checks; run.py: specialisation, arguments
     |- Schedule.run                    schedule.py  which block next, deadlocks
     |- cutile.typed_ir                 cutile.py    the front end; cuda-tile's private names
     |- compile_program                 codegen.py   IR operation -> one Python statement
     |- Machine.load, .store, .atomic   memory.py    arrays, views, pointers, bounds
     |   |- Past.look                   past.py      what a block sees that looks late
     |   `- Watch.access                checks.py    races; allocations.py: what nobody wrote
     |   `- Recorder                    trace.py     what each block did; trace_page.py: drawn
     `- fma, mma, reduce_with, ...      numerics.py  on values held as formats.py says

The module can be called: `tilewright.interpret(kernel, grid, args)` is `interpret` in it, and
`help(tilewright.interpret.interpret)` describes its arguments.
"""

import inspect
import sys
from types import ModuleType

from . import version as version  # first: on another cuda-tile, one clear sentence instead of a failed private import
from .api import interpret
from .errors import Deadlock, KernelError
from .run import checking, compiled_count, mark_uninitialised, source
from .trace import Trace

__all__ = [
    "Deadlock",
    "KernelError",
    "Trace",
    "checking",
    "compiled_count",
    "interpret",
    "mark_uninitialised",
    "source",
]


class _Called(ModuleType):
    __call__ = staticmethod(interpret)
    __signature__ = inspect.signature(interpret)


sys.modules[__name__].__class__ = _Called
