"""Reads a transformers model as a `Decoder`, with its own weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error
from ..models import linear_attention
from ..models.quantized import QuantizedLinear, QuantizedMixture
from ..models.shard import DIVIDED
from .attention import GroupedAttention, LatentAttention
from .checks import check_code
from .families import (
    Ropes,
    gated_norm_of,
    head_norms,
    mixers_of,
    mlp_of,
    norm_of,
    norms_of,
    pairs_of,
    plain_mlp_of,
    rope_types,
    routing_of,
    said,
    scales_of,
    softcap_of,
    stream_norm_of,
    window_of,
)
from .layers import Attention, Decoder, Layer, Mlp, Rope
from .mlp import Activation, BesideMlp, Experts, GatedMlp, PlainMlp
from .parallel import Group
from .recurrent import Convolution, DeltaRule, SideBySide, StateSpace
from .weights import Fusion, Matrix, matrix_of, without_inference_tensors

# Rotations whose frequencies do not depend on the length of the sequence.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def read(
    model: Any, fusion: Fusion, max_len: int, on_progress: Callable[[str, int, int], None], group: Group | None = None, *, codes: bool = False
) -> Decoder:
    """The model as a `Decoder`.

    `fusion` replaces fused weights in the model by views.

    group: of the ranks that hold the other parts. codes: keys and values are cached in 8 bits.

    Raises: ValueError for a model that the engine can't run, before anything is changed.
    """
    stem, config = text_part(model)
    if config.model_type not in MODEL_TYPES:
        raise argument_error("model.config.model_type", f"one of {', '.join(MODEL_TYPES)}", config.model_type)
    if not hasattr(model, "lm_head"):
        raise argument_error("model", "a causal language model, with an lm_head", type(model).__name__)
    _check(model, stem, config, max_len)
    if group is not None:
        _check_group(stem, config)
    without_inference_tensors(model)
    ropes = Ropes(stem, max_len)
    rank = 0 if group is None else group.shard.rank
    layers = []
    for i, (layer, below) in enumerate(pairs_of(stem.layers)):
        on_progress("fusing weights", i, len(stem.layers))
        before, behind, mlp_before, mlp_behind = norms_of(layer)
        found: list[Any] = []
        for mixer in mixers_of(layer):
            op = linear_attention.ours_of(type(mixer))[0]
            if op is not None:
                found.append(_state_space(mixer) if op == "ssd" else _delta_rule(mixer, fusion))
            elif hasattr(mixer, "kv_b_proj"):
                found.append(_latent_attention(mixer, ropes.of(None, said(config, "rope_interleave", True)), fusion))
            else:
                found.append(_attention(mixer, config, ropes, fusion, codes))
        attention: Attention = found[0] if len(found) == 1 else _side_by_side(layer, *found)
        if below is None:
            mlp = _second_half(layer, fusion, rank)
            if mlp is not None and mlp_before is behind is None:
                attention, mlp = _beside_mlp(layer, attention, mlp), None
        else:
            mlp, mlp_before = _mlp(below.mixer, fusion, rank), stream_norm_of(below.norm)
        layers.append(Layer(before, attention, mlp_before, mlp, behind, mlp_behind))
    on_progress("fusing weights", len(stem.layers), len(stem.layers))
    norm = stream_norm_of(next(getattr(stem, name) for name in ("norm", "final_layernorm", "norm_f") if hasattr(stem, name)))
    parts = stem.get_input_embeddings().weight.data, tuple(layers), norm, matrix_of(model.lm_head), group
    return Decoder(*parts, scales_of(stem, config), said(config, "final_logit_softcapping", None))


_WHOLE_NORMS = ("olmo2", "olmo3", "olmoe", "minimax_m2")
_LATENTS, _ROPE_DIMS = (64, 128, 256, 512), (16, 32, 64)  # what mla_decode takes
# fmt: off
MODEL_TYPES = (
    "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text",
    "olmo2", "olmo3", "granite", "glm", "glm4", "smollm3", "ernie4_5", "seed_oss", "helium", "exaone4", "arcee",
    "cwm", "internlm3", "iquestcoder", "youtu", "cohere", "cohere2", "starcoder2", "stablelm", "phi", "olmo",
    "bamba", "granitemoehybrid", "mamba2", "nemotron_h", "falcon_h1", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text",
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe", "dots1",
    "exaone_moe", "hy_v3", "mellum", "minimax_m2", "solar_open", "deepseek_v2", "deepseek_v3", "glm4_moe_lite",
    "axk1",
)
# fmt: on
# Models of texts and pictures that read a text without pictures as their text model alone does
WRAPPERS = ("gemma3", "mistral3")


def text_part(model: Any) -> tuple[Any, Any]:
    """The part of a model between its tokens and its head, and the config of that part."""
    stem = model.base_model
    return (stem.language_model, stem.language_model.config) if model.config.model_type in WRAPPERS else (stem, model.config)


def _check_group(stem: Any, config: Any) -> None:
    """What is neither divided nor read whole would be counted once for each rank."""
    if config.model_type in _WHOLE_NORMS:
        raise argument_error("group", f"None for a {config.model_type} model, whose norms take in the heads of all ranks", "a group")
    for path, module in stem.layers.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear | QuantizedLinear) and not (name in DIVIDED or name in _WHOLE):
            raise argument_error("group", f"None for a {config.model_type} model, whose {name} the ranks do not divide", "a group")


_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate")


def _check(model: Any, stem: nn.Module, config: Any, max_len: int) -> None:
    parts = {*stem.modules(), *model.lm_head.modules()}
    dtypes = {p.dtype for part in parts for p in part.parameters(recurse=False)}
    if len(dtypes) > 1:
        raise argument_error("the model's parameters", "of one dtype", sorted(map(str, dtypes)))
    _check_config(config, max_len, *dtypes)
    for name, module in model.named_modules():
        if module in parts or module is model:
            check_code(name or "model", module)
        if module in parts and isinstance(module, nn.Linear) and (type(module) is not nn.Linear or type(module.weight) not in (nn.Parameter, Tensor)):
            raise argument_error(name, "a plain torch.nn.Linear", f"{type(module).__name__} of {type(module.weight).__name__}")
    _check_experts(stem, config, *dtypes)


def _check_config(config: Any, max_len: int, dtype: torch.dtype) -> None:
    for kind in rope_types(config):
        if kind not in _FIXED_ROPE:
            raise argument_error("rope_type", f"one of {', '.join(_FIXED_ROPE)}", kind)
    for name in ("clip_qkv", "use_bidirectional_attention", "qk_layernorm"):
        if getattr(config, name, None) not in (None, False):
            raise argument_error(f"model.config.{name}", "None or False", getattr(config, name))
    rotation = getattr(config, "rope_parameters", None) or {}
    if rotation.get("llama_4_scaling_beta"):  # a factor of the queries, which is 1 up to here
        most = rotation["original_max_position_embeddings"]
        if max_len > most:
            raise argument_error("max_len", f"at most {most}, behind which {config.model_type} scales queries", max_len)
    if getattr(config, "kv_lora_rank", None) is not None:
        if config.kv_lora_rank not in _LATENTS:
            raise argument_error("model.config.kv_lora_rank", f"one of {_LATENTS}", config.kv_lora_rank)
        if config.qk_rope_head_dim not in _ROPE_DIMS:
            raise argument_error("model.config.qk_rope_head_dim", f"one of {_ROPE_DIMS}", config.qk_rope_head_dim)
        if dtype is torch.float32:
            raise argument_error("the dtype of a model with latents", "bfloat16 or float16", "float32")


def _check_experts(model: nn.Module, config: Any, dtype: torch.dtype) -> None:
    experts = [module.experts for module in model.modules() if hasattr(module, "experts")]
    if not experts:
        return
    for module in experts:
        if not isinstance(module, QuantizedMixture) and not hasattr(module, "gate_up_proj"):
            raise argument_error("a mixture of experts", "of experts with a gate", f"a {type(module).__name__}")
    if config.hidden_act != "silu":
        raise argument_error("model.config.hidden_act", "silu with a mixture of experts", config.hidden_act)
    if dtype is torch.float32:
        raise argument_error("the dtype of a mixture of experts", "bfloat16 or float16", "float32")


def _attention(module: Any, config: Any, ropes: Ropes, fusion: Fusion, codes: bool) -> Attention:
    head_dim = module.head_dim
    qkv = matrix_of(module.qkv_proj) if hasattr(module, "qkv_proj") else fusion.stacked(module.q_proj, module.k_proj, module.v_proj)
    out = matrix_of(module.o_proj if hasattr(module, "o_proj") else module.dense)
    q_heads = out.columns // head_dim
    gated = hasattr(module, "q_proj") and module.q_proj.out_features == 2 * out.columns
    asking = 2 * q_heads if gated else q_heads
    kv_heads = (qkv.rows // head_dim - asking) // 2
    if (asking + 2 * kv_heads) * head_dim != qkv.rows:
        raise argument_error(
            f"queries, keys and values of a {type(module).__name__}", f"heads of {head_dim}, {q_heads} of queries", f"{qkv.rows} rows"
        )
    rope = ropes.of_attention(module)
    if 2 * rope.cos.shape[1] > head_dim:
        raise argument_error(f"the rotation of a {type(module).__name__}", f"of at most {head_dim} elements, those of a head", 2 * rope.cos.shape[1])
    return GroupedAttention(
        qkv,
        out,
        q_heads,
        kv_heads,
        head_dim,
        module.scaling,
        rope,
        window_of(module, config),
        sinks=module.sinks.data.float() if hasattr(module, "sinks") else None,
        softcap=softcap_of(module),
        codes=codes,
        gated=gated,
        **head_norms(module),
    )


def _latent_attention(module: Any, rope: Rope, fusion: Fusion) -> Attention:
    rope_dim = module.qk_rope_head_dim
    if 2 * rope.cos.shape[1] != rope_dim:
        raise argument_error("the model's rotation", f"of {rope_dim} elements, qk_rope_head_dim", 2 * rope.cos.shape[1])
    if module.q_lora_rank is None:
        down, q_up = fusion.stacked(module.q_proj, module.kv_a_proj_with_mqa), None
    else:
        down = fusion.stacked(module.q_a_proj, module.kv_a_proj_with_mqa)
        q_up = (norm_of(module.q_a_layernorm), matrix_of(module.q_b_proj))
    kv_b, rows = module.kv_b_proj, module.qk_nope_head_dim + module.v_head_dim
    kv_up = (kv_b.wide if isinstance(kv_b, QuantizedLinear) else kv_b.weight.data).view(-1, rows, module.kv_lora_rank)
    parts = (down, q_up, norm_of(module.kv_a_layernorm), kv_up, matrix_of(module.o_proj))
    return LatentAttention(*parts, module.qk_nope_head_dim, rope_dim, module.scaling, rope)


def _state_space(module: Any) -> StateSpace:
    reason = linear_attention.keep_linear_attention(module, "ssd")
    if reason is not None:
        raise argument_error(f"a {type(module).__name__}", "one that ssd computes", reason)
    vectors = -module.A_log.data.float().exp(), module.D.data, module.dt_bias.data
    sizes = module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size
    ends = matrix_of(module.in_proj), matrix_of(module.out_proj)
    norm = None if isinstance(module.norm, nn.Identity) else gated_norm_of(module.norm)
    factors = None
    if hasattr(module, "mup_vector"):
        _check_factor(module.ssm_in_multiplier, "ssm_in_multiplier", module.in_proj)
        factors = module.mup_vector.data.float().flatten() * module.ssm_in_multiplier
    return StateSpace(ends[0], _convolution(module), *vectors, norm, ends[1], *sizes, tuple(module.time_step_limit), factors)


def _check_factor(factor: float, name: str, *linears: Any) -> None:
    """Raises ValueError unless a factor of rows may be one of their products with these."""
    if factor != 1.0 and any(linear.bias is not None for linear in linears):
        raise argument_error(f"model.config.{name}", "1 with biases", factor)


def _side_by_side(layer: Any, state: Any, attention: Any) -> SideBySide:
    """Factors of rows and of keys become ones of scores and of results."""
    module, rows = layer.self_attn, layer.attention_in_multiplier
    _check_factor(rows, "attention_in_multiplier", module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    attention = replace(attention, scale=attention.scale * rows**2 * module.key_multiplier)
    return SideBySide(state, attention, (layer.ssm_out_multiplier, layer.attn_out_multiplier * rows))


def _delta_rule(module: Any, fusion: Fusion) -> DeltaRule:
    reason = linear_attention.keep_linear_attention(module, "gated_delta_rule")
    if reason is not None:
        raise argument_error(f"a {type(module).__name__}", "one that gated_delta_rule computes", reason)
    order = None
    if hasattr(module, "in_proj_qkvz"):  # by heads of k: the module's own code says what is where
        rows = [torch.arange(linear.out_features, dtype=torch.int32) for linear in (module.in_proj_qkvz, module.in_proj_ba)]
        rows[1] += len(rows[0])
        order = torch.cat([part.flatten() for part in module.fix_query_key_value_ordering(*(x[None, None] for x in rows))]).to(module.A_log.device)
        projection = fusion.stacked(module.in_proj_qkvz, module.in_proj_ba)
    else:
        projection = fusion.stacked(module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
    norm, heads = gated_norm_of(module.norm), module.num_v_heads
    if norm.groups != 1 or norm.gate_first:
        raise argument_error(f"a {type(module.norm).__name__}", "a norm of a head, then its gate", norm)
    norm = replace(norm, weight=norm.weight.repeat(heads), groups=heads)
    vectors = -module.A_log.data.float().exp(), module.dt_bias.data.float()
    sizes = module.num_k_heads, heads, module.head_k_dim, module.head_v_dim
    return DeltaRule(projection, order, _convolution(module), *vectors, norm, matrix_of(module.out_proj), *sizes)


def _convolution(module: Any) -> Convolution:
    return Convolution(module.conv1d.weight.data[:, 0], None if module.conv1d.bias is None else module.conv1d.bias.data)


def _second_half(layer: Any, fusion: Fusion, rank: int) -> Mlp | None:
    """Its MLP, its experts, or its experts beside the one of all tokens."""
    found = [part for name in ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp") if (part := getattr(layer, name, None)) is not None]
    if not found:
        return None
    mlp = _mlp(found[0], fusion, rank)
    if len(found) == 1:
        return mlp
    if len(found) > 2 or not isinstance(mlp, Experts) or mlp.shared is not None:
        raise argument_error(f"a {type(layer).__name__}", "a layer with one MLP, or with experts and one that all tokens take", len(found))
    return replace(mlp, shared=_dense(found[1], fusion))


def _beside_mlp(layer: Any, attention: Any, mlp: Mlp) -> BesideMlp:
    if not isinstance(attention, GroupedAttention) or not isinstance(mlp, GatedMlp | PlainMlp):
        raise argument_error(
            f"a {type(layer).__name__}", "a layer of an attention beside an MLP", f"{type(attention).__name__} and {type(mlp).__name__}"
        )
    return BesideMlp(attention, mlp)


def _mlp(module: Any, fusion: Fusion, rank: int) -> Mlp:
    if not hasattr(module, "experts"):
        found = plain_mlp_of(module)
        if found is None:
            return _dense(module, fusion)
        up, down, activation = found
        return PlainMlp(matrix_of(getattr(module, up)), matrix_of(getattr(module, down)), activation)
    if getattr(module.experts, "is_transposed", False) or getattr(module.experts, "bias_gate_up", None) is not None:
        return _gpt_oss_experts(module, fusion, rank)
    experts, router = module.experts, module.gate if hasattr(module, "gate") else module.router
    if isinstance(experts, QuantizedMixture):
        matrices: tuple[Any, Any] = experts.gate_up, experts.down
    else:
        matrices = experts.gate_up_proj.data.unflatten(1, (2, -1)), experts.down_proj.data
    first = rank * len(matrices[0].words if isinstance(experts, QuantizedMixture) else experts.down_proj)
    shared: GatedMlp | None = None
    if hasattr(module, "shared_expert"):
        shared = replace(_dense(module.shared_expert, fusion), share=matrix_of(module.shared_expert_gate))
    elif getattr(module, "shared_experts", None) is not None:
        shared = _dense(module.shared_experts, fusion)
    return Experts(Matrix(router.weight.data), *matrices, **routing_of(module, router), first=first, shared=shared)


def _gpt_oss_experts(module: Any, fusion: Fusion, rank: int) -> Experts:
    """gpt-oss stores [experts, hidden, 2 * inter] and [experts, inter, hidden], with interleaved
    columns (and biases) of gate and up.
    """
    experts, router = module.experts, module.router
    choice: dict[str, Any] = {"normalize": True, "logits_dtype": router.weight.dtype}  # the softmax of the best alone
    best = Matrix(router.weight.data, router.bias.data)
    if isinstance(experts, QuantizedMixture):
        act = Activation(experts.bias_gate_up, experts.bias_down, experts.alpha, experts.limit, experts.up_offset)
        return Experts(best, experts.gate_up, experts.down, router.top_k, first=rank * len(experts.gate_up.words), act=act, **choice)
    gate_up = fusion.transposed(experts.gate_up_proj).unflatten(1, (-1, 2)).transpose(1, 2)
    biases = experts.gate_up_proj_bias.data.unflatten(1, (-1, 2)).transpose(1, 2), experts.down_proj_bias.data
    act = Activation(*biases, experts.alpha, experts.limit, up_offset=1.0)
    matrices = gate_up, fusion.transposed(experts.down_proj)
    return Experts(best, *matrices, router.top_k, first=rank * len(experts.down_proj), act=act, **choice)


def _dense(module: Any, fusion: Fusion) -> GatedMlp:
    names, gelu, factors = mlp_of(module)
    down = matrix_of(getattr(module, names[-1]))
    if len(names) == 2:
        return GatedMlp(matrix_of(getattr(module, names[0])), down, alternating=False, gelu_tanh=gelu)
    gate, up = (getattr(module, name) for name in names[:2])
    # The epilogue of a product has SiLU alone, and quantised rows lie in groups.
    if gelu or factors != (1.0, 1.0) or isinstance(gate, QuantizedLinear) or isinstance(up, QuantizedLinear):
        return GatedMlp(fusion.stacked(gate, up), down, alternating=False, gelu_tanh=gelu, factors=factors)
    return GatedMlp(fusion.alternating(gate, up), down)
