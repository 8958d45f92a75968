"""Engine: sequences in any number and order, options of a call, weights held once, nothing compiled
late. Families of models: test_engine_families.py.
"""

import copy
import time

import pytest
import torch
from engine_models import NEW, prompts, size, stock_logits, stock_tokens, tiny
from tiny_models import TINY

from tilewright import interpret
from tilewright.engine import Call, Engine, Sampling, state
from tilewright.engine.sampling import LIKELIEST
from tilewright.testing import assert_accurate


def test_the_order_and_number_of_prompts_change_nothing() -> None:
    model = tiny()
    with Engine(model, max_batch=8, max_len=64) as engine:
        forward = engine.generate(prompts(), 4).tokens
        assert engine.generate(prompts()[::-1], 4).tokens == forward[::-1]
        assert engine.generate(prompts() * 2, 4).tokens == forward * 2
        assert engine.generate(torch.tensor([prompts()[1]] * 5), 4).tokens == forward[1:2] * 5


def test_a_stop_token_ends_a_sequence_and_tokens_arrive_in_blocks() -> None:
    model = tiny()
    with Engine(model, max_batch=3, max_len=64, check_every=4) as engine:
        free = engine.generate(prompts(), NEW).tokens
        stop = free[0][2]
        assert stop not in free[0][:2]
        blocks: list[list[list[int]]] = []
        found = engine.generate(prompts(), NEW, stop=[stop], on_tokens=blocks.append)
    for ours, whole in zip(found.tokens, free, strict=True):
        assert ours == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    assert len(blocks) == 3
    assert [len(block[0]) for block in blocks] == [3, 0, 0]
    assert [[token for block in blocks for token in block[i]] for i in range(3)] == found.tokens
    assert len(found.step_s) == NEW - 1
    assert found.first_token_s > 0


def test_generation_ends_when_every_sequence_has() -> None:
    model = tiny()
    with Engine(model, max_batch=1, max_len=64, check_every=2) as engine:
        free = engine.generate(prompts()[:1], NEW).tokens[0]
        blocks: list[list[list[int]]] = []
        engine.generate(prompts()[:1], NEW, stop=[free[0]], on_tokens=blocks.append)
        assert len(blocks) == 1


@pytest.mark.parametrize("new", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("stop", [(), (0,)])
def test_a_step_runs_while_the_host_reads_where_nothing_ends_a_sequence(new: int, stop: tuple[int, ...]) -> None:
    """As graphs, which a CPU has none of. No step is run twice, left out, or beyond the last."""
    order: list[str] = []

    class Replayed:
        def __init__(self, calls: list[Call]) -> None:
            self.calls = calls

        def replay(self) -> None:
            order.append("step")
            for call in self.calls:
                call()

    model = tiny(num_hidden_layers=1)
    wanted = stock_tokens(model, [5, 6], new)
    with Engine(model, max_batch=1, max_len=64, check_every=3) as engine:
        step = engine._programs.step(1, LIKELIEST)
        step.graphs.update({keys: Replayed(calls) for keys, calls in step.calls.items()})
        engine.mode = "graph"
        found = engine.generate([[5, 6]], new, stop=stop, on_tokens=lambda gained: order.append("read"))
        engine.mode = "eager"
    assert found.tokens == [wanted]
    assert order.count("step") == len(found.step_s) == new - 1
    reads = [i for i, what in enumerate(order) if what == "read"]
    assert len(reads) == -(-new // 3)
    assert all(order[:i].count("step") == min(new - 1, 3 * n + 2 + (not stop)) for n, i in enumerate(reads))


def storages(model) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


def test_weights_are_held_once_and_the_model_works_on() -> None:
    model = tiny("llama-tied-bias")
    before, stock = {k: v.clone() for k, v in model.state_dict().items()}, stock_logits(model, [5, 6, 7], [8])
    bytes_before, count = size(model), len(storages(model))
    with Engine(model, max_batch=1, max_len=64) as engine:
        attention = model.model.layers[0].self_attn
        assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
        assert size(model) == bytes_before
        torch.testing.assert_close(stock_logits(model, [5, 6, 7], [8]), stock)
    assert len(storages(model)) == count
    assert all(torch.equal(v, before[k]) and v.is_contiguous() for k, v in model.state_dict().items())
    engine.close()  # nothing left to do
    with pytest.raises(ValueError, match="the engine must be open"):
        engine.generate([[5]], 1)
    with Engine(model, max_batch=1, max_len=64):
        pass


def test_the_floor_counts_weights_once_and_the_keys() -> None:
    model = tiny("llama-tied-bias")
    matrices = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
    with Engine(model, max_batch=4, max_len=64) as engine:
        assert engine.step_bytes(1, 0) == matrices
        assert engine.step_bytes(4, 10) == matrices + 2 * 2 * 4 * 2 * 10 * 16 * 4  # layers, keys and values, batch, heads, tokens, head_dim, bytes
    model = tiny("mixtral", torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    matrices = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear)) + 2 * model.model.layers[0].mlp.gate.weight.nbytes
    with Engine(model, max_batch=1, max_len=64) as engine:
        assert engine.step_bytes(1, 0) == matrices + 2 * (experts.gate_up_proj.nbytes + experts.down_proj.nbytes) // 2  # 2 of 4 experts


def test_256_steps_compile_nothing_new() -> None:
    model = tiny(num_hidden_layers=1)
    with Engine(model, max_batch=1, max_len=300, check_every=8) as engine:
        engine.warm_up(1, 5)
        counts: list[int] = []
        engine.generate([[3, 4, 5, 6, 7]], 1 + 256, on_tokens=lambda _: counts.append(interpret.compiled_count()))
    assert len(set(counts)) == 1
    assert len(counts) == -(-257 // 8)


def test_warm_up_compiles_all_that_a_call_needs() -> None:
    model = tiny("qwen3")
    with Engine(model, max_batch=2, max_len=64) as engine:
        engine.warm_up(2, 19)
        before = interpret.compiled_count()
        engine.generate([prompts()[1]] * 2, 4)
        assert interpret.compiled_count() == before


def test_sampling_is_seeded_and_temperature_0_is_greedy() -> None:
    model = tiny()
    with Engine(model, max_batch=3, max_len=64) as engine:
        greedy = engine.generate(prompts(), 4).tokens
        assert engine.generate(prompts(), 4, sampling=Sampling(temperature=0)).tokens == greedy
        drawn = [engine.generate(prompts(), 4, sampling=Sampling(temperature=2.0, seed=seed)).tokens for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1]
        assert drawn[0] != drawn[2]
        assert engine.generate(prompts(), 4, sampling=Sampling(top_k=1, temperature=5.0)).tokens == greedy
        assert engine.generate(prompts(), 4, sampling=Sampling(top_p=1e-6, temperature=5.0)).tokens == greedy


def test_an_interrupt_leaves_the_engine_usable() -> None:
    model = tiny()
    with Engine(model, max_batch=3, max_len=64, check_every=2) as engine:
        expected = engine.generate(prompts(), 4).tokens

        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts(), 4, on_tokens=interrupt)
        assert engine.generate(prompts(), 4).tokens == expected


def test_a_step_of_few_keys_reads_a_cache_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FEW_KEYS", 8)
    model = tiny(num_hidden_layers=1)
    with Engine(model, max_batch=2, max_len=64) as engine:
        for given in (prompts()[::2], prompts()[2:]):  # the longest counts; from 2 keys to 14
            assert engine.generate(given, NEW).tokens == [stock_tokens(model, prompt) for prompt in given]
        found = engine.logits([prompts()[2]], [[5] * 8])[0]
        assert_accurate(found, stock_logits(model, prompts()[2], [5] * 8), stock_logits(copy.deepcopy(model).double(), prompts()[2], [5] * 8))
        step = next(step for step in engine._programs._steps.values() if step.buffers.batch == 1)
    assert {keys: call.args[1].shape[2] for keys, calls in step.calls.items() for call in calls if call.name == "layers.0.attention"} == {
        8: 8,
        16: 16,
        64: 64,
    }
    assert [step.reach(keys) for keys in (1, 8, 9, 64)] == [8, 8, 16, 64]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # norms of queries and keys cost no call
def test_a_step_is_a_list_of_calls(name: str) -> None:
    model = tiny(name, num_hidden_layers=1)
    stages: list[str] = []
    with Engine(model, max_batch=1, max_len=64, on_progress=lambda stage, done, total: stages.append(stage)) as engine:
        engine.warm_up(1, 3)
        (step,) = engine._programs._steps.values()
        assert [call.name for call in step.calls[64]] == [
            "embedding",
            "layers.0.attention.qkv",
            "layers.0.attention.append",
            "layers.0.attention",
            "layers.0.attention.out",
            "layers.0.mlp.gate_up",
            "layers.0.mlp.down",
            "head",
            "argmax",
            "advance",
        ]
        several = [call.name for call in engine.decoder.body_calls(engine._state.buffers(2), engine._state.tokens[:2], engine._state.caches)]
        assert several[1:3] == ["layers.0.attention_norm", "layers.0.attention.qkv"]
    assert list(dict.fromkeys(stages)) == ["fusing weights", "compiling decode, batch 1", "compiling prefill, 1 x 16"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_len": 2**31}, r"^max_len 2147483648: its rotations need 256\.0 GiB; .* are free\. Lower max_len$"),
        ({"max_batch": 2**31}, r"^the cache does not fit: .* cache 2097152\.0 GiB \(max_batch 2147483648 x max_len 2048\)"),
        ({"cache": "paged", "max_batch": 2**20}, r"\(\d+ pages of 64 tokens\).* Lower cache_tokens, max_batch or prefill_tokens$"),
        ({"cache": "paged", "cache_tokens": 64, "max_batch": 2**31}, r"^the cache does not fit: .* \(2 pages of 64 tokens\)"),
        ({"check_every": 2**40}, "does not fit"),
    ],
)
def test_sizes_beyond_the_memory_are_refused_at_once(sizes, message) -> None:
    """On a CPU too: allocating them would take minutes, or the machine's memory."""
    model = tiny()
    begin = time.process_time()
    with pytest.raises(MemoryError, match=message):
        Engine(model, **sizes)
    assert time.process_time() - begin < 5
    assert not hasattr(model, "tilewright_engine")


def test_what_it_cannot_do_raises_and_leaves_the_model_alone() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="an NVIDIA GPU"):
        Engine(model, mode="graph")
    with pytest.raises(ValueError, match="mode must be"):
        Engine(model, mode="fast")
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        Engine(model, max_batch=0)
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        Engine(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="with an lm_head, got LlamaModel"):
        Engine(model.model)
    with pytest.raises(ValueError, match="a LlamaMLP must be a gated MLP with SiLU or tanh-GELU"):
        Engine(tiny(hidden_act="relu"))
    with pytest.raises(ValueError, match=r"rope_type must be one of default, .* got dynamic"):
        Engine(tiny(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    with pytest.raises(ValueError, match="bfloat16 or float16, got float32"):
        Engine(tiny("mixtral"))
    assert len(storages(model)) == len(storages(tiny()))
    with Engine(model, max_batch=2, max_len=64) as engine:
        with pytest.raises(ValueError, match=r"close\(\) that one first"):
            Engine(model)
        with pytest.raises(ValueError, match="number of prompts must be 1 to max_batch = 2, got 3"):
            engine.generate(prompts(), 1)
        with pytest.raises(ValueError, match=r"at most max_len = 64, got 60 \+ 9"):
            engine.generate([[3] * 60], NEW)
        with pytest.raises(ValueError, match="at least 1 token"):
            engine.generate([[]], NEW)
        with pytest.raises(ValueError, match="token ids must be 0 to 95, got 3 to 96"):
            engine.generate([[3, 96]], NEW)
        with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
            engine.generate([[3]], 0)
        with pytest.raises(ValueError, match="continuations must be 2 lists of equal length"):
            engine.logits([[3], [4]], [[5], [6, 7]])
    with pytest.raises(ValueError, match="top_p must be above 0"):
        Sampling(top_p=0.0)


def test_a_call_takes_arguments_by_name_and_runs_by_position():
    def op(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, scale: float, shift: float = 3.0) -> None:
        out.copy_(x * scale + shift)

    x, out = torch.ones(2), torch.zeros(2)
    call = Call.of("double", op, out=out, scale=2.0, x=x)
    assert call.args == (x, None, out, 2.0, 3.0)
    call()
    assert torch.equal(out, torch.full((2,), 5.0))
    with pytest.raises(TypeError, match="scale"):
        Call.of("double", op, out=out, x=x)
    with pytest.raises(TypeError, match="bais"):
        Call.of("double", op, out=out, x=x, scale=2.0, bais=x)


@pytest.mark.parametrize(
    ("how", "theirs"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"logit_bias": {5: 3.0, 40: -2.5, 7: 4.0}}, {"sequence_bias": [[[5], 3.0], [[40], -2.5], [[7], 4.0]]}),
    ],
)
def test_penalties_and_biases_are_those_of_transformers(how: dict, theirs: dict) -> None:
    model = tiny()
    with Engine(model, max_batch=3, max_len=64) as engine:
        ours = engine.generate(prompts(), NEW, sampling=Sampling(temperature=0, **how)).tokens
        assert ours != engine.generate(prompts(), NEW).tokens
    for prompt, found in zip(prompts(), ours, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **theirs)
        assert found == out[0, len(prompt) :].tolist()


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """By OpenAI's formula, on logits of the engine itself."""
    model, (presence, frequency) = tiny(), (0.7, 0.4)
    with Engine(model, max_batch=3, max_len=64) as engine:
        how = Sampling(temperature=0, presence_penalty=presence, frequency_penalty=frequency)
        ours = engine.generate(prompts(), NEW, sampling=how).tokens
        given = engine.logits(prompts(), [row[:-1] for row in ours])
    for row, logits in zip(ours, given, strict=True):
        counts = torch.zeros(TINY["vocab_size"])
        for token, at in zip(row, logits, strict=True):
            assert token == int((at - presence * (counts > 0) - frequency * counts).argmax())
            counts[token] += 1


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_grammar_allows_the_tokens_of_its_mask_alone(temperature: float) -> None:
    seen: list[list[list[int]]] = []

    def masks(written: list[list[int]]) -> torch.Tensor:
        """Even tokens behind odd ones, and odd ones behind even ones."""
        seen.append([list(row) for row in written])
        words = [0x5555_5555 if len(row) % 2 == 0 else 0xAAAA_AAAA - 2**32 for row in written]
        return torch.tensor([[word] * (TINY["vocab_size"] // 32) for word in words], dtype=torch.int32)

    with Engine(tiny(), max_batch=4, max_len=64) as engine:
        found = engine.generate(prompts(), NEW, sampling=Sampling(temperature=temperature, seed=3), masks=masks).tokens
        assert all(token % 2 == at % 2 for row in found for at, token in enumerate(row))
        assert seen == [[row[:n] for row in found] for n in range(NEW)]
        with pytest.raises(ValueError, match=r"a grammar's mask must be int32 \[3, 3\], a row for each"):
            engine.generate(prompts(), NEW, masks=lambda written: torch.zeros(3, 4, dtype=torch.int32))


def test_a_text_ends_a_sequence_whose_tokens_spell_it() -> None:
    model = tiny()
    with Engine(model, max_batch=3, max_len=64) as engine:
        free = engine.generate(prompts(), NEW).tokens
        text = f"{free[0][2]},{free[0][3]}"

        def decode(tokens: list[int]) -> str:
            return ",".join(map(str, tokens))

        found = engine.generate(prompts(), NEW, stop_texts=[text], decode=decode).tokens
        with pytest.raises(TypeError, match="decode must be a function"):
            engine.generate(prompts(), NEW, stop_texts=[text])
        with pytest.raises(TypeError, match="stop_texts must be a list of texts"):
            engine.generate(prompts(), NEW, stop_texts=text, decode=decode)
    assert found[0] == free[0][:4]
    for ours, whole in zip(found, free, strict=True):
        assert ours == whole[: len(ours)]
        assert text not in decode(ours[:-1])


def test_min_p_leaves_what_is_likely_enough() -> None:
    with Engine(tiny(), max_batch=3, max_len=64) as engine:
        likeliest = engine.generate(prompts(), 4).tokens
        assert engine.generate(prompts(), 4, sampling=Sampling(temperature=2.0, min_p=1.0, seed=1)).tokens == likeliest
        assert engine.generate(prompts(), 4, sampling=Sampling(temperature=2.0, min_p=0.01, seed=1)).tokens != likeliest
