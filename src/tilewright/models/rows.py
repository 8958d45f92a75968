"""What is replaced in a model, as data. patch.py applies it; a new model family is a line here.

A module class enters a row only after reading that its forward is the formula of the op: names alone do not tell (GemmaRMSNorm scales by
1 + weight).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ..ops.matmul import matmul
from ..ops.rms_norm import rms_norm
from ..ops.rope import rope
from ..ops.silu_mul import silu_mul

# config.model_type -> prefix of its module classes. SmolLM2, and many others, are of type llama.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of module and the op that takes over.

    op: name of the op, as in `tilewright.ops`.
    module: class name; `{}` stands for the family's prefix.
    forward: from the module's class to the forward its instances get; None for attention, which transformers dispatches by name.
    keep: from a module to the reason why this one stays in PyTorch, None if it need not.
    """

    op: str
    module: str
    forward: Callable[[type[nn.Module]], Callable[..., Any]] | None
    keep: Callable[[nn.Module], str | None] = lambda module: None


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, round_before_weight=True)


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x), gelu_tanh=self.config.hidden_act != "silu"))


def linear_forward(self: Any, input: Tensor) -> Tensor:
    return matmul(input, self.weight, self.bias, trans_b=True)


def rotate_half_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Stands in for the model file's own function: q and k [batch, heads, seq_len, head_dim] are views of fresh projections, rotated in place."""
    if unsqueeze_dim != 1:
        raise ValueError(f"unsqueeze_dim must be 1, got {unsqueeze_dim}")
    half = cos.shape[-1] // 2  # transformers repeats the angles for both halves
    return rope(q, k, cos[..., :half], sin[..., :half])


ROPE_FUNCTION = "apply_rotary_pos_emb"


@cache
def with_our_rope(stock: Any) -> Callable[..., Any]:
    """The forward `stock` of a model's own class, bytecode unchanged, in a copy of its globals where the RoPE function is ours.

    Models look that function up when they run. Replacing it in their file would reach every model of the class in the process.
    """
    scope = {**stock.__globals__, ROPE_FUNCTION: rotate_half_split}
    # torch.compile guards a global through the importable module of this name, where it would find the stock function and recompile for ever.
    del scope["__name__"]
    ours = FunctionType(stock.__code__, scope, stock.__name__, stock.__defaults__, stock.__closure__)
    ours.__kwdefaults__ = stock.__kwdefaults__
    return ours


def _keep_mlp(module: Any) -> str | None:
    act = module.config.hidden_act
    return None if act in ("silu", "gelu_pytorch_tanh") else f"hidden_act must be silu or gelu_pytorch_tanh, got {act}"


def _keep_linear(module: Any) -> str | None:
    if type(module) is not nn.Linear:
        return f"{type(module).__module__}.Linear is not torch's"
    return None if type(module.weight) in (nn.Parameter, Tensor) else f"weight is a {type(module.weight).__name__}, not a plain tensor"


def _keep_rope(module: nn.Module) -> str | None:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or ROPE_FUNCTION not in code.co_names:
        return f"its forward does not call {ROPE_FUNCTION} in this version of transformers"
    return None


ROWS = (
    Row("matmul", "Linear", lambda cls: linear_forward, _keep_linear),
    Row("rms_norm", "{}RMSNorm", lambda cls: rms_norm_forward),
    Row("silu_mul", "{}MLP", lambda cls: mlp_forward, _keep_mlp),
    Row("rope", "{}Attention", lambda cls: with_our_rope(cls.forward), _keep_rope),
    Row("attention", "{}Attention", None),
)

# Modules that compute something and are left alone on purpose. Containers, which only call others, are not listed.
KEPT = {
    "Embedding": "gathers rows, computes nothing",
    "{}RotaryEmbedding": "cos and sin, once per forward for all layers",
    "{}DecoderLayer": "its two residual additions",
}
# Leaf modules that no longer run once the module around them is replaced.
ABSORBED = ("SiLUActivation", "SiLU", "GELUTanh")
CONTAINERS = ("ModuleList", "{}Model", "{}ForCausalLM", "{}MLP", "{}Attention")
