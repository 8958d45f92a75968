"""What a second adversary found in the engine, in decisions and in shared keys."""

import copy
import math
import pickle
import re
import threading

import pytest
import torch
from tiny_models import tiny

import tilewright
from tilewright.engine import Engine, Sampling as EngineSampling
from tilewright.models import load
from tilewright.models.server.sampling import SPARE, Sampling, Tables

pytestmark = pytest.mark.usefixtures("inference")
PAGED = {"cache": "paged", "page_size": 16}


def test_drafts_fit_a_cache_that_they_fill() -> None:
    """57 + 4 + 3 tokens in pages of 64: a round asked for one more than it reads."""
    prompt, sizes = [3 + i * 7 % 90 for i in range(57)], {"max_len": 64, "check_every": 2, **PAGED}
    with Engine(tiny(num_hidden_layers=1), **sizes, draft=tiny("qwen3", num_hidden_layers=1), speculate=3) as engine:
        assert engine.generate([prompt], 4).tokens == engine.generate([prompt], 4, speculate=0).tokens


def test_an_engine_runs_one_call_at_a_time() -> None:
    """A second one took the first one's cache: both got wrong tokens, and no error."""
    first, other = [5, 6, 7], [9, 8]
    with Engine(tiny(num_hidden_layers=1), max_len=32, check_every=2) as engine:
        plain, found = engine.generate([first], 8).tokens, []

        def beside(gained: object) -> None:
            for call in (lambda: engine.generate([other], 4), lambda: engine.logits([other]), lambda: engine.warm_up(1, 4)):
                with pytest.raises(RuntimeError, match="an engine must run one call at a time") as caught:
                    call()
                found.append(caught.value)

        assert engine.generate([first], 8, on_tokens=beside).tokens == plain

        def in_a_thread(gained: object) -> None:
            thread = threading.Thread(target=beside, args=(gained,))
            thread.start()
            thread.join()

        assert engine.generate([first], 8, on_tokens=in_a_thread).tokens == plain
        assert len(found) >= 12
        with pytest.raises(ZeroDivisionError):
            engine.generate([first], 8, on_tokens=lambda gained: 1 / 0)
        assert engine.generate([first], 8).tokens == plain  # an error leaves it free


def test_a_grammar_that_allows_no_token_is_refused() -> None:
    """Token 0 came of it. Bits behind the vocabulary allow none; a sequence that ended needs
    none.
    """
    with Engine(tiny(num_hidden_layers=1, vocab_size=70), max_batch=2, max_len=32) as engine:
        every = torch.full((2, 3), -1, dtype=torch.int32)
        for word in (0, 0b11000000):  # of 64..95
            none = every.clone()
            none[1] = torch.tensor([0, 0, word])
            with pytest.raises(ValueError, match="a grammar's mask of sequence 1 must be of at least one token, as for the end of a text, got none"):
                engine.generate([[5], [6]], 3, masks=lambda written, none=none: none)
        last = torch.tensor([[0, 0, 0b100000], [-(2**31), 0, 0]], dtype=torch.int32)
        after = torch.stack((last[0], torch.zeros_like(last[1])))
        written = engine.generate([[5], [6]], 3, stop=[31], masks=lambda written: after if written[1] else last)
        assert written.tokens == [[69, 69, 69], [31]]
        how = EngineSampling(temperature=0, logit_bias={31: -math.inf, 69: -1e300})  # token 0 came of these too
        for token, mask in ((31, last[1:]), (69, last[:1])):
            with pytest.raises(ValueError, match=r"sequence 0 must be of at least one token, .*, whose logit_bias is above -inf, got none"):
                engine.generate([[5]], 3, sampling=how, masks=lambda written, mask=mask: mask)
            both = mask | torch.tensor([[2, 0, 0]], dtype=torch.int32)
            assert engine.generate([[5]], 2, sampling=how, masks=lambda written, both=both: both).tokens == [[1, 1]], token


def test_options_that_are_no_booleans_are_named() -> None:
    """The compiler refused them, by the number of a kernel's argument."""
    x = torch.randn(4, 16)
    for call, name in (
        (lambda: tilewright.matmul(x, x, trans_b="no"), "trans_b"),
        (lambda: tilewright.moe_route(x, 2, sigmoid="yes"), "sigmoid"),
        (lambda: tilewright.attention(x[None, None], x[None, None], x[None, None], causal="no"), "causal"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got '"):
            call()


def test_shared_keys_without_values_or_with_a_list_of_pages_are_refused() -> None:
    q, shared, own = torch.randn(2, 2, 1, 16), torch.randn(1, 32, 16), torch.randn(2, 1, 16, 16)
    with pytest.raises(TypeError, match=r"v must be a torch\.Tensor, got NoneType"):
        tilewright.cascade_decode(q, shared, shared, own, None)
    with pytest.raises(TypeError, match=r"prefix_table must be a torch\.Tensor, got list"):
        tilewright.cascade_decode(q, own, own, own, own, prefix_table=[0, 1])
    none = torch.zeros(1, dtype=torch.int32)
    assert torch.equal(tilewright.cascade_decode(q, shared, shared, own, own, prefix_len=none), tilewright.attention_decode(q, own, own))


def test_a_cancelled_sequence_counts_no_token_for_the_next_in_its_row() -> None:
    """It may be in a step that still runs. What the next one repeated went unpunished from then
    on.
    """
    sampling = Sampling(temperature=0, top_p=1, top_k=0, seed=0, frequency_penalty=1.0)
    tables = Tables(1, 8, torch.device("cpu"))
    cancelled = tables.take([1] * 9, sampling)
    tables.free(cancelled)
    for _ in range(SPARE):
        tables.free(tables.take([1], sampling))
    ticket = tables.take([1, 2], sampling)
    assert (ticket - cancelled) % len(tables.seen) == 0  # the same row

    def step(token: int, place: int, ticket: int) -> list[float]:
        one = torch.ones(1)
        given = (torch.zeros(1, 8), torch.tensor([token]), torch.tensor([place]), torch.tensor([ticket]))
        return tables.adjusted(*given, (one, 0 * one, one))[0].tolist()

    step(3, 40, cancelled)
    step(3, 41, 0)
    assert step(4, 2, ticket) == [0, 0, 0, 0, -1, 0, 0, 0]
    assert step(4, 3, ticket) == step(4, 3, ticket) == [0, 0, 0, 0, -2, 0, 0, 0]


def test_an_engine_is_not_copied_and_copies_of_its_model_are_held_by_none() -> None:
    """Out of a pickle it chose other tokens, and said nothing."""
    model = tiny(num_hidden_layers=1)
    with Engine(model, max_len=32) as engine:
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="an engine must be made from a model where it runs, got a copy or a pickle of one"):
                way(engine)
        plain = engine.generate([[5]], 4).tokens
        for held_by_none in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with Engine(held_by_none, max_len=32) as other:
                assert other.generate([[5]], 4).tokens == plain


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda model: model.to(torch.bfloat16), "model."),
        (lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True), "model."),
        (lambda model: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[0].mlp)), "model.layers.0.mlp."),
        (lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach().clone())), "lm_head.weight"),
        (
            lambda model: model.model.layers[0].mlp.up_proj.register_parameter("lora", torch.nn.Parameter(torch.zeros(2))),
            "model.layers.0.mlp.up_proj.lora",
        ),
        (lambda model: model.model.layers[0].mlp.add_module("adapter", torch.nn.Linear(2, 2)), "model.layers.0.mlp.adapter."),
    ],
    ids=["moved", "assigned", "module", "parameter", "new", "adapter"],
)
def test_an_engine_whose_model_got_other_weights_says_so(change, first) -> None:
    """It went on with those that it had fused."""
    model = tiny("llama", num_hidden_layers=1)
    with Engine(model, max_len=16) as engine:
        model.lm_head.weight.data.mul_(2)  # in place: they are the same
        engine.logits([[5]])
        change(model)
        with pytest.raises(ValueError, match=rf"weights must be those that the engine was made of \(close\(\) it, .*got another {re.escape(first)}"):
            engine.generate([[5]], 2)


def test_a_module_that_has_the_same_weights_changes_nothing() -> None:
    model = tiny("llama", num_hidden_layers=1)
    with Engine(model, max_len=16) as engine:
        plain = engine.generate([[5]], 2).tokens
        model.model.layers[0].mlp = copy.copy(model.model.layers[0].mlp)
        assert engine.generate([[5]], 2).tokens == plain


def test_an_engine_closes_beside_no_call() -> None:
    """It took weights and cache away from the call that ran."""
    with Engine(tiny(num_hidden_layers=1), max_len=32, check_every=2) as engine:
        plain = engine.generate([[5]], 8).tokens
        with pytest.raises(RuntimeError, match="an engine must run one call at a time"):
            engine.generate([[5]], 8, on_tokens=lambda gained: engine.close())
        assert engine.generate([[5]], 8).tokens == plain
    engine.close()
    for use in (
        lambda: engine.generate([[5]], 2),
        lambda: engine.logits([[5]]),
        lambda: engine.warm_up(1, 2),
        lambda: engine.cache_bytes,
        lambda: engine.cache_tokens_held,
        lambda: engine.step_bytes(1, 2),
    ):
        with pytest.raises(ValueError, match="the engine must be open, got one that was closed"):
            use()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prefix_reuse": "no"}, "prefix_reuse must be True or False, got 'no'"),
        ({"cache": "paged", "page_size": 64.0}, r"page_size must be a Python integer, got 64\.0"),
        ({"cache": "paged", "cache_tokens": 1e3}, r"cache_tokens must be a Python integer, got 1000\.0"),
        ({"speculate": 2.5}, r"speculate must be a Python integer, got 2\.5"),
        ({"speculate": 99}, r"speculate must be 0 \(off\) to 15, got 99"),
        ({"draft_weights": "int4-128"}, "draft_weights must be given with a draft model, got 'int4-128'"),
        ({"group": "x"}, r"group must be a tilewright\.engine\.Group, got 'x'"),
    ],
)
def test_an_engine_takes_no_option_of_another_kind(how, message) -> None:
    model = tiny(num_hidden_layers=1)
    with pytest.raises((TypeError, ValueError), match=message):
        Engine(model, max_len=32, **how)
    assert "tilewright_engine" not in model.__dict__


def test_a_call_names_the_argument_that_is_of_another_kind() -> None:
    every = {token: float("-inf") for token in range(96)}
    with Engine(tiny(num_hidden_layers=1), max_len=32) as engine:
        plain = engine.generate([[5]], 3).tokens
        for how, message in (
            ({"sampling": {"temperature": 1}}, r"sampling must be a tilewright\.engine\.Sampling, got \{"),
            ({"masks": "x"}, "masks must be a function, got 'x'"),
            ({"on_tokens": "x"}, "on_tokens must be a function, got 'x'"),
            ({"decode": "x", "stop_texts": ["a"]}, "decode must be a function, got 'x'"),
            ({"decode": bytes, "stop_texts": ["a"]}, r"decode must return a text, got b'"),
            ({"masks": lambda written: [[1, 2, 3]]}, r"a grammar's mask must be a tensor, got \[\[1, 2, 3\]\]"),
            ({"sampling": EngineSampling(temperature=0, logit_bias=every)}, "logit_bias must be above -inf for at least one token, got -inf for all"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                engine.generate([[5]], 3, **how)
        for call in (lambda wrong: engine.generate(wrong, 2), engine.logits, lambda wrong: engine.logits([[5]], wrong)):
            for wrong in (5, torch.tensor(5), torch.zeros(1, 2, dtype=torch.int64, device="meta"), [[5.5]]):
                with pytest.raises(TypeError, match=r"(prompts|continuations) must be lists of token ids, or one tensor"):
                    call(wrong)
        with pytest.raises(TypeError, match=r"prompt_tokens must be a Python integer, got 2\.5"):
            engine.warm_up(1, 2.5)
        assert engine.generate([[5]], 3, sampling=EngineSampling(temperature=0, logit_bias={1: 0.0})).tokens == plain
    with pytest.raises(TypeError, match=r"a token of logit_bias must be a Python integer, got True"):
        EngineSampling(temperature=0, logit_bias={True: 0.0})
    with pytest.raises(ValueError, match="repetition_penalty must be a normal number of float32, got 1e-50"):
        EngineSampling(repetition_penalty=1e-50)  # 0 there, by which logits were divided


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"trust_remote_code": "no"}, "trust_remote_code must be True or False, got 'no'"),
        ({"layers": -1}, r"layers must be 0 \(all\) or more, got -1"),
        ({"layers": 10**6}, r"layers must be 0 \(all\) to 30, got 1000000"),
        ({"device": "x"}, "device must be cpu, cuda or cuda:N, got 'x'"),
        ({"device": "meta"}, "device must be cpu, cuda or cuda:N, got 'meta'"),
        ({"device": 3.5}, r"device must be cpu, cuda or cuda:N, got 3\.5"),
        ({"device": "cuda:99"}, "device must be a GPU of this machine, which has [0-9]+, got 'cuda:99'"),
        ({"dtype": "bfloat16"}, r"dtype must be a torch\.dtype of floats, got 'bfloat16'"),
    ],
)
def test_a_model_is_loaded_with_options_of_their_kinds(how, message) -> None:
    """ "no" trusted a folder's code, and a million layers were built."""
    with pytest.raises(ValueError, match=message):
        load("SmolLM2-135M", **how)


def test_a_model_made_under_inference_mode_still_runs_after_an_engine() -> None:
    """PyTorch refused to call it, so `patch` could not try it."""
    with torch.inference_mode():
        model = tiny("llama", tie_word_embeddings=True)
        ids = torch.arange(3, 9)[None]
        expected = model(ids).logits
    Engine(model, max_len=64).close()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_autocast_to_another_half_changes_nothing_or_is_named() -> None:
    """torch could not join bf16 weights, keys and rotations where it casts to fp16. patch compared
    its kernels with modules that autocast had changed, and left some of these.
    """

    def made():
        return tiny("qwen3_moe", torch.bfloat16, num_hidden_layers=1, mlp_only_layers=[])

    prompt, found = [[5, 6, 7, 8]], []
    for casts in (False, True):
        with torch.autocast("cpu", dtype=torch.float16, enabled=casts):
            report = tilewright.patch(model := made()).as_dict()
            with Engine(made(), max_len=32) as engine:
                found.append((report, engine.generate(prompt, 4).tokens, engine.logits(prompt).tolist()))
    assert found[0] == found[1]
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match=r"torch\.autocast must be off or in the model's torch\.bfloat16: .*, got torch\.float16"),
    ):
        model(torch.tensor(prompt))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.tensor(prompt))
