"""The engine's cache of 8 bits: logits of a model whose keys and values are rounded to e4m3; what
is refused.
"""

import copy

import pytest
import torch
from test_engine import prompts, tiny
from transformers import DynamicCache

from tilewright.engine import Engine
from tilewright.launch import counted
from tilewright.testing import assert_accurate

GIVEN = [[7, 50]] * 2
PROMPTS = prompts()[:2]
SIZES = {"max_batch": 2, "max_len": 64, "prefill_tokens": 32, "cache": "paged", "page_size": 16, "cache_tokens": 64}  # chunks of 16 tokens


class Rounded(DynamicCache):
    """Holds of each token and head e4m3 times its largest magnitude / 448."""

    def update(self, keys, values, *args, **kwargs):
        def rounded(x):
            scale = (x.abs().amax(-1, keepdim=True).to(torch.promote_types(x.dtype, torch.float32)) / 448).clamp(min=2.0**-126)
            return ((x / scale).to(torch.float8_e4m3fn).to(scale.dtype) * scale).to(x.dtype)

        return super().update(rounded(keys), rounded(values), *args, **kwargs)


def logits(model, cache):
    """Of the given tokens behind each prompt, without an engine."""
    with torch.inference_mode():
        return torch.stack(
            [
                model(torch.tensor([p + c]), past_key_values=cache(config=model.config)).logits[0, len(p) - 1 :]
                for p, c in zip(PROMPTS, GIVEN, strict=True)
            ]
        )


def test_logits_are_those_of_rounded_keys_and_values() -> None:
    """They obey the accuracy rule, and are no further from the model's than rounding makes them."""
    model = tiny("gemma2", torch.bfloat16, num_hidden_layers=1, use_cache=True)
    truth, stock = logits(copy.deepcopy(model).to(torch.float64), Rounded), logits(model, Rounded)
    plain = logits(copy.deepcopy(model).to(torch.float64), DynamicCache)
    with Engine(model, **SIZES, kv_dtype="fp8") as engine, counted() as launches:
        ours = engine.logits(PROMPTS, GIVEN)
        heads, head_dim, slots = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim, 80
        assert engine.cache_bytes == 2 * heads * slots * (head_dim + 4)
    assert launches["attention_decode_kernel"]
    assert launches["attention_kernel"]
    assert_accurate(ours, stock, truth)
    moved = (truth - plain).abs().mean()
    assert 0 < (ours.double() - plain).abs().mean() < 1.5 * moved


def test_keys_of_a_model_that_also_keeps_states() -> None:
    model = tiny("qwen3_5", torch.bfloat16)
    truth, stock = logits(copy.deepcopy(model).to(torch.float64), Rounded), logits(model, Rounded)
    with Engine(model, max_batch=2, max_len=64, kv_dtype="fp8") as engine:
        assert_accurate(engine.logits(PROMPTS, GIVEN), stock, truth)
        caches = [x.dtype for cache in engine._state.caches for x in cache]
    assert caches == [torch.bfloat16, torch.float32, *(torch.float8_e4m3fn,) * 2, *(torch.float32,) * 2]


@pytest.mark.parametrize(
    ("name", "dtype", "options", "message"),
    [
        ("llama", torch.bfloat16, {"kv_dtype": "int8"}, r"kv_dtype must be None or \"fp8\", got 'int8'"),
        ("llama", torch.float32, {"kv_dtype": "fp8"}, r"the model's dtype must be bfloat16 or float16 with kv_dtype \"fp8\", got float32"),
        ("nemotron_h", torch.bfloat16, {"kv_dtype": "fp8"}, "heads with a multiple of 4 elements, at most 256"),
        ("deepseek_v2", torch.bfloat16, {"kv_dtype": "fp8"}, "latents are cached in 16 bits"),
    ],
)
def test_what_it_does_not_run_is_refused(name: str, dtype: torch.dtype, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny(name, dtype, num_hidden_layers=1, head_dim=18), **options)
