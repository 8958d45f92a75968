"""Which sums over shares of k a call may leave to the next one, and what that one then reads."""

import pytest
import torch

from tilewright.engine.program import Call, StepBuffers
from tilewright.engine.shares import in_shares
from tilewright.launch import forced_config
from tilewright.ops import quantized_matmul as op
from tilewright.ops.common.weight_formats import QuantizedWeight
from tilewright.ops.kv_append import kv_append_out
from tilewright.ops.quantized_matmul import quantized_matmul_out

BF16, K = torch.bfloat16, 256
SPLIT = op.Config(8, 64, split_k=2, pieces=True)


def weight(n: int) -> dict[str, object]:
    found = QuantizedWeight.of(torch.randn(n, K, dtype=BF16), "int4-128").arguments
    return {name: found.get(name) for name in ("words", "scales", "zeros", "factor", "weight_format")}


def product(out: torch.Tensor, **more: object) -> Call:
    options = {"eps": 1e-6, "weight_offset": 0.0, "gelu_tanh": False, "new_residual": None}
    return Call.of("product", quantized_matmul_out, **{"x": torch.randn(len(out), K).to(BF16), **weight(out.shape[1]), **options, "out": out, **more})


def buffers(batch: int) -> StepBuffers:
    return StepBuffers(batch, 1, torch.zeros(batch, 1, dtype=torch.int32), torch.ones(batch, dtype=torch.int32), 8, BF16, torch.device("cpu"))


def test_the_last_addend_of_the_stream_is_summed_for_who_reads_it_behind_the_calls() -> None:
    out, stream = torch.zeros(2, K, dtype=BF16), torch.zeros(2, K, dtype=BF16)
    reader = product(torch.zeros(2, 64, dtype=BF16), x=stream, norm=torch.ones(K, dtype=BF16), residual=out, new_residual=torch.zeros_like(stream))
    writes, reads = product(out), product(torch.zeros(2, 64, dtype=BF16), x=out)
    for rest, left in (([], False), ([writes], True), ([reads], False), ([reads, writes], False)):
        with forced_config(op.plan, SPLIT):
            found = in_shares([product(out), reader, *rest], buffers(2))
        assert (found[0].arguments["out"].shape == (2, 2, K)) == left, rest
        assert (found[1].arguments["residual"].shape == (2, 2, K)) == left


@pytest.mark.parametrize("batch", [1, 2])
def test_shares_of_queries_lie_where_the_cache_reads_them(batch: int) -> None:
    """One sequence too: the stride of an axis of one is any number."""
    heads, dim, out = (2, 1, 1), 64, torch.zeros(batch, K, dtype=BF16)
    torch.manual_seed(batch)
    first = product(out)
    rows = out.view(batch, 1, 4, dim).transpose(1, 2)
    q, k, v = (part.as_strided(part.shape, (part.stride(0) if batch > 1 else 7, *part.stride()[1:])) for part in rows.split(heads, dim=1))
    found = []
    for change in (lambda calls, buffers: list(calls), in_shares):
        caches = torch.zeros(2, batch, 1, 8, dim, dtype=BF16)
        own = {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "q": q}
        options = {"positions": torch.zeros(batch, 1, dtype=torch.int32), "interleaved": False, "eps": 1e-6, "round_before_weight": False}
        with forced_config(op.plan, SPLIT):
            calls = change([first, Call.of("cache", kv_append_out, **own, **options)], buffers(batch))
            for call in calls:
                call()
        rotated = calls[1].arguments["rotated"]
        found.append((caches, (q if rotated is None else rotated).clone()))
        assert (calls[1].arguments["k"].shape[0] == 2 * batch) == (change is in_shares)
    for before, behind in zip(*found, strict=True):
        assert before.any()
        assert torch.equal(before, behind)
