"""patch(): every architecture of transformers, and one that nobody has seen."""

import pytest
import torch
from architectures import ARCHITECTURES
from tiny_models import FEW, greedy, left_padded, logits, patched, state_of, tiny, tiny_model
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as theirs

from tilewright.launch import counted
from tilewright.models import patch

REPLACED: dict[str, set[str]] = {}
ROUTED = ("ernie4_5_moe", "hy_v3", "minimax_m2")  # by a tensor that lies in a module of the router, or in its mixture


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_transformers(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    model, inputs = tiny_model({"model_type": name, **ARCHITECTURES[name]}), left_padded(*FEW)
    stock, before = greedy(model, inputs, 3), state_of(model)
    with patch(model) as report:
        assert greedy(model, inputs, 3).tolist() == stock.tolist(), str(report)
    REPLACED[name] = {line.op for line in report.replaced}
    assert state_of(model) == before
    assert {"matmul"} < REPLACED[name]
    assert name not in ROUTED or "moe_route" in REPLACED[name]
    done, left = (sum(line.count for line in lines) for lines in (report.replaced, report.kept))
    assert done > left, str(report)


def test_at_least_45_architectures_have_their_attention_replaced() -> None:
    if len(REPLACED) < len(ARCHITECTURES) - 10:
        pytest.skip("only some of the architectures ran")
    assert sum("attention" in ops for ops in REPLACED.values()) >= 45


class Zeta(nn.Module):
    """A norm by another name, its eps an attribute by another name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) / 8)
        self.tiny_number = 3e-4

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tiny_number) * (1 + self.weight.float())).to(rows.dtype)


class Theta(nn.Module):
    """A gated MLP."""

    def __init__(self, size: int, wide: int) -> None:
        super().__init__()
        self.back, self.one, self.two = nn.Linear(wide, size), nn.Linear(size, wide), nn.Linear(size, wide)

    def forward(self, rows: Tensor) -> Tensor:
        return self.back(self.one(rows) * nn.functional.gelu(self.two(rows), approximate="tanh"))


class Iota(nn.Module):
    """A matrix held the other way round."""

    def __init__(self, size: int, wide: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size, wide) / size**0.5), nn.Parameter(torch.randn(wide))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight + self.bias


def spin(a: Tensor, b: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A rotation of neighbours, with angles that are repeated for both halves."""
    c, s = (x[:, None, :, : x.shape[-1] // 2] for x in (c, s))
    turned = (torch.stack((x[..., ::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., ::2] * s), -1).flatten(-2) for x in (a, b))
    first, second = turned
    return first, second


class Kappa(nn.Module):
    """Attention without rows of its own class."""

    is_causal = True

    def __init__(self, config, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim, self.num_key_value_groups = config, layer, config.head_dim, 2
        self.wide = nn.Linear(config.hidden_size, 8 * config.head_dim)
        self.out = Iota(4 * config.head_dim, config.hidden_size)

    def forward(self, hidden_states: Tensor, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        parts = self.wide(hidden_states).unflatten(-1, (8, self.head_dim)).transpose(1, 2).split((4, 2, 2), 1)
        q, k = spin(*parts[:2], *position_embeddings)
        k, v = (k, parts[2]) if past_key_values is None else past_key_values.update(k, parts[2], self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, theirs.eager_attention_forward)
        found, weights = attend(self, q, k, v, attention_mask, scaling=0.2, **kwargs)
        return self.out(found.flatten(2)), weights


class Lambda(nn.Module):
    """What no kernel of ours computes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.weight.sigmoid()


class Omega(LlamaForCausalLM):
    """Nothing in it has the name of anything in transformers."""


def unseen(dtype: torch.dtype = torch.float32) -> Omega:
    torch.manual_seed(3)
    model = Omega(tiny().config)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn, layer.mlp = Kappa(model.config, i), Theta(32, 48)
        layer.input_layernorm, layer.post_attention_layernorm = Zeta(32), Zeta(32)
    model.model.norm = nn.Sequential(Zeta(32), Lambda(32))
    model.lm_head = Iota(32, 96)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    return model.eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_architecture_that_nobody_has_seen_is_patched_at_80_percent_of_its_modules(dtype: torch.dtype) -> None:
    model, inputs = unseen(dtype), left_padded()
    stock, before = greedy(model, inputs, 4), state_of(model)
    with patch(model) as report, counted() as launches:
        ours = greedy(model, inputs, 4)
    found = {(line.op, line.module): line.count for line in report.replaced}
    assert found == {
        ("matmul", "Linear"): 8,
        ("matmul", "Iota"): 3,
        ("rms_norm", "Zeta"): 5,
        ("silu_mul", "Theta"): 2,
        ("rope", "Kappa"): 2,
        ("attention", "Kappa"): 2,
    }
    kept = sum(line.count for line in report.kept)
    assert sum(found.values()) >= 0.8 * (sum(found.values()) + kept)
    assert any(line.module == "Lambda" and line.reason == "no kernel of ours computes it" for line in report.kept)
    assert {"rms_norm_kernel", "silu_mul_kernel", "rope_kernel", "matmul_kernel"} <= set(launches)
    assert state_of(model) == before
    if dtype is torch.float32:
        assert ours.tolist() == stock.tolist()


@pytest.mark.parametrize(
    ("how", "ops"), [({"only": ["norms", "mlp"]}, {"rms_norm", "silu_mul"}), ({"skip": ["attention", "linear"]}, {"rms_norm", "silu_mul", "rope"})]
)
def test_kinds_can_be_chosen(how: dict, ops: set[str]) -> None:
    model, inputs = tiny(), left_padded()
    stock = logits(model, inputs)
    with patch(model, **how) as report:
        found = logits(model, inputs)
    assert {line.op for line in report.replaced} == ops
    torch.testing.assert_close(found[inputs["attention_mask"].bool()], stock[inputs["attention_mask"].bool()], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="only must be a list of kinds, of linear, norms, mlp, moe, rope, attention"):
        patch(model, only="norms")
    with pytest.raises(ValueError, match="skip must be a list of kinds"):
        patch(model, skip=["norm"])


class Off(Zeta):
    """Nearly a norm."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * 1.001


class Twisted(Kappa):
    """Rotates with our kernel's formula on random rows, but attends to keys from the wrong end."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, theirs.eager_attention_forward)
        parts = self.wide(hidden_states).unflatten(-1, (8, self.head_dim)).transpose(1, 2).split((4, 2, 2), 1)
        q, k = spin(*parts[:2], *position_embeddings)
        found, weights = attend(self, q, k.flip(2), parts[2].flip(2), attention_mask, scaling=0.2, bias_of_positions=torch.ones(1))
        return self.out(found.flatten(2)), weights


def test_what_computes_nearly_the_same_stays_with_the_reason() -> None:
    model = unseen()
    model.model.norm = Off(32)
    model.model.layers[0].self_attn = Twisted(model.config, 0)
    inputs = left_padded()
    stock = logits(model, inputs)
    with patch(model) as report:
        found = logits(model, inputs)
    reasons = {line.module: line.reason for line in report.kept}
    assert reasons["Off"] == "no kernel of ours computes it"
    assert reasons["Twisted"].startswith("attention: bias_of_positions must be None")
    assert reasons["Kappa"] == reasons["Twisted"]
    assert ("rope", "Twisted", 1) in {(line.op, line.module, line.count) for line in report.replaced}
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[seen], stock[seen], atol=1e-4, rtol=1e-4)


def test_random_numbers_and_gradients_are_left_alone() -> None:
    model = tiny()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model.train()
    with patched(model):
        assert model.training
        assert all(module.training for module in model.modules())
        assert torch.equal(torch.rand(3), expected)
