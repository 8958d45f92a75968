"""What a `with` block sets for the calls inside it: forced configs, listeners, the traced device.

One ContextVar for all, so that a call asks once. Each thread and each asyncio task has a value of
its own: a config that is forced in one thread is not seen by another.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Context:
    """What a `with` block has set.

    forced: config by the `plan` function it is for.
    on_choice: called with each choice. on_launch: called with each launch and its arguments.
    device: what meta tensors are traced for.
    """

    forced: Mapping[Callable[..., Any], Any] = field(default_factory=dict)
    on_choice: tuple[Callable[[Any], None], ...] = ()
    on_launch: tuple[Callable[[Any, dict[str, Any]], None], ...] = ()
    device: Any = None


CONTEXT: ContextVar[Context | None] = ContextVar("tilewright", default=None)  # None outside of all such blocks
_NOTHING = Context()


@contextmanager
def changed(change: Callable[[Context], dict[str, Any]]) -> Iterator[None]:
    """Sets fields within the block. `change` makes them from the outer context."""
    before = CONTEXT.get() or _NOTHING
    token = CONTEXT.set(replace(before, **change(before)))
    try:
        yield
    finally:
        CONTEXT.reset(token)


def traced_device() -> Any:
    """The device of meta tensors. Raises ValueError outside of `traced`."""
    context = CONTEXT.get()
    if context is None or context.device is None:
        raise ValueError(
            "device of the tensors must be cpu or cuda, got meta, which holds no values: move them, "
            'or call inside `with tilewright.launch.traced(Device.named("H200"))`, which only records the launches'
        )
    return context.device


def is_tracing() -> bool:
    """Whether meta tensors are traced."""
    context = CONTEXT.get()
    return context is not None and context.device is not None
