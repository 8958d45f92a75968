"""vLLM's plugin with a stand-in of `vllm.ir`, since vLLM cannot be installed here."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tilewright.models import vllm_plugin


class StandInOp:
    """register_impl(provider, *, supported, supports_args, inplace) is a decorator; impls holds
    what it registered.
    """

    def __init__(self) -> None:
        self.impls: dict[str, tuple] = {}

    def register_impl(self, provider: str, *, supported: bool = True, supports_args=None, inplace: bool = False):
        assert provider not in self.impls

        def add(function):
            self.impls[provider] = (function, supports_args, inplace)
            return function

        return add


@pytest.fixture
def ir(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    package = ModuleType("vllm")
    package.ir = SimpleNamespace(ops=SimpleNamespace(rms_norm=StandInOp(), fused_add_rms_norm=StandInOp()))
    monkeypatch.setitem(sys.modules, "vllm", package)
    return package.ir.ops


def documented(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


def test_the_providers_compute_what_vllm_documents(ir: SimpleNamespace) -> None:
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM loads plugins more than once
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    norm, fits, inplace = ir.rms_norm.impls["tilewright"]
    assert fits(x, weight, 1e-6)
    assert not inplace
    torch.testing.assert_close(norm(x, weight, 1e-6), documented(x, weight, 1e-6))
    norm, fits, inplace = ir.fused_add_rms_norm.impls["tilewright"]
    assert fits(x, residual, weight, 1e-6)
    assert not inplace
    out, total = norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, documented(x + residual, weight, 1e-6))


def test_what_they_do_not_compute_is_left_to_others(ir: SimpleNamespace) -> None:
    vllm_plugin.register()
    _, fits, _ = ir.rms_norm.impls["tilewright"]
    x, weight = torch.randn(5, 48), torch.randn(48)
    assert not fits(x, None, 1e-6)
    assert not fits(x, weight, 1e-6, 32)
    assert not fits(x, weight.bfloat16(), 1e-6)
    assert not fits(x.double(), weight.double(), 1e-6)
    assert not fits(x.T, torch.randn(5), 1e-6)


def test_a_vllm_without_an_ir_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    vllm_plugin.register()
    assert "tilewright offers vLLM nothing" in caplog.text


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_example_takes_the_place_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class SiluAndMul:
        def forward_cuda(self, x: Tensor) -> str:
            return "theirs"

        @classmethod
        def register_oot(cls, *, name: str):
            assert name not in registry  # as vLLM does
            return lambda layer: registry.setdefault(name, layer)

    registry: dict[str, type] = {}
    for name, contents in (
        ("vllm", {}),
        ("vllm.model_executor", {}),
        ("vllm.model_executor.custom_op", {"op_registry_oot": registry}),
        ("vllm.model_executor.layers", {}),
        ("vllm.model_executor.layers.activation", {"SiluAndMul": SiluAndMul}),
    ):
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    example = runpy.run_path(str(EXAMPLES / "vllm_plugin.py"))
    example["register"]()
    example["register"]()  # vLLM loads plugins more than once
    layer, x = registry["SiluAndMul"](), torch.randn(5, 96)
    torch.testing.assert_close(layer.forward_cuda(x), torch.nn.functional.silu(x[:, :48]) * x[:, 48:])
    assert layer.forward_cuda(x.T) == "theirs"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_example_without_its_engine_says_so(name: str, capsys: pytest.CaptureFixture) -> None:
    assert runpy.run_path(str(EXAMPLES / f"{name}_plugin.py"))["main"]() == 2
    assert f"pip install {name}" in capsys.readouterr().err
