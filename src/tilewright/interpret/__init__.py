"""The same kernel without a GPU: cuda-tile's own front end types it, and numpy runs the typed IR.

checking(races=True)      WHAT IS WATCHED
 `- interpret(grid, kernel, args)       run.py       specialisation, arguments
     |- Schedule.run                    schedule.py  which block next, deadlocks
     |- cutile.typed_ir                 cutile.py    the front end; cuda-tile's private names
     |- compile_program                 codegen.py   IR operation -> one Python statement
     |- Machine.load, .store, .atomic   memory.py    arrays, views, pointers, bounds
     |   `- Watch.access                checks.py    races; allocations.py: what nobody wrote
     `- fma, mma, reduce_with, ...      numerics.py  on values held as formats.py says
"""

from . import version as version  # first: on another cuda-tile, one clear sentence instead of a failed private import
from .errors import Deadlock, KernelError
from .run import checking, compiled_count, interpret, mark_uninitialised, source

__all__ = [
    "Deadlock",
    "KernelError",
    "checking",
    "compiled_count",
    "interpret",
    "mark_uninitialised",
    "source",
]
