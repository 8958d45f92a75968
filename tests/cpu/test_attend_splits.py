"""One token's append and its attention over KV splits in one launch (engine/attend_splits.py)."""

from typing import Any

import binaries
import pytest
import torch
from engine_models import tiny
from split_attention import KEYS, compared, heads_of

from tilewright.compile.job import Job
from tilewright.engine import Engine, attend_splits, early, programs
from tilewright.engine.attend_splits import Form, form_of, reach_of
from tilewright.engine.program import Call
from tilewright.engine.sampling import LIKELIEST
from tilewright.launch import Device, traced
from tilewright.ops.attention_decode import attention_decode_out
from tilewright.ops.kv_append import kv_append_out

H200, META = Device.named("H200"), torch.device("meta")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("position", [0, 63, 64, 200, 511])
@pytest.mark.parametrize("form", [Form(4, 64), Form(8, 64), Form(1, 128)], ids=["two tiles", "one tile", "one split"])
def test_it_does_what_the_ops_do(form: Form, position: int) -> None:
    """Splits of several tiles, of one and of none; positions at the ends of tiles."""
    compared(8, 2, 64, position, form)


@pytest.mark.parametrize(
    ("heads", "dim", "form", "options"),
    [
        (8, 128, Form(4, 64), {"norms": True}),
        (16, 64, Form(4, 64), {"norms": True, "sinks": True}),
        (16, 128, Form(2, 128), {"window": 100}),
        (16, 64, Form(1, 64), {"window": 128, "sinks": True, "norms": True}),
        (16, 64, Form(4, 128), {"window": 300}),
        (6, 64, Form(4, 64), {}),
        (40, 64, Form(4, 64), {"sinks": True}),
        (8, 64, Form(4, 64), {"window": 1}),
        (6, 64, Form(4, 64), {"shares": 3, "norms": True}),
        (32, 64, Form(1, 64), {"shares": 2, "window": 128, "sinks": True}),
    ],
    ids=str,
)
def test_windows_sinks_norms_and_shares(heads: int, dim: int, form: Form, options: dict) -> None:
    compared(heads, 2, dim, 300, form, **options)


def test_a_tile_for_each_block_while_one_wave_has_all_keys() -> None:
    assert [form_of(8, keys, 64, None, H200) for keys in (128, 1024, 1280)] == [Form(1, 128), Form(8, 128), Form(16, 128)]
    assert form_of(8, 16384, 64, None, H200) == Form(16, 128, occupancy=2, num_worker_warps=8)
    assert [form_of(8, keys, 128, None, H200) for keys in (1024, 2048)] == [Form(16, 64), Form(16, 64, occupancy=2, num_worker_warps=4)]
    assert form_of(32, 1024, 128, None, H200) == Form(4, 64, occupancy=2, num_worker_warps=4)
    assert form_of(200, 1024, 64, None, H200) == Form(1, 128, occupancy=2, num_worker_warps=8)
    # A window has few tiles; a cache that no tile divides has no form, nor has a wide head.
    assert form_of(8, 16384, 64, 128, H200) == Form(2, 128)
    assert [reach_of(16384, window, 64) for window in (None, 1, 2, 65, 66)] == [16384, 64, 128, 128, 192]
    assert form_of(2, 100, 64, None, H200) is form_of(2, 128, 256, None, H200) is None


def test_calls_that_it_takes() -> None:
    """Of one token, whatever the window, sinks and number of keys; not of other pairs of calls."""
    torch.manual_seed(0)
    row, caches, table = randn(1, 12 * 64), [randn(1, 2, KEYS, 64) for _ in range(2)], torch.rand(KEYS, 32)
    q, k, v = heads_of(row, 64, 8, 2, 2)
    places = torch.zeros(1, 1, dtype=torch.int32)
    how: dict[str, Any] = {"interleaved": False, "eps": 1e-6, "round_before_weight": False, "cos": table, "sin": table}
    append = Call.of("a", kv_append_out, q=q, k=k, v=v, k_cache=caches[0], v_cache=caches[1], positions=places, **how)
    attend = Call.of("b", attention_decode_out, q=q, k=caches[0], v=caches[1], kv_len=places[0], out=q.clone(), scale=0.1, shared=False)

    def found(a: dict | None = None, b: dict | None = None, name: str = "H200") -> list[str]:
        calls = early.early([append.replaced(**(a or {})), attend.replaced(**(b or {}))], Device.named(name))
        return [call.op.__name__ for call in calls]

    ours, theirs = ["attend_splits"], ["kv_append_out", "attention_decode_out"]
    assert found() == found(b={"window": 100, "sinks": torch.zeros(8)}) == ours
    assert found(b={"softcap": 30.0}) == found(a={"interleaved": True}) == found(a={"q_norm": randn(64)}) == theirs
    assert found(b={"q": q.clone()}) == found(a={"cos": table[:, :16]}) == found(b={"lse": torch.empty(1, 8, 1)}) == theirs
    assert found(name="B200") == theirs
    shares = heads_of(randn(2, 12 * 64, dtype=torch.float32), 64, 8, 2, 2)
    left = dict(zip("qkv", shares, strict=True))
    assert found(left | {"rotated": q}) == ours
    assert found(left | {"rotated": q.clone()}) == theirs


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("qwen3", {"head_dim": 64}), ("gpt_oss", {"head_dim": 64, "sliding_window": 70})],
    ids=["norms", "windows and sinks"],
)
def test_a_step_writes_the_tokens_of_the_plain_calls(name: str, sizes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = tiny(name, torch.bfloat16, **sizes), []
    prompt = torch.randint(3, 90, (126,), generator=torch.Generator().manual_seed(2)).tolist()
    for device in (Device.of(torch.empty(1)), H200):
        monkeypatch.setattr(programs, "early", lambda calls, unused, device=device: early.early(calls, device))
        with Engine(model, max_len=320) as engine:
            found.append(engine.generate([prompt], 4).tokens)
            steps = engine._programs.step(1, LIKELIEST).calls
            layers = len(engine.decoder.layers)
    assert found[0] == found[1]
    assert any(sum(call.op is attend_splits.attend_splits for call in calls) == layers for calls in steps.values())


def test_binaries_do_not_spill_and_wait_behind_their_first_loads() -> None:
    """The forms of the rule, for the sizes of real models."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    with traced(H200) as launches, torch.inference_mode():
        for heads, keys, dim, norms, window in (
            *((32, 1024, 64, False, None), (32, 16384, 64, False, None)),
            *((32, 1024, 128, True, None), (16, 16384, 128, True, None)),
            *((64, 16384, 64, False, 128), (64, 16384, 64, False, None)),
        ):
            raw, cache, table = heads_of(empty(1, (heads + 16) * dim), dim, heads, 8, 8), empty(1, 8, keys, dim), empty(1024, dim // 2)
            weight, sink = empty(dim) if norms else None, empty(heads, dtype=torch.float32) if heads == 64 else None
            form, places = form_of(8, keys, dim, window, H200), empty(1, 1, dtype=torch.int32)
            assert form is not None
            given = (*raw, cache, cache.clone(), places, table, table.clone(), weight, weight, sink)
            attend_splits.attend_splits(*given, empty(1, heads, 1, dim), window, 0.1, 1e-6, True, form)
    attending = [launch for launch in launches if launch.launch.name == "attend_splits_kernel"]
    assert len(attending) == 6
    for launch in attending:
        assert launch.launch.pdl
        made = binaries.made(Job.of(launch, "sm_90"))
        assert made.ok
        assert made.resources.stack_bytes == 0
        assert (made.resources.count("PREEXIT"), made.resources.count("ACQBULK")) == (1, 2)
