"""Decode attention of sequences that begin with the same keys: these are read once for all.

    out = merge(attention over the shared keys, attention over the sequence's own)

For the shared keys the queries of all sequences are as many heads of one, so a tile of keys serves
all of them. The launches are those of `attention_decode`, twice, and of `merge_states`.

Source    Ye et al. 2024, "Cascade inference" (states as an algebra); Juravsky et al. 2024,
          arXiv:2402.05099 (the queries of all sequences as rows of one product).
"""

from typing import Any

import torch
from torch import Tensor

from ...launch import argument_error, check_bools, check_tensor, out_or_new
from ..common.softmax_tiles import DTYPES, check_heads, check_int32
from ..merge_states import merge_states
from . import attention_decode


def cascade_decode(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor | None = None,
    *,
    prefix_len: Tensor | None = None,
    block_table: Tensor | None = None,
    prefix_table: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each sequence's newest tokens over keys that all sequences share, and
    its own keys behind them.

    Args:
        q: [batch, q_heads, q_len, head_dim], as in `attention_decode`.
        prefix_k: [kv_heads, prefix, head_dim], dtype and device of q, stride 1 in the last axis;
            with a prefix_table [pages, kv_heads, page_size, head_dim].
        prefix_v: like prefix_k, of 1..512 columns.
        k, v, kv_len, block_table: each sequence's own keys, as in `attention_decode`; v has the
            columns of prefix_v. The newest tokens are the last of these; a sequence has at least
            q_len.
        prefix_len: [1] int32; how many of the shared keys there are; default all. Read on the
            device.
        prefix_table: [max_pages] int32; the page that holds the shared keys i * page_size onwards;
            pages may be those of k and v.
        scale: of q k^T; positive; default head_dim ** -0.5.
        return_lse: also return the natural log of the softmax denominator.
        out: where the result goes: contiguous, of its shape, dtype and device; default a new
            tensor.
    Returns: out [batch, q_heads, q_len, columns of v]; with return_lse the tuple (out, lse), lse
        fp32 [batch, q_heads, q_len].
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(return_lse=return_lse)
    check_tensor(q, "q", ndim=4, dtypes=DTYPES)
    ndim = 3 if prefix_table is None else 4
    check_tensor(prefix_k, "prefix_k", ndim=ndim, like=q)
    check_tensor(prefix_v, "prefix_v", ndim=ndim, like=q)
    if prefix_table is None:
        prefix_k, prefix_v = prefix_k[None], prefix_v[None]
    head_dim = q.shape[3]
    check_heads(q, prefix_k, head_dim)
    check_tensor(k, "k", ndim=4, like=q)
    check_tensor(v, "v", ndim=4, like=q)
    if prefix_table is not None:
        check_int32(prefix_table, "prefix_table", q, (None,))
    columns, kv_heads = prefix_v.shape[-1], prefix_k.shape[1]
    if (k.shape[1], v.shape[-1]) != (kv_heads, columns):
        raise argument_error("key heads of k and columns of v", f"those of the prefix, {(kv_heads, columns)}", (k.shape[1], v.shape[-1]))
    inputs = (q, prefix_k, prefix_v, k, v, kv_len, prefix_len, block_table, prefix_table)
    out = out_or_new(out, (*q.shape[:3], columns), q.dtype, *inputs)
    table = None if prefix_table is None else prefix_table[None]
    rows = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)  # [kv_heads, batch, heads of a key head, q_len, head_dim]
    how: dict[str, Any] = {"scale": scale, "return_lse": True}
    shared = attention_decode(rows.reshape(1, -1, 1, head_dim), prefix_k, prefix_v, prefix_len, block_table=table, **how)
    states = q.new_empty(2, *out.shape)
    own = attention_decode(q, k, v, kv_len, block_table=block_table, out=states[1], **how)
    first, first_lse = (x.view(*rows.shape[:4], *x.shape[3:]).transpose(0, 1) for x in shared)
    states[0].unflatten(1, (kv_heads, -1)).copy_(first)
    lse = torch.stack((first_lse.flatten(1, 2), own[1]))
    found = merge_states(states, lse, out=(out, torch.empty_like(own[1])))
    return found if return_lse else found[0]
