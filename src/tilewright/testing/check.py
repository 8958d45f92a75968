"""Runs one op on one problem and judges every output, for tests, verify, tuner and benchmark."""

import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..launch import Device, forced_config, traced
from .accuracy import Accuracy, assert_accurate
from .poison import embed, poisoned_empty


def op_name(op: ModuleType) -> str:
    """`rms_norm` of the module tilewright.ops.rms_norm."""
    return op.__name__.rpartition(".")[2]


def public_function(op: ModuleType) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(op, op_name(op))
    return function


def seeded_inputs(op: ModuleType, problem: Any, device: torch.device) -> dict[str, Any]:
    """The problem's inputs, the same on every run: the seed is a hash of the case's id."""
    torch.manual_seed(zlib.crc32(f"{op_name(op)}-{problem}".encode()))
    inputs: dict[str, Any] = problem.inputs(device)
    return inputs


def outputs(result: Any) -> list[Tensor]:
    """The tensors of a result that is one tensor or a tuple of them (None left out)."""
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def check_op(op: ModuleType, problem: Any, device: torch.device, config: Any = None) -> list[Accuracy]:
    """Runs the public function on poisoned memory and applies the accuracy rule to each output.

    Args:
        op: a module of `tilewright.ops`.
        problem: one of its Problems.
        device: where to run; a CPU interprets.
        config: the config to force; None uses the config of a user's call.
    Raises: AssertionError naming op, problem, config and the worst element.
    """
    inputs = seeded_inputs(op, problem, device)
    # Some results can't be compared as they are: codes with scales, indices. Their op says what can
    # be: `comparable(result, **inputs)`.
    comparable = getattr(op, "comparable", lambda result, **inputs: result)

    def referred(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        changed = _map(inputs, change)
        return outputs(comparable(op.reference(**changed), **changed))

    truth, theirs = referred(_double), referred(torch.clone)
    with poisoned_empty():
        ours = outputs(comparable(run_op(op, _map(inputs, embed), config), **inputs))
    what = f"{op_name(op)} {problem} {config if config is not None else 'default config'}"
    if not len(ours) == len(theirs) == len(truth):
        raise AssertionError(f"{what}: {len(ours)} outputs, reference has {len(truth)}")
    return [assert_accurate(o, t, w, f"{what} output {i}") for i, (o, t, w) in enumerate(zip(ours, theirs, truth, strict=True))]


def run_op(op: ModuleType, inputs: dict[str, Any], config: Any = None) -> Any:
    """Calls the public function, with `config` forced if one is given."""
    if config is None:
        return public_function(op)(**inputs)
    with forced_config(op.plan, config):
        return public_function(op)(**inputs)


class _Asked(Exception):
    """Ends a call where it would decide."""


def asked(op: ModuleType, problem: Any, device: Device) -> Any:
    """The problem that the op itself puts together for these inputs: what a call will look up.

    Sizes may be rounded up, such as a cache's length, and what only a benchmark knows is missing.
    The device may be one that cannot run it.
    """

    def end(wanted: Any, unused: Device) -> None:
        raise _Asked(wanted)

    try:
        with traced(device), torch.inference_mode():
            run_op(op, problem.inputs(torch.device("meta")), end)
    except _Asked as found:
        return found.args[0]
    return problem


def call_space(op: ModuleType, problem: Any, device: Device) -> Sequence[Any]:
    """The configs among which a call on these inputs chooses, the default of untuned ones first."""
    found: Sequence[Any] = op.space(asked(op, problem, device), device)
    return found


def _map(inputs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()
