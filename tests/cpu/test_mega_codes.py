"""The megakernel with e4m3 weights: transformers' tokens, what it refuses, the head's two codes."""

import pytest
import torch
from engine_models import NEW, prompts, stock_tokens, tiny

from tilewright.engine import Engine
from tilewright.engine.mega.pack import packed_bytes, two_codes
from tilewright.engine.mega.shape import SECOND
from tilewright.launch import Device
from tilewright.models.quantized import quantize

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
BF16 = torch.bfloat16


def test_engine_writes_the_tokens_of_transformers_with_e4m3_weights() -> None:
    model = tiny("llama", BF16, **SIZES)
    with Engine(model, max_len=64, mode="mega", weights="e4m3") as engine:
        found = engine.generate(prompts()[:1], NEW).tokens[0]
        nbytes = engine._programs.megas[0].packed.tiles.nbytes
        assert nbytes == packed_bytes(model.config, Device.named("CPU"), True)
    quantize(model, "e4m3")
    assert found == stock_tokens(model, prompts()[0])
    with pytest.raises(ValueError, match='weights must be None or "e4m3" with mode="mega"'):
        Engine(model, mode="mega", weights="int4-32")
    other = tiny("llama", BF16, **SIZES)
    quantize(other, "int4-32")
    with pytest.raises(ValueError, match='q_proj must be e4m3, and 16 bits in the head, with mode="mega", got int4-32'):
        Engine(other, mode="mega")
    model.lm_head = other.model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match=r"lm_head must be e4m3, and 16 bits in the head, .* got int4-32"):
        Engine(model, mode="mega")


def test_two_codes_hold_a_number_of_16_bits() -> None:
    numbers = torch.randn(7, 500).to(BF16) * torch.tensor([1e-20, 1e-3, 0.0, 1.0, 7.0, 1e4, 1e20])[:, None].to(BF16)
    numbers[3, ::3] *= 2.0**-9
    first, second, scales = two_codes(numbers)
    values = [codes.view(torch.float8_e4m3fn).float() for codes in (first, second)]
    found = (values[0] + SECOND * values[1]) * scales[:, None]
    large = numbers.abs().float() >= 2.0**-13 * numbers.abs().float().amax(1, keepdim=True)
    assert torch.equal(found[large], numbers.float()[large])
    assert ((found - numbers.float()).abs() <= 2.0**-21 * numbers.abs().float().amax(1, keepdim=True)).all()
    for bad in (float("nan"), -float("inf")):
        numbers[2, 7] = bad
        with pytest.raises(ValueError, match=r"the weight of the head must be finite with e4m3 weights .* got a NaN or an infinity"):
            two_codes(numbers)
