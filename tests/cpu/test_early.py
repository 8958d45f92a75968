"""A step's calls in forms whose memory is under way before the launch in front has ended."""

import math

import binaries
import pytest
import torch
from engine_models import tiny

from tilewright import attention_decode, kv_append
from tilewright.compile.job import Job
from tilewright.engine import Engine, early, programs
from tilewright.engine.append_attend import append_attend
from tilewright.engine.program import Call
from tilewright.engine.row_product import row_product
from tilewright.engine.sampling import LIKELIEST
from tilewright.engine.shares import in_shares
from tilewright.launch import Device, forced_config, traced
from tilewright.models.quantized import quantize
from tilewright.ops import quantized_matmul, rms_norm
from tilewright.ops.matmul import matmul_out
from tilewright.ops.rms_norm_matmul import rms_norm_matmul_out
from tilewright.testing import assert_accurate

H200, CPU = Device.named("H200"), torch.device("cpu")


def randn(*shape: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def heads_of(row: torch.Tensor, dim: int, *counts: int) -> list[torch.Tensor]:
    return [x.view(len(x), 1, -1, dim).transpose(1, 2) for x in row.split([count * dim for count in counts], 1)]


@pytest.mark.parametrize(
    ("dim", "norms", "position", "keys", "shares"),
    [(64, False, 0, 256, 1), (64, True, 127, 128, 1), (64, False, 200, 256, 1), (128, True, 100, 128, 1), (64, True, 90, 128, 3)],
)
def test_append_and_attention_are_those_of_the_ops(dim: int, norms: bool, position: int, keys: int, shares: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(shares, 8 * dim) if shares > 1 else randn(1, 8 * dim)
    row, caches = rows.sum(0, keepdim=True).bfloat16(), [randn(1, 2, 512, dim)[:, :, :keys] for _ in range(2)]
    for cache in caches:
        cache[:, :, position:] = math.nan
    cos, sin = torch.rand(2, 300, dim // 2)
    weights = (randn(dim), randn(dim)) if norms else (None, None)
    places, rotation = torch.tensor([[position]], dtype=torch.int32), {"cos": cos, "sin": sin}
    wanted, found = ([x.clone() for x in (row, *caches)] for _ in range(2))
    q, k, v = heads_of(wanted[0], dim, 4, 2, 2)
    kv_append(k, v, *wanted[1:], positions=places, q=q, **rotation, q_norm=weights[0], k_norm=weights[1], eps=1e-6)
    attended = attention_decode(q, *wanted[1:], kv_len=places[0] + 1, scale=0.1)
    before, (q, k, v) = rows.clone(), heads_of(rows, dim, 4, 2, 2)
    out = torch.empty_like(attended)
    append_attend(q, k, v, *found[1:], places, cos, sin, *weights, out, 0.1, 1e-6, False)
    assert torch.equal(rows, before)
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(found[1:], wanted[1:], strict=True))
    assert torch.allclose(out.float(), attended.float(), atol=2**-7 * attended.abs().max().item())


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("how", ["residual", "bias and silu_mul", "onto"])
def test_a_product_of_a_row_is_that_of_the_op(norm: bool, how: str) -> None:
    torch.manual_seed(0)
    n, k = 64, 1536 if how == "onto" else 512
    x, more, weight, b, bias, onto = randn(1, k), randn(1, k), randn(k), randn(n, k) * k**-0.5, randn(n), randn(1, n)
    silu_mul, given = "silu_mul" in how, {"bias": bias if "bias" in how else None, "residual": more if how == "residual" else None}
    out = torch.empty(1, n // 2 if silu_mul else n, dtype=x.dtype)
    total = torch.empty_like(x) if how == "residual" else None
    added = onto if how == "onto" else None
    row_product(x, given["residual"], weight if norm else None, b, given["bias"], added, out, total, 1e-6, 0.5, silu_mul)

    def reference(dtype: torch.dtype) -> torch.Tensor:
        row, w, scale = x.to(dtype), b.to(dtype), weight.to(dtype)
        row = (x + more).to(dtype) if total is not None else row
        if norm:
            row = rms_norm.reference(row, scale, 1e-6, weight_offset=0.5)
        y = torch.nn.functional.linear(row, w, None if given["bias"] is None else bias.to(dtype))
        y = torch.nn.functional.silu(y[:, 0::2]) * y[:, 1::2] if silu_mul else y
        return y if added is None else y + onto.to(dtype)

    assert total is None or torch.equal(total, x + more)
    assert_accurate(out, reference(x.dtype), reference(torch.float64))


def test_a_step_writes_the_tokens_of_the_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launch of a layer fewer up to 256 keys, and with products in another form."""
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1, "intermediate_size": 512}
    model, found = tiny("qwen3", torch.bfloat16, **sizes), []
    prompt = torch.randint(3, 90, (126,), generator=torch.Generator().manual_seed(2)).tolist()
    for device in (Device.of(torch.empty(1)), H200):
        monkeypatch.setattr(programs, "early", lambda calls, unused, device=device: early.early(calls, device))
        with Engine(model, max_len=320) as engine:
            tokens = engine.generate([prompt], 4).tokens
            steps = engine._programs.step(1, LIKELIEST).calls
        found.append((tokens, [[call.op.__name__ for call in calls] for calls in steps.values()]))
    (plain, before), (forms, behind) = found
    assert forms == plain
    layer = ["row_product", "append_attend", "row_product", "row_product", "row_product"]
    assert behind[0] == ["embedding_out", *layer, "row_product", "argmax_out", "advance"]
    assert [calls.count("append_attend") for calls in behind] == [1, 1, 0]
    assert [len(calls) for calls in before] == [10, 10, 10]


@pytest.mark.parametrize(
    ("weights", "head"), [("int4-128", "row_product"), ("e4m3", "rms_norm_matmul_out"), ("int4-128,head=e4m3", "quantized_matmul_out")]
)
def test_a_head_is_read_by_plain_loads_where_l1_is_left(weights: str, head: str) -> None:
    """Llama-3.1-8B, e4m3: 302 us where e4m3 weights leave 28 KB of an SM to L1, 240 by TMA."""
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1, "intermediate_size": 512}
    with Engine(tiny("qwen3", torch.bfloat16, **sizes), max_len=64, weights=weights) as engine:
        state = engine._state
        calls = list(engine.decoder.head_calls(state.buffers(1)))
        body = list(engine.decoder.body_calls(state.buffers(1), state.tokens[:1], state.caches))
        (found,) = (call for call in early.early([*body, *calls], H200) if call.name == "head")
    assert found.op.__name__ == head


@pytest.mark.parametrize(("max_len", "attention"), [(256, "append_attend"), (512, "attend_splits")])
def test_attention_sums_the_shares_that_q_k_and_v_come_in(max_len: int, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch less of a layer than where the product sums them, and the same tokens."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 384}
    split = quantized_matmul.Config(8, 64, split_k=2, pieces=True)

    def config(p: quantized_matmul.Problem, device: Device) -> quantized_matmul.Config:
        return split if (p.m, p.n, p.k) == (1, 8 * 64, 256) else quantized_matmul.DECISION.decide(p, device)[0]

    model, found = tiny("qwen3", torch.bfloat16, **sizes), []
    quantize(model, "int4-128", undoable=False)
    prompt = torch.randint(3, 90, (5,), generator=torch.Generator().manual_seed(2)).tolist()
    monkeypatch.setattr(programs, "early", lambda calls, unused: early.early(calls, H200))
    for left in (in_shares, lambda calls, buffers: list(calls)):
        monkeypatch.setattr(programs, "in_shares", left)
        with forced_config(quantized_matmul.plan, config), Engine(model, max_len=max_len) as engine:
            tokens = engine.generate([prompt], 4).tokens
            calls = engine._programs.step(1, LIKELIEST).calls[max_len]
        attend = [call for call in calls if call.op.__name__ == attention]
        assert [len(call.arguments["q"]) for call in attend] == [2 if left is in_shares else 1] * 2
        found.append(tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    [
        ("llama", {"head_dim": 64}, {"cache": "paged"}),
        ("llama", {"head_dim": 64}, {"kv_dtype": "fp8"}),
        ("llama", {"head_dim": 64}, {"max_batch": 2}),
        ("llama", {"head_dim": 32}, {}),
        ("gemma2", {"head_dim": 64}, {}),
        ("glm", {"head_dim": 64}, {}),
    ],
    ids=["pages", "codes", "two sequences", "short heads", "a softcap", "half of the columns turned"],
)
def test_other_calls_stay_as_they_are(name: str, sizes: dict, how: dict) -> None:
    with Engine(tiny(name, torch.bfloat16, **sizes), **{"max_len": 256, **how}) as engine:
        batch, state = engine.max_batch, engine._state
        calls = list(engine.decoder.body_calls(state.buffers(batch), state.tokens[:batch], state.caches))
        assert early.early(calls, H200) == calls
        assert early.early(calls, Device.named("B200")) == calls


@pytest.mark.parametrize(("name", "max_len"), [("llama", 512), ("gpt_oss", 256)], ids=["many keys", "sinks"])
def test_calls_that_are_attended_in_splits(name: str, max_len: int) -> None:
    with Engine(tiny(name, torch.bfloat16, head_dim=64), max_len=max_len) as engine:
        calls = engine.decoder.body_calls(engine._state.buffers(1), engine._state.tokens[:1], engine._state.caches)
        found = [call.op.__name__ for call in early.early(calls, H200)]
        assert (found.count("attend_splits"), found.count("append_attend")) == (len(engine.decoder.layers), 0)


def test_a_sum_that_two_norms_read_is_left_to_them() -> None:
    x, y, weight, w = randn(1, 512), torch.empty(1, 512, dtype=torch.bfloat16), randn(512), randn(512, 512)
    norm = {"x": x, "b": w, "bias": None, "weight": weight, "residual": y, "new_residual": torch.empty_like(x), "silu_mul": False}
    how = {"eps": 1e-6, "weight_offset": 0.0}
    product = Call.of("down", matmul_out, a=x, b=w, out=y, trans_a=False, trans_b=True, tf32=False, silu_mul=False)
    readers = [Call.of(name, rms_norm_matmul_out, **norm, **how, out=torch.empty_like(x)) for name in "ab"]
    joined, reader = early.early([product, readers[0]], H200)
    assert (joined.arguments["onto"] is x, reader.arguments["residual"]) == (True, None)
    apart = early.early([product, *readers], H200)
    assert [call.arguments["residual"] is y for call in apart] == [False, True, True]
    assert apart[0].arguments["out"] is y


def test_binaries_do_not_spill_and_wait_behind_their_first_loads() -> None:
    meta = torch.device("meta")
    with traced(H200) as launches, torch.inference_mode():
        for dim, norms in ((64, False), (128, True)):
            q, k, v = heads_of(randn(1, 48 * dim, device=meta), dim, 32, 8, 8)
            cache, table = randn(1, 8, 16384 // dim, dim, device=meta), torch.empty(1024, dim // 2, device=meta)
            places, weight = torch.empty(1, 1, dtype=torch.int32, device=meta), randn(dim, device=meta) if norms else None
            append_attend(q, k, v, cache, cache.clone(), places, table, table.clone(), weight, weight, q.clone(), 0.1, 1e-6, True)
        for n, k, norm in ((16384, 2048, True), (2048, 8192, False), (6144, 1024, True), (5120, 2560, True)):
            x, out = randn(1, k, device=meta), randn(1, n // 2 if norm else n, device=meta)
            weight, onto = (randn(k, device=meta), None) if norm else (None, randn(1, n, device=meta))
            row_product(x, None, weight, randn(n, k, device=meta), None, onto, out, None, 1e-6, 0.0, norm)
    for launch in launches:
        assert launch.launch.pdl
        made = binaries.made(Job.of(launch, "sm_90"))
        assert made.ok
        found = made.resources
        assert found.stack_bytes == 0
        product = launch.launch.name == "row_product_kernel"
        assert not product or found.registers <= 128
        assert (found.count("PREEXIT"), found.count("ACQBULK")) == (1, 1 if product else 2)
