"""What an engine asks of its device: the least bytes of a decode step, and room."""

import math
import os
from pathlib import Path

import torch

from .layers import Decoder
from .mlp import Experts
from .state import cache_bytes


def step_bytes(decoder: Decoder, batch: int, kv_len: int) -> int:
    """Bytes of weights and keys that one step of `batch` sequences with `kv_len` keys each reads,
    everything once. A mixture of experts counts the experts that so many tokens choose on average,
    if each chooses at random. With several ranks: the bytes of one.
    """
    weights = decoder.head.nbytes
    for layer in decoder.layers:
        parts = [layer.attention.weight_bytes, 0 if layer.mlp is None else layer.mlp.weight_bytes]
        if isinstance(layer.mlp, Experts):
            experts = layer.mlp.gate_up.nbytes + layer.mlp.down.nbytes
            missed = (1 - layer.mlp.top_k / len(layer.mlp.router.weight)) ** batch
            parts.append(-math.floor(missed * experts))
        weights += sum(parts)
    return weights + cache_bytes(decoder, batch, kv_len)


def memory(device: torch.device) -> tuple[int, int]:
    """Free bytes of a device, and all that it has.

    Of a CPU all count as free: what is refused for want of them can never fit.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
    group = Path("/sys/fs/cgroup/memory.max")  # of a container
    limit = group.read_text().strip() if group.exists() else "max"
    most = most if limit == "max" else min(most, int(limit))
    return most, most
