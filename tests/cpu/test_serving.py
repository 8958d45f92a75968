"""Many users at once: transformers' continuous batching and its server, on our kernels."""

import threading
from unittest.mock import Mock

import pytest
import torch
from inherited_context import threads_inherit
from tiny_models import TINY, tiny_model

from tilewright.launch import counted
from tilewright.models import Loaded, continuous, patch
from tilewright.models.continuous_codes import KV_DTYPE, coded_allocators
from tilewright.ops.quantize_fp8 import quantize_fp8
from tilewright.testing.tiny_chat import tokenizer

FAMILIES = {
    "llama": {"model_type": "llama", "num_hidden_layers": 1},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5, "num_hidden_layers": 1},
    "gpt_oss-sinks": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
}
NEW = 4


def prompts() -> list[list[int]]:
    """More than fit into a step; the second is read in two."""
    torch.manual_seed(0)
    return [torch.randint(3, TINY["vocab_size"], (n,)).tolist() for n in (5, 37, 1, 20)]


def generate_batch(model, page_size: int = 16, new: int = NEW, **options: object) -> list[list[int]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    paging = ContinuousBatchingConfig(page_size=page_size, num_blocks=16, max_batch_tokens=32, max_requests_per_batch=3, **options)
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts(), generation_config=greedy, continuous_batching_config=paging)
    return [request.generated_tokens for request in found.values()]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_continuous_batching_are_those_of_transformers(name: str) -> None:
    """And the model generates as before once a manager has stopped."""
    model = tiny_model(FAMILIES[name])
    ids = torch.tensor([prompts()[0]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    stock, alone = generate_batch(model), model.generate(ids, **options)
    assert [len(tokens) for tokens in stock] == [NEW] * 4
    with patch(model):
        with counted() as launches, threads_inherit():
            assert generate_batch(model) == stock
        assert torch.equal(model.generate(ids, **options), alone)
    assert "init_continuous_batching" not in model.__dict__
    assert torch.equal(model.generate(ids, **options), alone)
    assert launches["attention_kernel"]
    assert bool(launches["attention_decode_kernel"]) == (name == "llama")  # a sliding window's pages have no block table


def test_a_server_of_any_steps_captures_few_of_them(monkeypatch) -> None:
    """Each graph takes megabytes of host memory, and transformers keeps one for each size."""
    from transformers import ContinuousBatchingConfig

    most = 8192
    model = tiny_model(FAMILIES["llama"])
    with patch(model):
        paging = ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=most, max_requests_per_batch=4)
        processor = model.init_continuous_batching(continuous_batching_config=paging)._create_batch_processor()
    runner, graphs = processor.model_runner, processor.inputs_and_outputs.graphs
    runner.pad_inputs, runner.cache.max_tokens_read = True, 1 << 20  # as on a GPU
    tokens = [runner.maybe_pad_inputs(n, 0, False)[0] for n in range(1, most + 1)]
    keys = {runner.maybe_pad_inputs(1, n, False)[1] for n in range(0, 1 << 20, 8192)}
    assert all(n <= size <= max(n + 63, 1.25 * n + 63) for n, size in enumerate(tokens, 1))
    assert max(tokens) == most
    assert sorted({n for n in tokens if n < 1024}) == [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896]
    assert (len(set(tokens)), len(keys)) == (24, 20)
    assert [runner.maybe_pad_inputs(n, 5, True) for n in (3, 4)] == [(4, 0), (4, 0)]  # steps of one token a request, as before

    monkeypatch.setattr(continuous, "MOST_GRAPHS", 2)
    made = [Mock() for _ in range(3)]
    for i, graph in enumerate(made):
        graphs.set_graph((i,), graph)
        assert graphs.get_graph((0,)) is made[0]
    assert [graph.reset.called for graph in made] == [False, True, False]
    assert graphs.get_graph((1,)) is None
    assert continuous.captured_steps(processor) == 2


def test_pages_that_no_block_table_serves_are_gathered() -> None:
    model = tiny_model(FAMILIES["llama"])
    stock = generate_batch(model, page_size=12)
    with patch(model), counted() as launches, threads_inherit():
        assert generate_batch(model, page_size=12) == stock
    assert not launches["attention_decode_kernel"]


def test_latent_attention_is_refused() -> None:
    mla = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 8, "num_key_value_heads": 4}
    model = tiny_model({"model_type": "deepseek_v2", **mla}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1)
    with patch(model), pytest.raises(ValueError, match="the model must be one whose values are as wide as its keys"):
        generate_batch(model)


@pytest.mark.parametrize(
    ("family", "got"),
    [
        ({"model_type": "bloom", "n_layer": 1, "n_head": 4}, "bloom, with attention of its own"),
        ({"model_type": "mamba"}, "mamba, with layers of linear_attention"),
        ({"model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 48}, "llama4_text, with layers of chunked_attention"),
    ],
)
def test_a_model_whose_requests_would_read_each_other_is_not_served(family: dict, got: str) -> None:
    """A BLOOM took a step's prompts for one text, and answered 200. A Mamba was a traceback."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tilewright.models.serve import serving

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes | family)).eval()
    with (
        pytest.raises(ValueError, match=f"layers all call an attention that transformers selects.*got {got}"),
        serving(Loaded(model, tokenizer(), "here"), port=0),
    ):
        pass
    assert "tilewright_report" not in model.__dict__


def test_openai_clients_are_served_at_once() -> None:
    openai = pytest.importorskip("openai", reason="pip install 'tilewright[serve]'")
    pytest.importorskip("starlette", reason="pip install 'tilewright[serve]'")
    pytest.importorskip("uvicorn", reason="pip install 'tilewright[serve]'")
    from tilewright.models.serve import serving

    model, words = tiny_model(FAMILIES["llama"]), tokenizer()
    questions = ["hello", "what is it?", "a", "one two three"]
    answers = []
    for question in questions:
        ids = torch.tensor([words(question)["input_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        answers.append(words.decode(out, skip_special_tokens=True))
    assert len(set(answers)) > 1
    loaded = Loaded(model, words, "some/folder/tiny")
    given: dict[str, str] = {}
    with counted() as launches, threads_inherit(), serving(loaded, port=0, max_batch_tokens=64, cache_pages=8) as running:
        port = running.server.servers[0].sockets[0].getsockname()[1]
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)

        def ask(question: str, stream: bool) -> None:
            message = {"role": "user", "content": question}
            reply = client.chat.completions.create(model="tiny", messages=[message], max_tokens=NEW, temperature=0, stream=stream)
            parts = [part.choices[0].delta.content or "" for part in reply if part.choices] if stream else [reply.choices[0].message.content]
            given[question] = "".join(parts)

        users = [threading.Thread(target=ask, args=(question, i % 2 == 1)) for i, question in enumerate(questions)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert [listed.id for listed in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="another", messages=[{"role": "user", "content": "a"}])
    assert [given[question] for question in questions] == answers
    assert launches["kv_append_kernel"]
    assert launches["attention_decode_kernel"]
    assert "tilewright_report" not in model.__dict__


def test_a_model_without_a_tokenizer_is_not_served() -> None:
    from tilewright.models.serve import serving

    with pytest.raises(ValueError, match="model must be one with a tokenizer"), serving(Loaded(None, None, "here")):
        pass


def test_a_tokenizer_in_python_is_refused_at_the_start() -> None:
    """Every request got 500, and took a place that was never free again."""
    from transformers import ByT5Tokenizer

    from tilewright.models.serve import serving

    loaded = Loaded(None, ByT5Tokenizer(), "here")
    with pytest.raises(ValueError, match=r"tokenizer must be one with a tokenizer\.json.*got ByT5Tokenizer"), serving(loaded):
        pass


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_pages_of_codes_hold_what_transformers_would_hold_of_rounded_keys(kind: str) -> None:
    """Two layers; a prompt in two parts, then a token; a window shorter than the first part."""
    from transformers import MistralConfig
    from transformers.generation.continuous_batching import cache
    from transformers.generation.continuous_batching.cache_allocators import CachePool

    config = MistralConfig(hidden_size=64, num_attention_heads=4, head_dim=16, sliding_window=20)
    own, stock = (
        cls(index=0, config=config, num_key_value_heads=2, cache_dtype=torch.bfloat16, page_size=16, layer_indices=[0, 1], allow_block_sharing=False)
        for cls in (coded_allocators()[kind], cache.ATTN_TYPE_TO_ALLOCATOR[kind])
    )
    assert own.bytes_per_page == 16 * 2 * 2 * (16 + 4)
    assert stock.bytes_per_page == 16 * 2 * 2 * (16 * 2)
    for each in (own, stock):
        size = each.bytes_per_block
        each.register_cache_tensor(size, 4 * size, torch.zeros(6 * size, dtype=torch.uint8), pool := CachePool(4, 1))
        for _ in range(4):
            pool.allocate_sector(0)
    torch.manual_seed(0)
    past = 0
    for count in (30, 8, 1):
        states = torch.randn(4, count, 2, 16).bfloat16()
        codes, scales = quantize_fp8(states, block=(1, None))
        rounded = (codes.float() * scales[..., None]).bfloat16()
        for layer in range(2):
            both = []
            for each, (keys, values) in ((own, states[2 * layer :][:2]), (stock, rounded[2 * layer :][:2])):
                if layer == 0:
                    each.allocate_cache_to_request("a", past, count)
                read = torch.tensor(each.get_read_indices("a", past, count) if past else [], dtype=torch.int64)
                both.append(each.update(keys, values, layer, read, torch.tensor(each.get_write_indices("a", past, count))))
            for ours, theirs in zip(*both, strict=True):
                assert torch.equal(ours, theirs), (kind, past, layer)
        past += count


def test_tokens_of_codes_are_the_same_in_tables_and_gathered() -> None:
    """The first reads one token a request through its table, the second reads rows by their
    places."""
    model = tiny_model(FAMILIES["llama"], torch.bfloat16)
    found = []
    with patch(model, only=["attention"], kv_dtype="fp8"), threads_inherit():
        for page_size in (16, 12):
            with counted() as launches:
                found.append(generate_batch(model, page_size, new=2))
            assert launches["quantize_fp8_rows_kernel"]
            assert bool(launches["attention_decode_kernel"]) == (page_size == 16)
    assert found[0] == found[1]
    assert KV_DTYPE not in model.__dict__


def test_a_cache_of_codes_is_refused_where_it_would_not_be_used() -> None:
    model = tiny_model(FAMILIES["llama"], torch.bfloat16)
    with pytest.raises(ValueError, match="kv_dtype must be None for a LlamaForCausalLM whose attention stays in PyTorch"):
        patch(model, skip=["attention"], kv_dtype="fp8")
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16 with kv_dtype"):
        patch(tiny_model(FAMILIES["llama"]), kv_dtype="fp8")
    with patch(model):
        pass  # unchanged
