"""vLLM's plugin with a stand-in of `vllm.ir`, since vLLM cannot be installed here."""

import sys
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
