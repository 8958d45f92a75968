"""Our plugins and examples on the plugin machinery of vLLM and SGLang, straight from their wheels.

pip download --no-deps vllm sglang && python tools/wheel_plugins.py vllm-*.whl sglang-*.whl

Nothing of either is installed. What is theirs here: vLLM's `vllm.ir` and its registry of custom
ops, SGLang's registry of hooks. What stands in: everything around these that needs their other
packages or a GPU, and SGLang's layers.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

ROOT = Path(__file__).resolve().parent.parent
LAYERS = "sglang.srt.layers"


def package(name: str, wheel: str) -> None:
    """A package with the wheel's modules and without its own __init__, which imports the rest."""
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def stand_in(name: str, **contents: Any) -> None:
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(contents)


def vllm(wheel: str) -> None:
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        package(name, wheel)
    how = SimpleNamespace(custom_ops=["all"], enabled_custom_ops=set(), disabled_custom_ops=set())
    platform = MagicMock(**{f"is_{kind}.return_value": False for kind in ("rocm", "cpu", "tpu", "xpu", "out_of_tree", "cuda_alike")})
    logger = MagicMock()
    stand_in("vllm.logger", init_logger=lambda name: logger)
    stand_in("vllm.config", get_cached_compilation_config=lambda: how)
    stand_in("vllm.model_executor.utils", maybe_disable_graph_partition=None)
    stand_in("vllm.platforms", current_platform=platform, CpuArchEnum=MagicMock())
    stand_in("vllm.triton_utils", tl=MagicMock(), triton=MagicMock())
    stand_in("vllm.utils", collection_utils=None)
    stand_in("vllm.utils.collection_utils", LazyDict=dict)
    stand_in("vllm.logging_utils", lazy=lambda f: f, tensors_str_no_data=str)
    ir: Any = importlib.import_module("vllm.ir")
    sys.modules["vllm"].ir = ir  # type: ignore[attr-defined]

    plugin = importlib.import_module("tilewright.models.vllm_plugin")
    plugin.register()
    plugin.register()
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    for op, args in ((ir.ops.rms_norm, (x, weight, 1e-6)), (ir.ops.fused_add_rms_norm, (x, residual, weight, 1e-6))):
        with op.set_priority(["tilewright", "native"]):
            assert op.dispatch(*args).provider == "tilewright"
            assert op.dispatch(*args, 32).provider == "native"
            torch.testing.assert_close(op(*args), op.impls["native"].impl_fn(*args))

    example = runpy.run_path(str(ROOT / "examples" / "vllm_plugin.py"))
    example["register"]()
    example["register"]()
    activation: Any = importlib.import_module("vllm.model_executor.layers.activation")
    layer, both = activation.SiluAndMul(compile_native=False), torch.randn(5, 96)
    assert type(layer).__name__ == "OurSiluAndMul"
    torch.testing.assert_close(layer(both), layer.forward_native(both))
    print(f"{Path(wheel).name}: vllm.ir and the registry of custom ops run ours")


def sglang(wheel: str) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        package(name, wheel)

    def theirs(layer: Any, x: torch.Tensor, *args: Any) -> str:
        return "theirs"

    for module, names in (("layernorm", ("RMSNorm",)), ("activation", ("SiluAndMul", "GeluAndMul"))):
        stand_in(f"{LAYERS}.{module}", **{name: type(name, (), {"forward_cuda": theirs}) for name in names})
    package(LAYERS, wheel)
    os.environ["SGLANG_PLUGINS"] = "tilewright"
    importlib.import_module("tilewright.models.sglang_plugin").register()
    runpy.run_path(str(ROOT / "examples" / "sglang_plugin.py"))["register"]()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    norms, activations = sys.modules[f"{LAYERS}.layernorm"], sys.modules[f"{LAYERS}.activation"]
    norm, x, both = norms.RMSNorm(), torch.randn(5, 48), torch.randn(5, 96)
    norm.weight, norm.variance_epsilon = torch.nn.Parameter(torch.randn(48)), 1e-6
    torch.testing.assert_close(norm.forward_cuda(x), torch.nn.functional.rms_norm(x, (48,), norm.weight.detach(), 1e-6))
    assert norm.forward_cuda(x.double()) == "theirs"
    gate, up = both.chunk(2, -1)
    for name, activation in (("SiluAndMul", torch.nn.functional.silu), ("GeluAndMul", lambda t: torch.nn.functional.gelu(t, approximate="tanh"))):
        torch.testing.assert_close(getattr(activations, name)().forward_cuda(both), activation(gate) * up)
    print(f"{Path(wheel).name}: the registry of hooks runs ours")


if __name__ == "__main__":
    for file in sys.argv[1:]:
        {"vllm": vllm, "sglang": sglang}[Path(file).name.partition("-")[0]](file)
