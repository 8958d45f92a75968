"""The attention ladder: out = softmax(scale * q k^T + mask) v, in twelve steps.

Source    The steps of two published tutorials on attention in cuTile (docs/learn.md); their figures
          stand beside ours. Tiles and running softmax: Dao et al. 2022, arXiv:2205.14135. Read
          small_tiles.py first, then large_tiles.py; steps.py says which kernel a step launches.
Numerics  As `ops.attention`: scores, maximum, denominator and sums in fp32, weights rounded to the
          dtype of v, out rounded once.
Bound     Compute.
"""

import torch
from torch import Tensor

from ...launch import Decision, Device, argument_error, check_tensor
from ...ops import attention as finished
from .decision import Config as Config, Problem as Problem, plan as plan
from .steps import STEPS as STEPS

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 32, 64, 128, 256)


def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """The definition, that of `ops.attention`."""
    out = finished.reference(q, k, v, causal=causal)
    assert isinstance(out, Tensor)
    return out


def space(p: Problem, device: Device) -> list[Config]:
    """The config of every step, the last step's first."""
    return list(dict.fromkeys(step.config_for(p, device) for step in reversed(STEPS)))


DECISION = Decision("learn_attention", problem=Problem, arguments=("q", "k", "v", "out", "scale"), space=space, plan=plan)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """Attention over whole prompts by the last step, or by the step whose config is forced.

    Args:
        q: [batch, q_heads, seq_len, head_dim]; fp16 or bf16; head_dim a power of two in 16..256;
            stride 1 in the last axis.
        k, v: [batch, kv_heads, seq_len, head_dim], dtype and device of q; kv_heads divides q_heads.
            Query head h reads head h // group.
        causal: query i sees the keys up to i; otherwise all.
    Returns: [batch, q_heads, seq_len, head_dim], contiguous as [batch, seq_len, q_heads, head_dim],
        in q's dtype.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(q, "q", ndim=4, dtypes=DTYPES)
    batch, q_heads, seq_len, head_dim = q.shape
    check_tensor(k, "k", ndim=4, like=q)
    check_tensor(k, "k", shape=(batch, k.shape[1], seq_len, head_dim))
    check_tensor(v, "v", shape=k.shape, like=q)
    if k.shape[1] == 0 or q_heads % k.shape[1]:
        raise argument_error("q.shape[1]", f"a multiple of k.shape[1] = {k.shape[1]}", q_heads)
    if head_dim not in HEAD_DIMS:
        raise argument_error("q.shape[3]", "a power of two in 16..256", head_dim)
    out = torch.empty((batch, seq_len, q_heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    if out.numel():
        sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": k.shape[1], "seq_len": seq_len, "head_dim": head_dim}
        DECISION.launches(Device.of(q), **sizes, dtype=q.dtype, causal=causal).run(q, k, v, out, head_dim**-0.5)
    return out
