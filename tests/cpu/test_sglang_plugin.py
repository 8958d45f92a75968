"""SGLang's plugin with a stand-in of `sglang.srt.plugins`, since SGLang cannot be installed
here.
"""

import enum
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tilewright.launch import counted
from tilewright.models import sglang_plugin


class HookType(enum.Enum):
    AROUND = "around"


class StandIn:
    """`register(target, hook, type)`: an AROUND hook gets the original function, then its
    arguments.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, tuple] = {}

    def register(self, target: str, hook, hook_type: HookType) -> None:
        assert target not in self.hooks
        self.hooks[target] = hook, hook_type

    def around(self, target: str):
        hook, hook_type = self.hooks[target]
        assert hook_type is HookType.AROUND
        return lambda *args, **more: hook(original, *args, **more)


def original(*args, **more) -> str:
    return "theirs"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found, module = StandIn(), ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry, module.HookType = found, HookType
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("SGLANG_PLUGINS", "other, tilewright")
    return found


NORM, ACTIVATION = "sglang.srt.layers.layernorm.RMSNorm.forward_cuda", "sglang.srt.layers.activation.SiluAndMul.forward_cuda"


def layer(**more) -> SimpleNamespace:
    return SimpleNamespace(**{"weight": torch.nn.Parameter(torch.randn(48)), "variance_epsilon": 1e-6, **more})


def documented(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def test_the_hooks_compute_what_sglang_does(registry: StandIn) -> None:
    sglang_plugin.register()
    norm, activation, module = registry.around(NORM), registry.around(ACTIVATION), layer()
    x, residual = torch.randn(5, 48), torch.randn(5, 48)
    with torch.no_grad(), counted() as launches:
        torch.testing.assert_close(norm(module, x), documented(x, module.weight, 1e-6))
        out, total = norm(module, x, residual, None)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(out, documented(x + residual, module.weight, 1e-6))
        torch.testing.assert_close(activation(None, x), torch.nn.functional.silu(x[:, :24]) * x[:, 24:])
    assert launches == {"rms_norm_kernel": 2, "silu_mul_kernel": 1}


def test_what_they_do_not_compute_is_left_to_sglang(registry: StandIn) -> None:
    sglang_plugin.register()
    norm, activation, x = registry.around(NORM), registry.around(ACTIVATION), torch.randn(5, 48)
    others = (
        {"variance_size_override": 32},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
        {"_quant_linear": torch.nn.Linear(1, 1)},
    )
    for module in (layer(**other) for other in others):
        assert norm(module, x) == "theirs"
    assert norm(layer(), x, x, x) == "theirs"  # something else to be added
    assert norm(layer(), x, post_residual_addition=x) == "theirs"
    assert norm(layer(), x.bfloat16()) == "theirs"
    assert norm(layer(), x, x.bfloat16()) == "theirs"
    assert activation(None, x.T) == "theirs"


def test_sglang_is_left_alone_unless_asked(registry: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "")
    sglang_plugin.register()
    assert not registry.hooks


def test_an_sglang_without_plugins_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "tilewright")
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    sglang_plugin.register()
    assert "tilewright offers SGLang nothing" in caplog.text


def test_the_example_wraps_one_more_layer(registry: StandIn) -> None:
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "sglang_plugin.py"))
    example["register"]()
    gelu_mul, x = registry.around(example["METHOD"]), torch.randn(5, 96)
    torch.testing.assert_close(gelu_mul(None, x), torch.nn.functional.gelu(x[:, :48], approximate="tanh") * x[:, 48:])
    assert gelu_mul(SimpleNamespace(approximate="none"), x) == "theirs"
    assert gelu_mul(None, x.T) == "theirs"
