"""Our attention for transformers' AttentionInterface, with a mask of two numbers per sequence.

transformers asks a registered function for the mask once per forward, and passes it to every
attention call. Ours returns no [q_len, kv_len] matrix but an int32 tensor `span` [batch, 1, 1, 2]
of (kv_start, kv_len): the first key that is not left padding, and the number of keys in the cache
that count. Both stay on the device. So a DynamicCache, a StaticCache (keys allocated to the end,
counted by a device tensor) and a captured graph work without synchronisation. The tensor has four
axes because transformers passes a 4-D mask on unchanged.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..launch import HALVES, argument_error
from ..ops.attention import attention
from ..ops.attention_decode import attention_decode
from ..ops.bmm import bmm
from ..ops.mla_decode import mla_decode
from ..ops.sparse_decode import sparse_decode
from .method import NAME

# Arguments of the attention call that do not change its result.
_INERT = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "num_items_in_batch",
    "return_dict",
    "tokenizer",  # of generate, with stop_strings and from `transformers serve`
}


def register() -> None:
    """Makes `NAME` known to transformers. Only models that ask for it by name use it."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, span_mask)


def span_mask(  # noqa: PLR0913 transformers names the arguments
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    mask_function: Any = None,
    dtype: torch.dtype | None = None,
    **unused: Any,
) -> Tensor:
    """The span of keys that count.

    The names of the arguments are transformers'.

    Args:
        batch_size, q_length, kv_length: sizes of this forward; kv_length counts the keys that the
            cache will return.
        q_offset: position of the first query; an int, or a 0-d device tensor of a static cache.
        kv_offset: position of the first key that the cache returns; above 0 once a sliding-window
            cache has dropped keys.
        attention_mask: [batch, seen + q_length] bool, False on padding; None without padding.
        use_vmap, allow_is_causal_skip, allow_is_bidirectional_skip: transformers' marks of masks
            that are not plain causal ones.
        mask_function: transformers' function of the mask; models with an indexer ask for every mask
            as if it were not plain, but by the function of plain ones.
        dtype: of the hidden states.
    Returns: int32 [batch, 1, 1, 2] of (kv_start, kv_len), counted in the keys that the cache
        returns.
    Raises: ValueError for a mask that two numbers per sequence cannot express, and under autocast
        to another half than the model's: torch could not join what each computes.
    """
    from transformers.masking_utils import causal_mask_function

    kind, compiling = torch.device(device).type, torch.compiler.is_compiling()
    if dtype in HALVES and torch.is_autocast_enabled(kind) and (other := torch.get_autocast_dtype(kind)) in HALVES and other != dtype:
        raise argument_error("torch.autocast", f"off or in the model's {dtype}: a patched model computes in its own dtype", other)
    if allow_is_bidirectional_skip is not None:
        raise argument_error("is_causal", "True", False)
    if use_vmap:
        raise argument_error("the mask", "causal with left padding", "one combined with a mask function of the caller")
    # While tracing, transformers may not look at position_ids. So it marks every forward without
    # mask and cache as packed.
    plain = allow_is_causal_skip or mask_function is causal_mask_function
    if not plain and q_length > 1 and not compiling and not torch.compiler.is_exporting():
        raise argument_error("the mask", "causal with left padding", "packed sequences or blocks of tokens: give each sequence its own row")

    span = torch.empty(2, batch_size, dtype=torch.int32, device=device)  # so that each of the two [batch] rows is contiguous
    span[0] = 0 if attention_mask is None else (_left_padding(attention_mask) - kv_offset).clamp(min=0)
    span[1] = q_offset - kv_offset + q_length
    return span.t()[:, None, None, :]


def _left_padding(attention_mask: Tensor) -> Tensor:
    """Number of padding tokens before each sequence.

    Fails if a sequence has padding inside, on a GPU asynchronously.
    """
    seen = attention_mask.to(torch.int8)
    begins = (seen.diff(dim=-1) > 0).sum(-1) + seen[:, 0]
    torch._assert_async(
        (begins <= 1).all(), "attention_mask must be False only before (or after) each sequence, got padding inside one: pad on the left"
    )
    return seen.argmax(-1).to(torch.int32)


def attention_forward(  # noqa: PLR0913 transformers names the arguments
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """The attention call of every transformers model.

    The names of the arguments are transformers'.

    Args:
        query: [batch, q_heads, q_len, head_dim].
        key: [batch, kv_heads, kv_len allocated, head_dim]. value: the same, perhaps with another
            head_dim. For latent attention they may be the cache itself, [batch, 1, kv_len, ...]:
            latents and rotated keys.
        attention_mask: what `span_mask` returned; None if the model has none (every key counts).
        sliding_window: keys that a query sees, itself included; None for all before it.
        softcap: bound on the scores (Gemma-2); None for no bound.
        s_aux: [q_heads], sinks (gpt-oss): a score that counts only in each row's denominator.
        indices: [batch, q_len, topk] int32, rows of the latents that each query sees, as
            `sparse_index` lists them.
        other: must be None or False, unless it does not change the result.
    Returns: [batch, q_len, q_heads, head_dim], and None: attention weights are never in memory.
    Raises: ValueError for what our kernels do not compute.
    """
    if dropout:
        raise argument_error("attention dropout", "0 (call model.eval())", dropout)
    if is_causal is False:
        raise argument_error("is_causal", "True", is_causal)
    for name, given in other.items():
        if name not in _INERT and given is not None and given is not False:
            raise argument_error(
                name, "None: tilewright's attention does not compute it; patch(model, skip=['attention']) keeps transformers'", _brief(given)
            )
    q_len = query.shape[2]
    kv_start = kv_len = None
    out: Any  # a tensor: the lse is not asked for
    if attention_mask is not None:
        if attention_mask.dtype != torch.int32 or attention_mask.shape[1:] != (1, 1, 2):
            got = f"{attention_mask.dtype} {tuple(attention_mask.shape)}"
            raise argument_error("attention_mask", "a 2-D padding mask, or int32 [batch, 1, 1, 2] of (kv_start, kv_len)", got)
        kv_start, kv_len = attention_mask[:, 0, 0].unbind(-1)
    if key.shape[3] != query.shape[3]:  # latents: see `unexpanded`
        if q_len == 1 or indices is not None:
            return _attend_latents(module, query, key, value, kv_start, kv_len, scaling, indices), None
        stock: Any = type(module)
        key, value = stock.expand_kv(module, key, value)
    if indices is not None:
        raise argument_error("indices", "None: tilewright attends to listed rows of latents only", _brief(indices))
    sinks = None if s_aux is None else s_aux.float()
    masks: dict[str, Any] = {"window": sliding_window, "kv_start": kv_start, "kv_len": kv_len}
    attend: Any = attention_decode if q_len == 1 else attention
    out = attend(query, key, value, scale=scaling, softcap=softcap, sinks=sinks, **masks)
    return out.transpose(1, 2), None


def _attend_latents(
    module: Any,
    query: Tensor,
    latents: Tensor,
    k_rope: Tensor,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    scaling: float | None,
    indices: Tensor | None,
) -> Tensor:
    """Absorbed: applies the keys' up-projection to the query and the values' to the result, so no
    latent is expanded. Returns [batch, q_len, heads, v_dim].
    """
    nope, rope, latent, q_len = module.qk_nope_head_dim, module.qk_rope_head_dim, latents.shape[3], query.shape[2]
    k_up, v_up = module.kv_b_proj.weight.view(-1, nope + module.v_head_dim, latent).split((nope, module.v_head_dim), 1)
    q_nope, q_rope = query.split((nope, rope), 3)
    # Of a float32 model the op's formula, for it has no such operands.
    product: Any = bmm if query.dtype in HALVES else _product
    # Not the method, a Python one: torch.compile cannot trace that under torch.set_default_device.
    q_latent = torch.unflatten(product(q_nope.transpose(0, 1).flatten(1, 2), k_up), 1, (len(query), q_len)).transpose(0, 1)
    rows = torch.cat((latents, k_rope), 3)[:, 0]  # transformers keeps them apart
    assert scaling is not None
    found: Any
    if indices is None:
        found = mla_decode(q_latent, q_rope, rows, kv_len, kv_start=kv_start, scale=scaling)
    else:
        absorbed = torch.cat((q_latent.transpose(1, 2), q_rope.transpose(1, 2)), 3).transpose(1, 2)
        found = sparse_decode(absorbed, rows, indices, scale=scaling, v_dim=latent)
    expanded: Tensor = product(found.transpose(0, 1).flatten(1, 2), v_up, trans_b=True)
    return torch.unflatten(expanded.transpose(0, 1), 0, (len(query), q_len))


def _product(a: Tensor, b: Tensor, *, trans_b: bool = False) -> Tensor:
    return torch.bmm(a, b.mT if trans_b else b)


def _brief(given: object) -> object:
    return f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else given
