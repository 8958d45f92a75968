"""patch(): undone, written, copied; what it refuses."""

import copy
import importlib
import io
import pickle
import threading
import time

import pytest
import torch
from tiny_models import TINY, left_padded, logits, patched, state_of, tiny

from tilewright.launch import counted
from tilewright.models import patch

patch_module = importlib.import_module("tilewright.models.patch")  # the package has the function by that name


def test_undo_restores_every_attribute_and_every_bit() -> None:
    model, inputs = tiny(), left_padded()
    stock, before = logits(model, inputs), state_of(model)
    attention_before = model.config._attn_implementation
    report = patch(model)
    logits(model, inputs)
    report.undo()
    assert state_of(model) == before
    assert model.config._attn_implementation == attention_before
    assert torch.equal(logits(model, inputs), stock)
    report.undo()  # nothing left to do
    patch(model).undo()
    assert state_of(model) == before


def test_undo_happens_when_the_block_raises() -> None:
    model = tiny()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="inside"), patch(model):
        raise RuntimeError("inside")
    assert state_of(model) == before


@pytest.mark.parametrize("place", ["patch._apply", "probe.model_outputs", "quantized.small"])
def test_an_interrupt_leaves_the_model_as_it_was(place, monkeypatch) -> None:
    """Half of it was patched, or its weights were gone, and nobody had the report to undo it."""
    model, calls = tiny(dtype=torch.bfloat16), []
    before, weights = state_of(model), "int8" if place.startswith("quantized") else None
    module, name = place.split(".")
    owner = importlib.import_module(f"tilewright.models.{module}")
    real = getattr(owner, name)

    def interrupted(*args, **how):
        calls.append(real(*args, **how))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(patch_module, "_TRIED", set())
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch(model, weights=weights)
    assert state_of(model) == before


def test_of_two_threads_one_patches_a_model(monkeypatch) -> None:
    """Each took forwards of the other for the model's own, and undo left some of them."""
    model, errors = tiny(), []
    before, both = state_of(model), threading.Barrier(2)
    found = patch_module._found

    def slow(*args):
        time.sleep(0.05)
        return found(*args)

    def change() -> None:
        both.wait()
        try:
            patch(model)
        except ValueError as error:
            errors.append(str(error))

    monkeypatch.setattr(patch_module, "_found", slow)
    threads = [threading.Thread(target=change) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["must be unpatched" in error for error in errors] == [True]
    model.tilewright_report.undo()
    assert state_of(model) == before


def test_a_second_model_of_the_same_class_and_config_keeps_the_stock_code() -> None:
    first = tiny()
    second = type(first)(first.config).eval()  # shares the config object
    second.load_state_dict(first.state_dict())
    inputs = left_padded()
    stock = logits(second, inputs)
    with patched(first), counted() as launches:
        assert torch.equal(logits(second, inputs), stock)
        assert not launches
        logits(first, inputs)
        assert launches


def test_two_patched_models_are_undone_apart() -> None:
    first, second, inputs = tiny("llama"), tiny("qwen2"), left_padded()
    one, two = patch(first), patch(second)
    one.undo()
    with counted() as launches:
        logits(first, inputs)
        assert not launches
        logits(second, inputs)
        assert launches
    two.undo()


def test_a_deep_copy_of_a_patched_model_is_patched_and_undone_by_itself() -> None:
    model, inputs = tiny(), left_padded()
    stock = logits(model, inputs)
    with patched(model):
        ours = logits(model, inputs)
        other = copy.deepcopy(model)
        assert torch.equal(logits(other, inputs), ours)
        other.tilewright_report.undo()
        assert torch.equal(logits(other, inputs), stock)
        assert torch.equal(logits(model, inputs), ours)


def written(how: str, model):
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v2"])
def test_a_patched_model_that_is_written_and_read_is_patched_and_undone_by_itself(how: str, name: str) -> None:
    model, inputs = tiny(name), left_padded()
    stock = logits(model, inputs)
    with patched(model), counted() as launches:
        ours, ran = logits(model, inputs), dict(launches)
        other = written(how, model)
        launches.clear()
        assert torch.equal(logits(other, inputs), ours)
        assert launches == ran
        again = written(how, other)
        assert str(again.tilewright_report) == str(model.tilewright_report)
    assert torch.equal(logits(other, inputs), ours)
    other.tilewright_report.undo()
    assert torch.equal(logits(other, inputs), stock)
    assert [sorted(module.__dict__) for module in other.modules()] == [sorted(module.__dict__) for module in model.modules()]
    assert torch.equal(logits(written(how, other), inputs), stock)


def test_a_part_of_a_patched_model_is_written_too_and_its_weights_are_plain(tmp_path) -> None:
    model = tiny()
    plain = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(2, TINY["hidden_size"])
    with patched(model), torch.no_grad():
        part = model.model.layers[0].mlp
        assert torch.equal(written("pickle", part)(x), part(x))
        assert copy.copy(part).forward.__self__ is not part
        torch.save(model.state_dict(), tmp_path / "weights")
        model.save_pretrained(tmp_path / "folder")
    loaded = torch.load(tmp_path / "weights", weights_only=True)
    assert list(loaded) == list(plain)
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)
    assert "tilewright" not in (tmp_path / "folder" / "config.json").read_text()
    other = type(model).from_pretrained(tmp_path / "folder")
    assert torch.equal(logits(other.eval(), left_padded()), logits(model, left_padded()))


def test_patching_twice_raises() -> None:
    model = tiny()
    with patch(model), pytest.raises(ValueError, match=r"model must be unpatched, got .*undo"):
        patch(model)


def test_what_is_no_supported_model_raises() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel"):
        patch(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=16))
    with pytest.raises(ValueError, match=r"model must be one that has its weights, got weights on the meta device"):
        patch(empty)


def test_a_model_in_which_nothing_matches_raises_and_is_unchanged() -> None:
    model = tiny()
    model.lm_head, model.model.norm = torch.nn.Identity(), torch.nn.Identity()
    model.model.layers = model.model.layers[:0]
    before = state_of(model)
    with pytest.raises(ValueError, match="nothing matched"):
        patch(model)
    assert state_of(model) == before


def test_a_forward_that_is_hooked_already_is_left_alone() -> None:
    model = tiny()
    projection = model.model.layers[0].self_attn.q_proj
    hooked = projection.forward = lambda x: torch.nn.functional.linear(x, projection.weight)
    with patch(model) as report:
        assert projection.forward is hooked
        logits(model, left_padded())
    (line,) = (line for line in report.kept if line.module == "Linear")
    assert line.count == 1
    assert line.names == ("q_proj",)
    assert "replaced on this instance already" in line.reason


def test_what_attention_does_not_compute_raises() -> None:
    model, inputs = tiny(), left_padded()
    with patched(model):
        for option in ({"position_bias": torch.zeros(1)}, {"cu_seq_lens_q": torch.tensor([0, 11])}):
            with pytest.raises(ValueError, match=f"{next(iter(option))} must be None"):
                logits(model, inputs, **option)
        with pytest.raises(ValueError, match="is_causal must be True"):
            logits(model, inputs, is_causal=False)
        with pytest.raises(ValueError, match=r"attention_mask must be a 2-D padding mask"):
            logits(model, {**inputs, "attention_mask": torch.zeros(3, 1, 11, 11)})
        with pytest.raises(ValueError, match="got packed sequences"):
            logits(model, {"input_ids": inputs["input_ids"], "position_ids": torch.arange(11).remainder(6).expand(3, -1)}, use_cache=False)
        holes = inputs["attention_mask"].clone()
        holes[1, 5] = 0
        with pytest.raises(RuntimeError, match="pad on the left"):
            logits(model, {**inputs, "attention_mask": holes})


def test_a_tokenizer_that_generate_hands_on_changes_nothing() -> None:
    """As with stop_strings, and as `transformers serve` does."""
    model, ids = tiny(), torch.tensor([[5, 6, 7]])
    with patch(model):
        ours = model.generate(ids, max_new_tokens=2, do_sample=False, tokenizer=object())
        assert torch.equal(ours, model.generate(ids, max_new_tokens=2, do_sample=False))


def test_attention_weights_are_refused_where_the_call_asks_and_kept_where_the_config_does() -> None:
    model, inputs = tiny(), left_padded()
    with patched(model), pytest.raises(ValueError, match="output_attentions must be None"):
        logits(model, inputs, output_attentions=True)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with patch(model) as report, torch.inference_mode():
        weights = model(**inputs).attentions
    assert [w.shape for w in weights] == [(3, 4, 11, 11)] * 2
    assert any("config.output_attentions" in line.reason for line in report.kept)


def test_attention_dropout_raises_in_training_and_gradients_are_refused() -> None:
    model, inputs = tiny(attention_dropout=0.1), left_padded()
    with patched(model):
        with pytest.raises(ValueError, match=r"requires_grad must be False, got True: .*torch.no_grad"):
            model(**inputs)
        model.train()
        with pytest.raises(ValueError, match="attention dropout must be 0"):
            logits(model, inputs)
