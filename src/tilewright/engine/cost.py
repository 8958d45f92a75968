"""The least that a decode step must read: the floor of its time."""

import math

from .layers import Decoder
from .mlp import Experts
from .state import cache_bytes


def step_bytes(decoder: Decoder, batch: int, kv_len: int) -> int:
    """Bytes of weights and keys that one step of `batch` sequences with `kv_len` keys each reads,
    everything once. A mixture of experts counts the experts that so many tokens choose on average,
    if each chooses at random. With several ranks: the bytes of one.
    """
    weights = decoder.head.weight.nbytes
    for layer in decoder.layers:
        parts = [layer.attention.weight_bytes, layer.mlp.weight_bytes]
        if isinstance(layer.mlp, Experts):
            experts = layer.mlp.gate_up.nbytes + layer.mlp.down.nbytes
            missed = (1 - layer.mlp.top_k / len(layer.mlp.router.weight)) ** batch
            parts.append(-math.floor(missed * experts))
        weights += sum(parts)
    return weights + cache_bytes(decoder, batch, kv_len)
