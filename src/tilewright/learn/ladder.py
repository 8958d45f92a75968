"""A ladder: the same problem solved step by step, each step one idea away from the one before."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """idea: what it changes, in one sentence. config: of the ladder's op."""

    name: str
    idea: str
    config: Any


@dataclass(frozen=True, slots=True)
class Ladder:
    """problem: what a GPU is timed on. small: the same kernel on a size that an interpreter is quick with.

    published: figures of others for this problem, with their hardware, as (step, text); shown beside ours and never mixed with them.
    """

    name: str
    op: ModuleType
    problem: Any
    small: Any
    steps: tuple[Step, ...]
    published: tuple[tuple[str, str], ...] = ()
