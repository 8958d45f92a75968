"""Decode attention of sequences that begin with the same keys: these are read once for all.

    out = merge(attention over the shared keys, attention over the sequence's own)

For the shared keys the queries of all sequences are as many heads of one, so a tile of keys serves
all of them. The launches are those of `attention_decode`, twice, and of `merge_states`.

Source    Ye et al. 2024, "Cascade inference" (states as an algebra); Juravsky et al. 2024,
          arXiv:2402.05099 (the queries of all sequences as rows of one product).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...launch import argument_error, check_bools, check_tensor, out_or_new
from ...launch.values import Claims, check_values, pages, wanted, within
from ..common.softmax_tiles import check_int32
from ..merge_states import merge_states
from . import attention_decode
from .calls import check_page_size, check_queries


def _claims(k: Tensor, prefix_len: Tensor | None, prefix_table: Tensor | None, kv_len: Tensor | None, own: tuple[int, int]) -> Claims:
    """k: of the prefix. own: the fewest and the most keys that a sequence may have of its own."""
    yield from within("prefix_len", prefix_len, 0, k.shape[2] * (1 if prefix_table is None else len(prefix_table)))
    if prefix_table is not None:
        for claim in pages(prefix_table[None], prefix_len, k.shape[0], k.shape[2]):
            yield replace(claim, name="prefix_table", values=claim.values[0], right=claim.right[0])
    yield from within("kv_len", kv_len, *own)


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
            columns of prefix_v. The newest tokens are the last of these, so if there are several, a
            sequence has at least q_len.
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
    check_queries(q)
    ndim = 3 if prefix_table is None else 4
    check_tensor(prefix_k, "prefix_k", ndim=ndim, like=q)
    check_tensor(prefix_v, "prefix_v", ndim=ndim, like=q)
    (q_len, head_dim), columns, kv_heads = q.shape[2:], prefix_v.shape[-1], prefix_k.shape[-3]
    if prefix_k.shape[-1] != head_dim or not kv_heads or q.shape[1] % kv_heads:
        raise argument_error("prefix_k.shape", f"of heads of {head_dim} elements that divide the {q.shape[1]} of q", tuple(prefix_k.shape))
    if prefix_v.shape[:-1] != prefix_k.shape[:-1] or not 1 <= columns <= 512:
        raise argument_error("prefix_v.shape", f"that of prefix_k {tuple(prefix_k.shape)}, of 1..512 columns", tuple(prefix_v.shape))
    for name, given, shape in (
        ("prefix_table", prefix_table, (None,)),
        ("prefix_len", prefix_len, (1,)),
        ("block_table", block_table, (len(q), None)),
    ):
        if given is not None:
            check_int32(given, name, q, shape)
    if prefix_table is None:
        prefix_k, prefix_v = prefix_k[None], prefix_v[None]
    else:
        check_page_size(prefix_k.shape[2])
    check_tensor(k, "k", ndim=4, like=q)
    check_tensor(v, "v", ndim=4, like=q)
    if (k.shape[1], v.shape[-1]) != (kv_heads, columns):
        raise argument_error("key heads of k and columns of v", f"those of the prefix, {(kv_heads, columns)}", (k.shape[1], v.shape[-1]))
    longest = k.shape[2] * (1 if block_table is None else block_table.shape[1])
    if 1 < q_len and longest < q_len:
        raise argument_error("each sequence's own keys", f"at least the {q_len} newest tokens", longest)
    if not torch.compiler.is_compiling() and wanted(q):
        check_values(_claims(prefix_k, prefix_len, prefix_table, kv_len, (q_len if q_len > 1 else 0, longest)))
    inputs = (q, prefix_k, prefix_v, k, v, kv_len, prefix_len, block_table, prefix_table)
    out = out_or_new(out, (*q.shape[:3], columns), q.dtype, *inputs)
    table = None if prefix_table is None else prefix_table[None]
    # Not the method, a Python one: torch.compile cannot trace that under torch.set_default_device.
    rows = torch.unflatten(q, 1, (kv_heads, -1)).transpose(0, 1)  # [kv_heads, batch, heads of a key head, q_len, head_dim]
    how: dict[str, Any] = {"scale": scale, "return_lse": True}
    states = q.new_empty(2, *out.shape)
    own = attention_decode(q, k, v, kv_len, block_table=block_table, out=states[1], **how)  # first: it checks what is left to check
    shared = attention_decode(rows.reshape(1, -1, 1, head_dim), prefix_k, prefix_v, prefix_len, block_table=table, **how)
    first, first_lse = (x.view(*rows.shape[:4], *x.shape[3:]).transpose(0, 1) for x in shared)
    torch.unflatten(states[0], 1, (kv_heads, -1)).copy_(first)
    lse = torch.stack((first_lse.flatten(1, 2), own[1]))
    found = merge_states(states, lse, out=(out, torch.empty_like(own[1])))
    return found if return_lse else found[0]
