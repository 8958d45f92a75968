"""A ladder: the same problem solved step by step, each step one idea away from the one before."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..bench.published import Figure, figures
from ..launch import Device
from ..launch.table import plain
from ..testing import op_name


@dataclass(frozen=True, slots=True)
class Step:
    """idea: what it changes, in one sentence. config: of the ladder's op, or a function of problem and device that gives it.

    published: names of the kernels, in bench/published, that others timed with the same ideas.
    """

    name: str
    idea: str
    config: Any
    published: tuple[str, ...] = ()

    def config_for(self, problem: Any, device: Device) -> Any:
        return self.config(problem, device) if callable(self.config) else self.config


@dataclass(frozen=True, slots=True)
class Ladder:
    """op: what the steps are configs of: an op of the library, or a module of learn that looks like one and whose configs name a kernel each.

    problem: what a GPU is timed on. small: the same kernels on a size that an interpreter is quick with.
    library: the op that a user calls for this problem.
    """

    name: str
    op: ModuleType
    problem: Any
    small: Any
    steps: tuple[Step, ...]
    library: ModuleType

    def published(self, step: Step) -> list[Figure]:
        """What others measured at this step on this very problem; shown beside ours and never mixed with it."""
        asked = self.problem if self.op is self.library else self.problem.for_library()
        row = {"op": op_name(self.library), "problem": plain(asked)}
        return [figure for figure in figures() if figure.kernel in step.published and figure.tflops() and figure.measures_the_same(row)]
