"""What a module computes, found out by calling it.

A stand-in is a copy of a module with the module's own code and small random weights. It is called
on random rows in float64, which shows the formula sharply, and then in the model's dtype beside our
kernel, under the accuracy rule. The module itself, its weights and PyTorch's random numbers stay
untouched.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error
from ..testing.accuracy import accuracy

ROWS = 6
SHARP = 1e-4  # of a result: code that works in fp32 inside is right to 1e-6; another formula is off by 1e-3
WIDTHS = (24, 40)  # of a stand-in's rows, and between its matrices: nothing that is an axis of theirs by chance
LARGE = 200.0  # of rows that meet a bound (7 in gpt-oss) which rows near 1 never do


def random(*shape: int, dtype: torch.dtype = torch.float64, device: Any = None, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same each time."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)


def rows(cols: int, seed: int = 0) -> Tensor:
    """Random rows, the last two of them large."""
    return random(ROWS, cols, seed=seed) * torch.tensor([1.0] * (ROWS - 2) + [LARGE] * 2).double()[:, None]


def stand_in(module: nn.Module, tensors: Mapping[str, Tensor], children: Mapping[str, nn.Module] | None = None) -> Any:
    """A copy of a module that holds these tensors and children in place of its own of these names.

    Methods that somebody replaced on the instance are those of its class again.
    """
    found = copy(module)
    parts = found.__dict__
    for group in ("_parameters", "_buffers"):
        parts[group] = {name: tensors.get(name, own) for name, own in parts[group].items()}
    parts["_modules"] = {**parts["_modules"], **(children or {})}
    parts.pop("forward", None)
    return found


def in_training(module: nn.Module, children: Mapping[str, nn.Module], x: Tensor) -> Any:
    """What a stand-in in training mode makes of x; None if it raises."""
    others = {name: deepcopy(child).train() for name, child in module._modules.items() if child is not None and name not in children}
    found = stand_in(module, {}, {**others, **children})
    found.training = True
    with torch.random.fork_rng(devices=()):
        return attempt(lambda: type(module).forward(found, x))


def looks(module: nn.Module) -> tuple[Any, ...]:
    """Modules that look the same compute the same: their code, their numbers, the shapes of what
    they hold, and the looks of the modules in them.
    """
    own = tuple((name, _look(value)) for name, value in module.__dict__.items() if not name.startswith("_") or isinstance(value, _PLAIN))
    held = tuple(
        (name, type(x), x.dtype, x.shape, x.device) for group in (module._parameters, module._buffers) for name, x in group.items() if x is not None
    )
    hooks = tuple(map(_Is, hooks_of(module)))
    return type(module), own, held, hooks, tuple((name, looks(child)) for name, child in module._modules.items() if child is not None)


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """What PyTorch calls before and after the module's forward."""
    return *module._forward_pre_hooks.values(), *module._forward_hooks.values()


_PLAIN = (str, int, float, bool, torch.dtype, torch.device, type(None))


def _look(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_look, value))
    return value if isinstance(value, _PLAIN) else _Is(value)


class _Is:
    """Equal to itself alone, whatever it holds."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def __hash__(self) -> int:
        return id(self._what)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self._what is other._what


def linear(wide: int, deep: int, bias: bool, *, dtype: torch.dtype, device: Any, seed: int) -> nn.Linear:
    """A matrix of a stand-in."""
    found = nn.Linear(deep, wide, bias=bias, device="meta")  # draws no random numbers
    found.weight = nn.Parameter(random(wide, deep, dtype=dtype, device=device, seed=seed) * deep**-0.5, requires_grad=False)
    if bias:
        found.bias = nn.Parameter(random(wide, dtype=dtype, device=device, seed=seed + 1), requires_grad=False)
    return found


def off(found: Any, expected: Tensor) -> float:
    """Error over norm of the worst row; infinite for what is no such tensor."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return float("inf")
    error = float(((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    return error if error == error else float("inf")


def same(found: Any, expected: Tensor) -> bool:
    """Whether a call in float64 found what a formula says."""
    return off(found, expected) <= SHARP


def why_not(ours: Callable[[], Tensor], theirs: Tensor | None, truth: Tensor) -> str | None:
    """Why our kernel may not take over, or None: it must take these arguments, and hold the
    accuracy rule.

    theirs: None if the module's own code failed.
    """
    if not isinstance(theirs, Tensor):
        return "its code fails on random rows in the model's dtype"
    try:
        found = ours()
    except (TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    if found.shape != theirs.shape or found.dtype != theirs.dtype:
        return f"it returns {theirs.dtype} {tuple(theirs.shape)}, ours {found.dtype} {tuple(found.shape)}"
    judged = accuracy(found, theirs, truth)
    return None if judged.ok else f"ours is less accurate than the module: {judged}"


@contextmanager
def own_numbers() -> Iterator[None]:
    """No gradients, and none of the caller's autocast: modules compute in their own dtype, as our
    kernels do.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def attempt(call: Callable[[], Any]) -> Any:
    """What a call of strange code returns; None if it raises."""
    try:
        return call()
    except Exception:  # whatever a model's code may do with arguments that it was not made for
        return None


def arguments_of(function: Any) -> list[str] | None:
    """Names of the positional arguments that a function needs, `self` left out; None if it has no
    signature.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return needed[1:] if needed[:1] == ["self"] else needed


def epsilons_of(module: nn.Module) -> list[str]:
    """Names of attributes that may be what a norm adds: small floats."""
    return [name for name, value in module.__dict__.items() if isinstance(value, float) and 1e-20 <= value <= 1e-2]


def model_outputs(model: Any) -> list[Tensor]:
    """What a model makes of a few random tokens, left-padded, and of one token behind each.

    Raises whatever the model raises.
    """
    embedding = model.get_input_embeddings()
    count, device = embedding.weight.shape[0], embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(count // 4, count, (2, 9), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    modes = [(module, module.training) for module in model.modules() if module.training]
    for module, _ in modes:
        module.training = False
    try:
        with own_numbers():
            first = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
            found = [_values(first)[0, 3:], _values(first)[1]]
            held = getattr(first, "past_key_values", None)
            if held is not None:
                second = model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=held, use_cache=True)
                found += list(_values(second))
    finally:
        for module, training in modes:
            module.training = training
    return found


def _values(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise argument_error("the model's output", "logits or last_hidden_state", type(output).__name__)


def far_apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The median error of a token, of the worst sequence.

    A median, since experts that tie may send one token elsewhere.
    """
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        errors = (mine.double() - other.double()).norm(dim=-1) / other.double().norm(dim=-1)
        value = float(errors.median())
        worst = max(worst, value if value == value else float("inf"))
    return worst
