"""The megakernel with e4m3 weights: transformers' tokens, what it refuses, sums in fp16, the head's
two codes.
"""

from pathlib import Path

import cuda.tile as ct
import pytest
import torch
from engine_models import NEW, prompts, stock_tokens, tiny
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.engine import Engine
from tilewright.engine.mega.pack import packed_bytes, two_codes
from tilewright.engine.mega.shape import SECOND
from tilewright.engine.mega.tiles import by_tree, in_units, pairs_of, times
from tilewright.interpret import interpret
from tilewright.launch import Device
from tilewright.models.quantized import quantize

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
BF16 = torch.bfloat16


def test_engine_writes_the_tokens_of_transformers_with_e4m3_weights() -> None:
    model = tiny("llama", BF16, **SIZES)
    with Engine(model, max_len=64, mode="mega", weights="e4m3") as engine:
        found = engine.generate(prompts()[2:3], NEW).tokens[0]
        nbytes = engine._programs.megas[0].packed.tiles.nbytes
        assert nbytes == packed_bytes(model.config, Device.named("CPU"), True)
    quantize(model, "e4m3")
    assert found == stock_tokens(model, prompts()[2])
    with pytest.raises(ValueError, match='weights must be None or "e4m3" with mode="mega"'):
        Engine(model, mode="mega", weights="int4-32")
    other = tiny("llama", BF16, **SIZES)
    quantize(other, "int4-32")
    with pytest.raises(ValueError, match='q_proj must be e4m3, and 16 bits in the head, with mode="mega", got int4-32'):
        Engine(other, mode="mega")
    model.lm_head = other.model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match=r"lm_head must be e4m3, and 16 bits in the head, .* got int4-32"):
        Engine(model, mode="mega")


def test_generate_quantises_for_the_megakernel(tmp_path: Path) -> None:
    """The command refused what `Engine` runs."""

    def run(*arguments: object):
        how = ("generate", "--model", tmp_path, "--prompt", "AB", "--raw", "--max-new-tokens", 3, "--device", "cpu")
        return CliRunner().invoke(app, [str(a) for a in (*how, *arguments)])

    tiny("llama", BF16, **SIZES).save_pretrained(tmp_path)
    eager, mega = (run("--weights", "e4m3", "--engine", engine) for engine in ("eager", "mega"))
    assert mega.exit_code == 0, mega.output
    assert "mega_kernel" in mega.output
    assert mega.output.splitlines()[1:3] == eager.output.splitlines()[1:3]  # the prompt and the tokens
    refused = run("--weights", "int8", "--engine", "mega")
    assert (refused.exit_code, refused.stderr) == (2, "error: --weights must be e4m3 with --engine mega, got 'int8'\n")
    compared = run("--weights", "int8", "--compare")
    assert compared.stderr.startswith("error: --weights must come without --compare, got 'int8': stock transformers")


@ct.kernel
def dot(CODES, X, OUT):
    """Of a row of 64 e4m3 codes and of bf16 numbers, in words."""
    rows, unit = in_units((ct.load(X, (0, 0), (1, 32)),), ct.bfloat16)
    terms = times(by_tree(pairs_of(ct.load(CODES, (0, 0), (1, 16)))), by_tree(rows[0]))
    ct.store(OUT, (0,), ct.sum(terms, axis=1) * unit)


LARGEST, NAN, INFINITY = 448.0, float("nan"), float("inf")


@pytest.mark.parametrize("power", [-126, -20, 0, 100, 112])
def test_sums_in_fp16_neither_overflow_nor_lose_what_is_small(power: int) -> None:
    def found(codes: torch.Tensor, x: torch.Tensor) -> float:
        out = torch.zeros(1)
        words = codes.to(torch.float8_e4m3fn).view(torch.int32), (x * 2.0**power).to(BF16).view(torch.int32)
        interpret(dot, (1,), (words[0][None], words[1][None], out))
        return float(out) * 2.0**-power

    most, ones = 2.0 - 2.0**-7, torch.ones(64)
    assert found(LARGEST * ones, most * ones) == pytest.approx(64 * LARGEST * most, rel=2.0**-11)
    assert found(-LARGEST * ones, most * ones) == pytest.approx(-64 * LARGEST * most, rel=2.0**-11)
    assert found(LARGEST * ones, 0 * ones) == 0
    one = torch.eye(64)
    small = one[0] + one[9] * 2.0**-17  # small beside the largest, which a code of 0 leaves out
    assert power < -100 or found(LARGEST * one[9], small) == LARGEST * 2.0**-17
    for bad in (INFINITY, -INFINITY, NAN):
        assert found(ones, ones.masked_fill(one[5] > 0, bad)) == pytest.approx(bad, nan_ok=True)
    assert found(ones.masked_fill(one[5] > 0, NAN), ones) == pytest.approx(NAN, nan_ok=True)


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
