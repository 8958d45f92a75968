"""A layer of SGLang on our kernel: a plugin with a hook. Needs SGLang and a GPU.

SGLANG_PLUGINS=tilewright python examples/sglang_plugin.py FOLDER "Once upon a time"

Run with the hook registry of SGLang 0.5.23 (tools/wheel_plugins.py), never with all of SGLang.

SGLang calls the plugins of every installed package, in each of its processes. So in a package of
yours `register` is an entry point:

    [project.entry-points."sglang.srt.plugins"]
    my_ops = "my_ops.sglang_plugin:register"

Tilewright's own one wraps RMSNorm and SiluAndMul (docs/serving.md); this file wraps GeluAndMul.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor

import tilewright

METHOD = "sglang.srt.layers.activation.GeluAndMul.forward_cuda"


def register() -> None:
    """Puts our kernel around SGLang's method. An AROUND hook gets that method first."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(METHOD, gelu_mul, HookType.AROUND)


def gelu_mul(theirs: Callable[..., Tensor], layer: Any, x: Tensor) -> Tensor:
    """What our kernel does not compute stays with SGLang: the exact GELU, strided rows."""
    fits = getattr(layer, "approximate", "tanh") == "tanh" and x.stride(-1) == 1
    return tilewright.silu_mul(x, gelu_tanh=True) if fits else theirs(layer, x)


def main() -> int:
    if find_spec("sglang") is None:
        print("this example needs SGLang and a GPU: pip install sglang", file=sys.stderr)
        return 2
    import sglang

    engine = sglang.Engine(model_path=sys.argv[1])
    for prompt in sys.argv[2:] or ["Once upon a time"]:
        print(prompt + engine.generate(prompt, {"temperature": 0.0, "max_new_tokens": 32})["text"])
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
