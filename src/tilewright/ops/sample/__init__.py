"""Samples tokens: draws from the softmax of the logits that top_k, top_p and min_p keep:

    out[r] = argmax over the kept j of logits[r, j] / temperature[r] + gumbel[r, j]

    Kept after top_k: logits not below the k-th largest. Kept after top_p too: with q the softmax
    (of logits / temperature) over what top_k kept, each j for which the q of all larger logits sum
    to less than top_p. Of these, min_p keeps what is at least min_p times as likely as the largest.
    Equal logits are kept or dropped together. gumbel = -log(-log(1 - v)), v = min((word + 1/2) /
    2**32, 1 - 2**-24), word the (j % 4)-th of Philox4x32-10 with the counter (j // 4, r, low and
    high word of offset) and the key seed. It depends on no tile size. With a seed for each row, 0
    takes the place of r: a row's draw does not depend on where it stands.

Both thresholds are found by search: every pass cuts the interval in which one lies into WAYS + 1,
and counts (or sums the probabilities of) the logits above each cut. It ends when only one logit is
left there, or one place in the order of floats.

The largest of logits / temperature + gumbel is found as the largest of exp(logits / temperature) /
-log(1 - v), which takes one logarithm less.

Source    Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030, section 2 (Gumbel-max);
          Fan, Lewis and Dauphin 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2020,
          arXiv:1904.09751, section 3.1 (top-p); Salmon et al. 2011 (Philox).
Numerics  fp32: of two logits with gumbel, to 2e-6 of each, the larger. Counts are exact; the sums
          of top_p are rounded, so where they meet top_p to 1e-6 the last logit kept may be the next
          one.
Bound     Latency: a row is read again, from L2, for each of some 7 to 20 passes. Without top_k and
          top_p twice: memory.
"""

from typing import Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, check_tensor, out_or_new, torch_op
from ...launch.values import Claims, no_nan
from ..common.philox import philox_reference, split_words
from .decision import CHOICES as CHOICES, DECISION as DECISION, Config as Config, Problem as Problem, plan as plan, space as space


def _scores(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """What the draw takes the largest of, -inf where not kept: in the dtype of logits, at least
    fp32.
    """
    rows, cols = logits.shape

    def per_row(value: Tensor | None, default: float) -> Tensor:
        return torch.full((rows, 1), default, device=logits.device) if value is None else value.reshape(-1, 1).expand(rows, 1)

    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = torch.where(x.isnan(), -torch.inf, x)
    t = per_row(temperature, 1.0).to(x.dtype)
    below = torch.where(x == x.amax(-1, keepdim=True), 0.0, x - x.amax(-1, keepdim=True))
    scaled = torch.where(t > 0, below / t, below)
    k, p = per_row(top_k, 0), per_row(top_p, 1.0)
    falling, order = x.sort(-1, descending=True)
    kth = falling.gather(-1, torch.where((k <= 0) | (k > cols), cols, k).long() - 1)
    kept = (x >= kth) & (x > -torch.inf)
    weights = torch.where(kept, scaled.exp(), 0.0).gather(-1, order)
    larger = weights.cumsum(-1) - weights  # the sum of those before
    last = ((larger < p * weights.sum(-1, keepdim=True)).sum(-1, keepdim=True) - 1).clamp(min=0)
    kept &= (p >= 1) | (x >= falling.gather(-1, last))
    if min_p is not None:
        share = per_row(min_p, 0.0).to(x.dtype)
        kept &= (share <= 0) | (t <= 0) | (scaled >= share.clamp(max=1).log())
    column = torch.arange(cols, device=x.device).expand(rows, cols)
    row = torch.arange(rows, device=x.device) if seed.numel() == 1 else torch.zeros(rows, dtype=torch.int64, device=x.device)
    each = [per_row(value, 0).long() for value in (row, offset, seed)]
    counter = (column // 4, *(word.expand(rows, cols) for word in (each[0], *split_words(each[1]))))
    word = torch.stack(philox_reference(counter, split_words(each[2]))).gather(0, (column % 4)[None])[0]
    v = ((word + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).to(x.dtype)
    return torch.where(kept, torch.where(t > 0, scaled - (-torch.log1p(-v)).log(), scaled), -torch.inf)


def reference(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor | None = None,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """The definition, at least in fp32."""
    return _scores(logits, seed, offset, temperature, top_k, top_p, min_p).argmax(-1)


def comparable(
    result: Tensor,
    logits: Tensor,
    seed: Tensor,
    offset: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """The scores at the indices, in float64 for all: -inf for a logit that should not be kept, but
    for the 1e-6 in doubt at top_p and min_p.
    """
    wide = [None if t is None else t.double() for t in (temperature, top_p, min_p)]
    cuts = None if wide[1] is None else wide[1] + 1e-6, None if wide[2] is None else wide[2] * (1 - 1e-5)
    scores = _scores(logits.double(), seed, offset, wide[0], top_k, *cuts)
    return scores.gather(-1, result[:, None])[:, 0].float()


def _claims(temperature: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Claims:
    yield from no_nan("temperature", temperature)
    yield from no_nan("top_p", top_p)
    yield from no_nan("min_p", min_p)


@torch_op(mutates=("out",), claims=_claims)
def sample_out(
    logits: Tensor,
    seed: Tensor,
    offset: Optional[Tensor],
    temperature: Optional[Tensor],
    top_k: Optional[Tensor],
    top_p: Optional[Tensor],
    min_p: Optional[Tensor],
    out: Tensor,
) -> None:
    """`sample` into `out` [rows]; the other tensors [1] or [rows]. No checks, no sync: safe under
    graph capture.
    """
    rows, cols = logits.shape
    launches = DECISION.launches(
        Device.of(logits),
        rows=rows,
        cols=cols,
        dtype=logits.dtype,
        temperature=temperature is not None,
        top_k=top_k is not None,
        top_p=top_p is not None,
        min_p=min_p is not None,
        offset=offset is not None,
    )
    launches.run(logits, seed, offset, temperature, top_k, top_p, min_p, out)


def sample(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor | None = None,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draws one column of each row from the softmax of its logits. All tensors are read on the
    device.

    Args:
        logits: [rows, cols], cols at least 1; bf16, fp16 or fp32; stride 1 in the last axis. NaN
            counts as -inf.
        seed: [] or [rows] int64. The same seed, offset and row give the same draw. With one seed
            per row, the row's number does not matter.
        offset: [] or [rows] int64; default 0. Each value gives another draw; a decode step adds 1.
        temperature: [] or [rows] fp32; default 1. With 0 or less, the result is the first of the
            largest logits.
        top_k: [] or [rows] int32; keeps the k largest logits, and all that equal the k-th. With 0
            or less, keeps all.
        top_p: [] or [rows] fp32; of these, keeps the fewest of the largest whose probabilities sum
            to at least top_p, and all that equal the last. With 1 or more, keeps all; with 0 or
            less, the largest.
        min_p: [] or [rows] fp32; of these, keeps those at least min_p times as likely as the
            likeliest. With 0 or less, keeps all; with 1 or more, the likeliest.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [rows] int64. Empty for no rows, with nothing launched. 0 for a row of -inf.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(logits, "logits", ndim=2, dtypes=FLOATS)
    rows, cols = logits.shape
    if cols == 0:
        raise argument_error("logits.shape[1]", "at least 1", 0)
    optional = (
        ("offset", offset, torch.int64),
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    )
    for name, given, dtype in (("seed", seed, torch.int64), *((n, t, d) for n, t, d in optional if t is not None)):
        check_tensor(given, name, dtypes=(dtype,), like=logits)
        if given.dim() and given.shape != (rows,):
            raise argument_error(f"{name}.shape", f"() or ({rows},)", tuple(given.shape))
    out = out_or_new(out, (rows,), torch.int64, logits, seed, offset, temperature, top_k, top_p, min_p)
    if rows:
        flat = (None if t is None else t.reshape(-1) for t in (offset, temperature, top_k, top_p, min_p))
        sample_out(logits, seed.reshape(-1), *flat, out)
    return out
