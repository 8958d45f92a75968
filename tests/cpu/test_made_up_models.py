"""patch(): modules whose classes, attributes, arguments and wrappers are like no others'."""

from typing import Any

import pytest
import torch
from tiny_models import FEW, greedy, left_padded, logits, state_of, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as theirs

from tilewright.models import patch

SIZE, WIDE, HEAD = 32, 48, 16


class Gamma(nn.Module):
    """A norm whose weight has another name, and whose eps is a number in its code."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + torch.randn(SIZE) / 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.gamma * (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(x.dtype)


class OfConfig(nn.Module):
    """A norm that reads eps from its config, and may shift what it finds."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.scale, self.settings = nn.Parameter(1 + torch.randn(SIZE) / 8), config

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        wide = x.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.settings.rms_norm_eps) * self.scale.float()).type_as(x)
        return y if shift is None else y + shift


class ByHand(nn.Module):
    """A LayerNorm, its parameters in another order."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.plus, self.times, self.little = nn.Parameter(torch.randn(SIZE) / 8), nn.Parameter(1 + torch.randn(SIZE) / 8), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.little).sqrt() * self.times + self.plus


class UpFirst(nn.Module):
    """One matrix for both, the gate's rows behind."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(SIZE, 2 * WIDE, bias=False), nn.Linear(WIDE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.wi(x).chunk(2, -1)
        return self.wo(F.silu(gate) * up)


class MayAdd(nn.Module):
    """An MLP that adds what it may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(SIZE, WIDE), nn.Linear(SIZE, WIDE), nn.Linear(WIDE, SIZE)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.c(F.silu(self.b(x)) * self.a(x))
        return y if residual is None else y + residual


class Around(nn.Module):
    """A wrapper that passes everything on."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.inside(*args, **named)


class Lent(nn.Module):
    """An adapter beside a matrix, as PEFT's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        return self.base_layer(x) + 0.5 * self.up(self.down(x))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotation of one tensor."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


class Backwards(nn.Module):
    """Attention with its arguments in another order, and one rotation for each of queries and keys.

    It has one head of keys.
    """

    is_causal = True

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.num_key_value_groups = config, layer, 4
        self.wq, self.wk, self.wv = (nn.Linear(SIZE, heads * HEAD, bias=False) for heads in (4, 1, 1))
        self.wo = nn.Linear(4 * HEAD, SIZE)

    def forward(self, past_key_values=None, attention_mask=None, position_embeddings=None, hidden_states=None, **named):
        q, k, v = (matrix(hidden_states).unflatten(-1, (-1, HEAD)).transpose(1, 2) for matrix in (self.wq, self.wk, self.wv))
        q, k = (turned(x, *position_embeddings) for x in (q, k))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, theirs.eager_attention_forward)
        found, weights = attend(self, q, k, v, attention_mask, scaling=HEAD**-0.5, **named)
        return self.wo(found.flatten(2)), weights


def made(norm: type[nn.Module], mlp: type[nn.Module] | None = None, attention: type[nn.Module] | None = None, *, around: bool = False) -> Any:
    torch.manual_seed(3)
    model = LlamaForCausalLM(tiny().config)
    for i, layer in enumerate(model.model.layers):
        layer.input_layernorm, layer.post_attention_layernorm = norm(model.config), norm(model.config)
        layer.mlp = layer.mlp if mlp is None else mlp()
        layer.self_attn = layer.self_attn if attention is None else attention(model.config, i)
        for name, child in list(layer.named_children()) if around else ():
            setattr(layer, name, Around(child))
    model.model.norm = norm(model.config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    return model.eval()


def lent(model: Any) -> Any:
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Lent(child))
    return model


@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (lambda: made(Gamma, UpFirst), {"rms_norm", "silu_mul"}),
        (lambda: made(OfConfig, MayAdd), {"rms_norm", "silu_mul"}),
        (lambda: made(ByHand), {"layer_norm", "silu_mul"}),
        (lambda: made(Gamma, attention=Backwards), {"rms_norm", "silu_mul"}),
        (lambda: made(Gamma, around=True), {"rms_norm", "silu_mul"}),
        (lambda: lent(made(OfConfig)), {"rms_norm"}),
    ],
)
def test_80_percent_of_the_modules_are_replaced(make: Any, ops: set[str]) -> None:
    model, inputs = make(), left_padded(*FEW)
    stock, before = greedy(model, inputs, 3), state_of(model)
    with patch(model) as report:
        assert greedy(model, inputs, 3).tolist() == stock.tolist(), str(report)
    assert state_of(model) == before
    assert {line.op for line in report.replaced} == {"matmul", "rope", "attention", *ops}, str(report)
    done, left = (sum(line.count for line in lines) for lines in (report.replaced, report.kept))
    assert done >= 0.8 * (done + left), str(report)


def test_options_run_the_code_of_the_module() -> None:
    model, x, more = made(OfConfig, MayAdd), torch.randn(3, SIZE), torch.randn(3, SIZE)
    layer = model.model.layers[0]
    calls = (lambda: layer.mlp(x, more), lambda: layer.mlp(residual=more, x=x), lambda: layer.input_layernorm(x, shift=more), lambda: layer.mlp(x=x))
    with torch.inference_mode():
        stock = [call() for call in calls]
        with patch(model, only=["norms", "mlp"]):
            assert all(torch.equal(call(), found) for call, found in zip(calls, stock, strict=True))


def test_a_hook_on_an_activation_is_called_with_what_the_model_computes() -> None:
    model, inputs, seen = tiny(), left_padded(*FEW), []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, given, found: seen.append(found.shape))
    logits(model, inputs)
    stock = seen.copy()
    with patch(model) as report:
        seen.clear()  # of the tokens that `patch` tries, unless another test has had them tried
        logits(model, inputs)
    assert seen == stock
    assert len(seen) == 1
    assert [line.reason for line in report.kept if line.module == "LlamaMLP"] == ["silu_mul: a module in it has a hook, which would not be called"]


@pytest.mark.parametrize("when", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_an_activation_gets_later_is_called(when: str) -> None:
    """What it made of the activation was lost without a word."""
    model, inputs = tiny(), left_padded(*FEW)
    hook = getattr(model.model.layers[0].mlp.act_fn, when)
    with patch(model):
        before = logits(model, inputs)
        handle = hook(lambda module, given, *found: 2 * (*found, *given)[0])
        ours = logits(model, inputs)
        handle.remove()
        assert torch.equal(logits(model, inputs), before)
    hook(lambda module, given, *found: 2 * (*found, *given)[0])
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real], logits(model, inputs)[real], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours[real], before[real], atol=1e-2)


def test_an_activation_that_is_replaced_later_is_what_the_model_computes() -> None:
    model, inputs = tiny(), left_padded(*FEW)
    with patch(model):
        before = logits(model, inputs)
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
        ours = logits(model, inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real], logits(model, inputs)[real], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours[real], before[real], atol=1e-2)
