"""What an `Engine` refuses before it changes the model."""

from typing import Any

from ..launch import Device, argument_error, check_integers
from ..models.shard import Shard, shard_of
from .mega.pack import refuse_model
from .parallel import Group

HELD = "tilewright_engine"  # the attribute of a model that an engine holds


def check_positive(**sizes: int) -> None:
    check_integers(**sizes)
    for name, value in sizes.items():
        if value < 1:
            raise argument_error(name, "at least 1", value)


def check_model(model: Any, group: Group | None) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if HELD in model.__dict__:
        raise argument_error("model", "without an engine", "one that another Engine holds: close() that one first")
    wanted, held = Shard() if group is None else group.shard, shard_of(model)
    if held != wanted:
        raise argument_error("model", f"loaded with {wanted}, as this engine's group is", held)


def check_mode(mode: str, model: Any, max_batch: int, group: Group | None) -> None:
    if mode not in ("eager", "graph", "mega"):
        raise argument_error("mode", '"eager", "graph" or "mega"', repr(mode))
    if mode == "graph" and model.device.type != "cuda":
        raise argument_error("mode", '"eager" on a CPU: a CUDA graph needs an NVIDIA GPU', '"graph"')
    if mode == "mega":
        if group is not None:
            raise argument_error("mode", '"eager" or "graph" with a group', '"mega"')
        if max_batch != 1:
            raise argument_error("max_batch", '1 with mode="mega"', max_batch)
        refuse_model(model, Device.of(next(model.parameters())))
