"""Engine on a GPU: a graph gives the eager tokens, allocates nothing, compiles nothing late, frees
its memory.
"""

import gc
import os

import pytest
import torch
from tests.support.engine_models import RECURRENT, prompts as short_prompts, stock_tokens, tiny
from transformers import CONFIG_MAPPING

from tilewright.engine import Engine, Sampling
from tilewright.models import random_model

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 16384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MLA = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
MODELS = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 32},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 32},
    "deepseek_v2": {"model_type": "deepseek_v2", **MLA},
}
LENGTHS = (5, 40, 1, 17, 33)


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


def made(name: str, gpu: torch.device):
    with torch.inference_mode(False):  # parameters that are inference tensors cannot be replaced
        return random_model({**SIZES, **MODELS[name]}, device=gpu, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_graph_and_eager_choose_the_same_tokens(gpu, prompts, name):
    model = made(name, gpu)
    found = []
    for mode in ("eager", "graph"):
        with Engine(model, max_batch=8, max_len=128, mode=mode, prefill_tokens=128) as engine:
            found.append(engine.generate(prompts, 40).tokens)
            assert engine.generate(prompts, 40).tokens == found[-1]
    assert found[0] == found[1]
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=3)
    drawn = []
    for mode in ("eager", "graph"):
        with Engine(model, max_batch=8, max_len=128, mode=mode) as engine:
            drawn.append(engine.generate(prompts, 20, sampling=sampling).tokens)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_with_a_state_write_what_transformers_writes(gpu, name):
    if RECURRENT[name]["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers lacks it")
    given, new = short_prompts(), 6
    with torch.inference_mode(False):
        model = tiny(name).to(gpu)
    stock = [stock_tokens(model, prompt, new) for prompt in given]
    for mode in ("eager", "graph"):
        with Engine(model, max_batch=4, max_len=64, mode=mode, prefill_tokens=32) as engine:
            assert engine.generate(given, new).tokens == stock, mode


def test_logits_are_near_those_of_transformers(gpu, prompts):
    model = made("llama", gpu)
    given = [[7, 50, 3, 91]] * len(prompts)
    with torch.inference_mode():
        stock = torch.stack([model(torch.tensor([p + c], device=gpu)).logits[0, len(p) - 1 :] for p, c in zip(prompts, given, strict=True)])
    with Engine(model, max_batch=8, max_len=128, mode="graph") as engine:
        ours = engine.logits(prompts, given)
    with torch.inference_mode(False):
        wide = model.float()
    with torch.inference_mode():
        truth = torch.stack([wide(torch.tensor([p + c], device=gpu)).logits[0, len(p) - 1 :] for p, c in zip(prompts, given, strict=True)])
    error, theirs = ((x.float() - truth).square().mean().sqrt() for x in (ours, stock))
    assert error <= 2 * theirs


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_a_long_run_allocates_nothing_compiles_nothing_and_does_not_drift(gpu, compilations, name):
    """TILEWRIGHT_TEST_TOKENS=10000 makes it the long one."""
    new, prompt, model, found = int(os.environ.get("TILEWRIGHT_TEST_TOKENS", "512")), [5] * 40, made(name, gpu), []
    for mode in ("graph", "eager"):
        with Engine(model, max_batch=1, max_len=new + 200, mode=mode, check_every=64) as engine:
            engine.warm_up(1, len(prompt))
            engine.generate([prompt], 80)
            before, compiled = torch.cuda.memory_stats(gpu), len(compilations)
            held: list[int] = []
            found.append(engine.generate([prompt], new, on_tokens=lambda _, held=held: held.append(torch.cuda.memory_allocated(gpu))).tokens)
            after = torch.cuda.memory_stats(gpu)
        assert len(set(held)) == 1
        assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"]
        assert len(compilations) == compiled
    assert len(found[0][0]) == new
    assert found[0] == found[1]


def test_close_gives_back_memory_and_weights(gpu, prompts):
    model = made("qwen2", gpu)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    gc.collect()
    before = torch.cuda.memory_allocated(gpu)
    with Engine(model, max_batch=8, max_len=4096, mode="graph") as engine:
        engine.generate(prompts, 10)
    del engine
    gc.collect()
    assert torch.cuda.memory_allocated(gpu) - before < 1 << 20
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_an_interrupt_leaves_the_engine_usable(gpu, prompts):
    model = made("llama", gpu)
    with Engine(model, max_batch=8, max_len=128, mode="graph", check_every=4) as engine:
        expected = engine.generate(prompts, 20).tokens

        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, 20, on_tokens=interrupt)
        assert engine.generate(prompts, 20).tokens == expected


def test_a_cache_that_does_not_fit_says_what_to_lower(gpu):
    model = made("llama", gpu)
    with pytest.raises(MemoryError, match=r"Lower max_batch, max_len or prefill_tokens"):
        Engine(model, max_batch=4096, max_len=1 << 20)
    with Engine(model, max_batch=1, max_len=64):
        pass
