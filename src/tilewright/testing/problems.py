"""Problems from elsewhere than the cases: of a model's layers, of a file, of what an application asked for. Tuner and benchmark take them."""

import dataclasses
import enum
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import ops
from ..launch import Device, decisions, traced
from ..launch.table import op_of
from ..models.configs import CONFIGS
from .check import op_name

Task = tuple[ModuleType, Any]  # an op and one of its Problems

STEPS = (1, 2, 4, 8, 16, 32, 64)  # tokens of a decode step: one of each sequence
PROMPTS = (128, 512, 2048, 8192)  # tokens of a prompt
CONTEXTS = (1024, 4096, 16_384)  # keys that a decode step finds


def of_model(name: str, device: Device) -> list[Task]:
    """What the layers of a model ask of the ops, in decode steps and for prompts, found by calling the ops on meta tensors.

    Args:
        name: a key of models.configs.CONFIGS.
        device: the GPU that they are for.
    Raises: KeyError naming the known models.
    """
    if name not in CONFIGS:
        raise KeyError(f"model must be one of {', '.join(CONFIGS)}, got {name!r}")
    config = CONFIGS[name]
    hidden, inter, vocab, heads = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"))
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    bias = config["model_type"] == "qwen2"

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def linear(tokens: int, n: int, k: int, *, bias: bool = False) -> None:
        ops.matmul.matmul(empty(tokens, k), empty(n, k), empty(n) if bias else None, trans_b=True)

    with traced(device), decisions() as found, torch.inference_mode():
        for tokens in (*STEPS, *PROMPTS):
            batch, length = (tokens, 1) if tokens in STEPS else (1, tokens)
            ops.embedding.embedding(torch.empty(batch, length, dtype=torch.int64, device="meta"), empty(vocab, hidden))
            ops.rms_norm.rms_norm(empty(tokens, hidden), empty(hidden), round_before_weight=True)
            ops.rms_norm.rms_norm(empty(tokens, hidden), empty(hidden), round_before_weight=True, residual=empty(tokens, hidden))
            linear(tokens, heads * head_dim, hidden, bias=bias)
            linear(tokens, kv_heads * head_dim, hidden, bias=bias)
            q, k = (empty(batch, length, h * head_dim).view(batch, length, h, head_dim).transpose(1, 2) for h in (heads, kv_heads))
            ops.rope.rope(q, k, empty(batch, length, head_dim // 2), empty(batch, length, head_dim // 2))
            linear(tokens, hidden, heads * head_dim)
            linear(tokens, inter, hidden)
            ops.silu_mul.silu_mul(empty(tokens, inter), empty(tokens, inter))
            linear(tokens, hidden, inter)
            if tokens in STEPS:
                lengths = torch.empty(batch, dtype=torch.int32, device="meta")
                for context in CONTEXTS:
                    cache = empty(batch, kv_heads, context, head_dim)
                    ops.attention_decode.attention_decode(empty(batch, heads, 1, head_dim), cache, cache, lengths)
                linear(tokens, vocab, hidden)
                ops.argmax.argmax(empty(tokens, vocab))
            else:
                kv = empty(1, kv_heads, length, head_dim)
                ops.attention.attention(empty(1, heads, length, head_dim), kv, kv)
    known = {op_name(op): op for op in ops.ALL}
    return list(dict.fromkeys((known[op_of(d.plan)], d.problem) for d in found))


def of_file(path: Path) -> list[Task]:
    """The problems of a file of JSON lines, each an object with `op` and `problem`: results of a benchmark, a log of decisions, or written by hand.

    Raises: ValueError naming file and line.
    """
    known = {op_name(op): op for op in ops.ALL}
    return list(dict.fromkeys(_parsed(path, known)))


def _parsed(path: Path, known: dict[str, ModuleType]) -> Iterator[Task]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if entry["op"] not in known:
                raise ValueError(f"op must be one of {', '.join(known)}, got {entry['op']!r}")
            op = known[entry["op"]]
            yield op, rebuilt(op.Problem, entry["problem"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} must be an object with op and problem: {type(error).__name__}: {error}") from None


def rebuilt(cls: type, plain: dict[str, Any]) -> Any:
    """The Problem whose fields these are, as JSON types; a field left out has its default."""
    hints = typing.get_type_hints(cls)
    return cls(**{name: _typed(hints[name], value) for name, value in plain.items()}) if dataclasses.is_dataclass(cls) else cls(**plain)


def _typed(hint: Any, value: Any) -> Any:
    kinds = [part for part in (hint, *typing.get_args(hint)) if isinstance(part, type)]
    chosen = next((kind for kind in kinds if issubclass(kind, enum.Enum)), None)
    if chosen and value is not None:
        return chosen[value] if isinstance(value, str) else chosen(value)
    if isinstance(value, str) and torch.dtype in kinds:
        return getattr(torch, value)
    return tuple(value) if isinstance(value, list) else value
