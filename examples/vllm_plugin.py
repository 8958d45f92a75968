"""A layer of vLLM on our kernel: a plugin with an out-of-tree op. Needs vLLM and a GPU.

python examples/vllm_plugin.py FOLDER "Once upon a time"

Run with the op registry of vLLM 0.33 (tools/wheel_plugins.py), never with all of vLLM.

vLLM starts processes of its own and calls the plugins in each. So in a package of yours `register`
is an entry point, and VLLM_PLUGINS can leave it out:

    [project.entry-points."vllm.general_plugins"]
    my_ops = "my_ops.vllm_plugin:register"

Tilewright's own entry point offers vLLM its RMSNorm (docs/serving.md).
"""

import sys
from importlib.util import find_spec

from torch import Tensor

import tilewright

LAYER = "SiluAndMul"


def register() -> None:
    """Makes vLLM build our layer wherever a model asks for its SiluAndMul. May be called again."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.activation import SiluAndMul

    if LAYER in op_registry_oot:
        return

    @SiluAndMul.register_oot(name=LAYER)
    class OurSiluAndMul(SiluAndMul):
        def forward_cuda(self, x: Tensor) -> Tensor:
            return tilewright.silu_mul(x) if x.stride(-1) == 1 else super().forward_cuda(x)


def main() -> int:
    if find_spec("vllm") is None:
        print("this example needs vLLM and a GPU: pip install vllm", file=sys.stderr)
        return 2
    from vllm import LLM, SamplingParams

    register()
    # Else vLLM compiles SiluAndMul from torch's operators, and no kernel of a layer runs.
    llm = LLM(sys.argv[1], compilation_config={"custom_ops": [f"+{LAYER}"]})
    for found in llm.generate(sys.argv[2:] or ["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(found.prompt + found.outputs[0].text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
