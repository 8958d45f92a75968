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
    """One step. idea: what it changes, in one sentence. config: of the ladder's op, or a function
    of problem and device that returns it.

    published: names of the kernels, in bench/published, that others timed with the same ideas.
    why: what the change does to the GPU, in a few sentences. picture: of it, in characters.
    """

    name: str
    idea: str
    config: Any
    published: tuple[str, ...] = ()
    why: str = ""
    picture: str = ""

    def config_for(self, problem: Any, device: Device) -> Any:
        return self.config(problem, device) if callable(self.config) else self.config


@dataclass(frozen=True, slots=True)
class Ladder:
    """One problem and the steps that solve it. op: the steps are its configs; an op of the library,
    or a module of learn with the same names and one kernel for each config.

    problem: what a GPU is timed on. small: a problem for the same kernels that the interpreter
        computes quickly.
    library: the op that a user calls for this problem.
    """

    name: str
    op: ModuleType
    problem: Any
    small: Any
    steps: tuple[Step, ...]
    library: ModuleType

    def published(self, step: Step) -> list[Figure]:
        """What others measured at this step on exactly this problem.

        It is shown beside ours, never mixed in.
        """
        asked = self.problem if self.op is self.library else self.problem.for_library()
        row = {"op": op_name(self.library), "problem": plain(asked)}
        return [figure for figure in figures() if figure.kernel in step.published and figure.tflops() and figure.measures_the_same(row)]
