"""Rotary position embedding, in place: each pair (a, b) of the first rotary_dim elements of a head becomes (a cos - b sin, b cos + a sin)

    half-split (Llama):           pair j is (x[j], x[j + rotary_dim / 2])
    interleaved (GPT-J, DeepSeek): pair j is (x[2 j], x[2 j + 1])

Source    Su et al. 2021, arXiv:2104.09864, eq. 34.
Numerics  fp32 from load to store, rounded once. From positions: the angle position * inv_freq, its cosine and sine in fp32, times `scaling`.
Bound     Memory: the rotated part of q and k read and written once.
"""

from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import Cost, Device, Plan, best_plan, check_tensor, launch, must, next_pow2, torch_op
from .tiles import load_pairs, load_tile, store_pairs, turned_pairs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ZERO = ct.PaddingMode.ZERO


def reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition, not in place."""
    if positions is not None and inv_freq is not None:
        angle = positions[..., None].to(inv_freq.dtype) * inv_freq
        cos, sin = angle.cos() * scaling, angle.sin() * scaling
    assert cos is not None
    assert sin is not None
    c, s = cos[:, None], sin[:, None]
    half = c.shape[-1]

    def turned(x: Tensor) -> Tensor:
        part = x[..., : 2 * half]
        a, b = part.unflatten(-1, (half, 2)).unbind(-1) if interleaved else part.chunk(2, -1)
        pair = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)
        return torch.cat((torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), x[..., 2 * half :]), -1)

    return turned(q), turned(k)


@dataclass(frozen=True, slots=True)
class Problem:
    """heads_inside: the memory of q and k is [batch, seq_len, heads, head_dim], as projections leave it."""

    batch: int
    q_heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: torch.dtype
    rotary_dim: int = 0  # 0: head_dim
    heads_inside: bool = True
    interleaved: bool = False
    from_positions: bool = False

    @property
    def rotated(self) -> int:
        return self.rotary_dim or self.head_dim

    def cost(self) -> Cost:
        pairs = self.batch * (self.q_heads + self.kv_heads) * self.seq_len * self.rotated // 2
        angles = self.batch * self.seq_len * 4 + self.rotated * 2 if self.from_positions else self.seq_len * self.rotated * self.dtype.itemsize
        return Cost(size_bytes=4 * pairs * self.dtype.itemsize + angles, flops=6 * pairs)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def heads(n: int) -> Tensor:
            if self.heads_inside:
                return torch.randn(self.batch, self.seq_len, n, self.head_dim, dtype=self.dtype, device=device).transpose(1, 2)
            return torch.randn(self.batch, n, self.seq_len, self.head_dim, dtype=self.dtype, device=device)

        half = self.rotated // 2
        inv_freq = 10_000.0 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
        positions = torch.arange(self.seq_len, device=device)[None]
        both = {"q": heads(self.q_heads), "k": heads(self.kv_heads), "interleaved": self.interleaved}
        if self.from_positions:  # each sequence at its own place
            start = 100 * torch.arange(self.batch, device=device)[:, None]
            return {**both, "positions": positions + start, "inv_freq": inv_freq}
        angle = torch.cat((positions[..., None] * inv_freq,) * 2, -1)  # both halves, as transformers makes them
        return {**both, "cos": angle.cos().to(self.dtype)[..., :half], "sin": angle.sin().to(self.dtype)[..., :half]}


@dataclass(frozen=True, slots=True)
class Config:
    """How q and k are walked.

    tile_h, tile_s: heads and positions of a tile; powers of two.
    tiles: tiles of heads per block, all at the same positions, so that cosines and sines are fetched once.
    latency: hint of the loads, 1 to 10.
    load_tma, store_tma: allow the TMA unit.
    occupancy: resident blocks per SM.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_h: int
    tile_s: int
    tiles: int = 1
    latency: int = 4
    load_tma: bool = False
    store_tma: bool = False
    occupancy: int | None = None
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    half = next_pow2(p.rotated // 2)
    heads = next_pow2(max(p.q_heads, p.kv_heads))
    if device.is_cpu:
        tile_s = max(1, min(next_pow2(p.seq_len), (1 << 20) // (heads * 2 * half)))
        configs = [Config(heads, tile_s), Config(1, max(1, tile_s // 4), tiles=gcd(p.q_heads, p.kv_heads))]
        return list(dict.fromkeys(configs))
    unit = 2 / p.dtype.itemsize  # pairs that take the bytes of one 16-bit pair
    configs = []
    # One position: 256 pairs a block, so that every SM has one (H200, 2026-11-21).
    for pairs, warps in ((256, 4), (512, 4), (1024, 4), (2048, 4), (2048, 8)) if p.seq_len == 1 else ():
        configs.append(Config(max(1, min(heads, int(pairs * unit) // half)), 1, num_worker_warps=warps))
    # Several heads at the same positions: they take the same cosines, and 2048 pairs a block keep memory busy (H200, 2026-11-21).
    if p.seq_len > 1:
        few = p.batch * (p.q_heads + p.kv_heads) * p.seq_len * half < device.sms * 16_384
        shared = [n for n in range(8, 0, -1) if p.q_heads % n == 0 and (p.kv_heads % n == 0 or p.kv_heads == 1)]
        shared = [1, *shared[:1]] if few else [*shared[:2], 1]
        for (pairs, warps), tiles in product(((1024, 4), (2048, 4)) if few else ((2048, 4), (4096, 8), (1024, 4)), shared):
            tile_s = max(1, min(next_pow2(p.seq_len), next_pow2(int(pairs * unit) // (half * tiles) // 2 + 1)))
            configs.append(Config(1, tile_s, tiles, num_worker_warps=warps))
        configs += [Config(2, c.tile_s, c.tiles // 2, num_worker_warps=c.num_worker_warps) for c in configs if c.tiles % 2 == 0 and heads > 1]
    return list(dict.fromkeys(configs))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    half = p.rotated // 2
    k_tiles = min(c.tiles, ct.cdiv(p.kv_heads, c.tile_h))  # a tile must not lie wholly outside its array
    q_groups, k_groups = ct.cdiv(p.q_heads, c.tile_h * c.tiles), ct.cdiv(p.kv_heads, c.tile_h * k_tiles)
    # Groups run fastest: they share cos and sin, and often a memory page. Their number is a constant: no division delays the first load.
    grid = (p.batch * (q_groups + k_groups), ct.cdiv(p.seq_len, c.tile_s))
    even_q, even_k = (half == next_pow2(half) and heads % n == 0 for heads, n in ((p.q_heads, c.tile_h * c.tiles), (p.kv_heads, c.tile_h * k_tiles)))
    shape = (half, next_pow2(half), c.tiles, k_tiles, c.tile_h, c.tile_s)
    constants = (p.interleaved, even_q, even_k, q_groups, k_groups, *shape, c.latency, c.load_tma, c.store_tma)
    kernel = rope_positions_kernel if p.from_positions else rope_kernel
    return Plan(kernel, grid, constants, occupancy=c.occupancy, num_worker_warps=c.num_worker_warps)


def _rotate(X, b, group, s, cos, sin, whole, TILES, INTERLEAVED, HALF, TILE_HALF, TILE_H, TILE_S, LATENCY, LOAD_TMA, STORE_TMA):
    """A block's share of X [batch, heads, seq_len, head_dim]: TILES tiles of heads. cos, sin: [TILE_S, TILE_HALF] in fp32."""
    pair = (1, TILE_H, TILE_S, TILE_HALF)
    cos, sin = cos.reshape((1, 1, TILE_S, TILE_HALF)), sin.reshape((1, 1, TILE_S, TILE_HALF))
    # All loads come before the first store: the compiler has to keep a load behind an earlier store to the same array.
    xs: tuple = ()
    for t in ct.static_iter(range(TILES)):
        xs = (*xs, load_pairs(X, (b, group * TILES + t, s, 0), pair, INTERLEAVED, HALF, ZERO, whole, LATENCY, LOAD_TMA))
    for t in ct.static_iter(range(TILES)):
        store_pairs(X, (b, group * TILES + t, s, 0), turned_pairs(xs[t], pair, cos, sin), INTERLEAVED, HALF, whole, STORE_TMA)


@ct.kernel
def rope_kernel(
    Q,
    K,
    COS,
    SIN,
    INTERLEAVED: ct.Constant[bool],
    EVEN_Q: ct.Constant[bool],
    EVEN_K: ct.Constant[bool],
    Q_GROUPS: ct.Constant[int],
    K_GROUPS: ct.Constant[int],
    HALF: ct.Constant[int],
    TILE_HALF: ct.Constant[int],
    Q_TILES: ct.Constant[int],
    K_TILES: ct.Constant[int],
    TILE_H: ct.Constant[int],
    TILE_S: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Q, K: [batch, heads, seq_len, head_dim]; COS, SIN: [1 or batch, seq_len, HALF]. EVEN_Q, EVEN_K: tiles end with the heads and with HALF."""
    group, b, s = ct.bid(0) % (Q_GROUPS + K_GROUPS), ct.bid(0) // (Q_GROUPS + K_GROUPS), ct.bid(1)
    row = min(b, COS.shape[0] - 1)
    shape = (1, TILE_S, TILE_HALF)
    how = (INTERLEAVED, HALF, TILE_HALF, TILE_H, TILE_S, LATENCY, LOAD_TMA, STORE_TMA)

    def turn(whole):
        # The slices bring a bound known when compiling, hence wide loads where HALF allows them.
        cos = load_tile(COS.slice(2, 0, HALF), (row, s, 0), shape, ZERO, whole and HALF == TILE_HALF, LATENCY, False).astype(ct.float32)
        sin = load_tile(SIN.slice(2, 0, HALF), (row, s, 0), shape, ZERO, whole and HALF == TILE_HALF, LATENCY, False).astype(ct.float32)
        if group < Q_GROUPS:
            _rotate(Q, b, group, s, cos, sin, whole and EVEN_Q, Q_TILES, *how)
        else:
            _rotate(K, b, group - Q_GROUPS, s, cos, sin, whole and EVEN_K, K_TILES, *how)

    if TILE_S == 1:
        turn(True)
    elif s * TILE_S + TILE_S <= Q.shape[2]:
        turn(True)
    else:
        turn(False)


@ct.kernel
def rope_positions_kernel(
    Q,
    K,
    POSITIONS,
    INV_FREQ,
    scaling: float,
    INTERLEAVED: ct.Constant[bool],
    EVEN_Q: ct.Constant[bool],
    EVEN_K: ct.Constant[bool],
    Q_GROUPS: ct.Constant[int],
    K_GROUPS: ct.Constant[int],
    HALF: ct.Constant[int],
    TILE_HALF: ct.Constant[int],
    Q_TILES: ct.Constant[int],
    K_TILES: ct.Constant[int],
    TILE_H: ct.Constant[int],
    TILE_S: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Q, K: [batch, heads, seq_len, head_dim]; POSITIONS: [1 or batch, seq_len]; INV_FREQ: [HALF]. EVEN_Q, EVEN_K: as in rope_kernel."""
    group, b, s = ct.bid(0) % (Q_GROUPS + K_GROUPS), ct.bid(0) // (Q_GROUPS + K_GROUPS), ct.bid(1)
    row = min(b, POSITIONS.shape[0] - 1)
    how = (INTERLEAVED, HALF, TILE_HALF, TILE_H, TILE_S, LATENCY, LOAD_TMA, STORE_TMA)
    inv_freq = ct.load(INV_FREQ.slice(0, 0, HALF), (0,), (TILE_HALF,), padding_mode=ZERO, allow_tma=False)

    def turn(whole):
        position = load_tile(POSITIONS, (row, s), (1, TILE_S), ZERO, whole, LATENCY, False).astype(ct.float32)
        angle = position.reshape((TILE_S, 1)) * inv_freq.reshape((1, TILE_HALF))
        cos, sin = ct.cos(angle) * scaling, ct.sin(angle) * scaling
        if group < Q_GROUPS:
            _rotate(Q, b, group, s, cos, sin, whole and EVEN_Q, Q_TILES, *how)
        else:
            _rotate(K, b, group - Q_GROUPS, s, cos, sin, whole and EVEN_K, K_TILES, *how)

    if TILE_S == 1:
        turn(True)
    elif s * TILE_S + TILE_S <= Q.shape[2]:
        turn(True)
    else:
        turn(False)


@torch_op(mutates=("q", "k"))
def rope_out(
    q: Tensor,
    k: Tensor,
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    positions: Optional[Tensor],
    inv_freq: Optional[Tensor],
    scaling: float,
    interleaved: bool,
) -> None:
    """`rope`, into q and k themselves. No checks, no sync: safe under graph capture."""
    batch, q_heads, seq_len, head_dim = q.shape
    table = cos if inv_freq is None else inv_freq
    assert table is not None
    rotary_dim = 2 * table.shape[-1]
    heads_inside = seq_len == 1 or q.stride(1) < q.stride(2)
    shape = (batch, q_heads, k.shape[1], seq_len, head_dim)
    best = best_plan(space, plan, Device.of(q), Problem, *shape, q.dtype, rotary_dim, heads_inside, interleaved, cos is None)
    if cos is None:
        launch(best, q, k, positions, inv_freq, scaling)
    else:
        launch(best, q, k, cos, sin)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k in place, in one launch, by cos and sin or by positions and inverse frequencies.

    Args:
        q: [batch, q_heads, seq_len, head_dim]; bf16, fp16 or fp32; any strides with 1 in the last axis. Overwritten.
        k: [batch, kv_heads, seq_len, head_dim], dtype and device of q, likewise. Overwritten.
        cos, sin: [1 or batch, seq_len, rotary_dim / 2], dtype of q or fp32. Elements of a head from rotary_dim on stay as they are.
        positions: [1 or batch, seq_len], int32 or int64.
        inv_freq: [rotary_dim / 2], fp32: radians per position.
        scaling: factor of cosine and sine (transformers' attention_scaling); with positions only, cos and sin contain it already.
        interleaved: a pair is two neighbours instead of one element of each half.
    Returns: (q, k), the tensors it was given.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(q, "q", ndim=4, dtypes=DTYPES)
    batch, _, seq_len, head_dim = q.shape
    check_tensor(k, "k", ndim=4, like=q)
    if (k.shape[0], *k.shape[2:]) != (batch, seq_len, head_dim):
        raise must("k.shape", f"({batch}, kv_heads, {seq_len}, {head_dim})", tuple(k.shape))
    _check_writable(q, "q")
    _check_writable(k, "k")
    if cos is not None and sin is not None and positions is None and inv_freq is None:
        _check_angles(q, cos, sin)
        if scaling != 1.0:
            raise must("scaling", "1.0 with cos and sin, which contain it", scaling)
    elif positions is not None and inv_freq is not None and cos is None and sin is None:
        _check_positions(q, positions, inv_freq)
    else:
        given = [name for name, x in (("cos", cos), ("sin", sin), ("positions", positions), ("inv_freq", inv_freq)) if x is not None]
        raise must("the angles", "cos and sin, or positions and inv_freq", ", ".join(given) or "neither")
    if q.numel() or k.numel():
        rope_out(q, k, cos, sin, positions, inv_freq, scaling, interleaved)
    return q, k


def _check_writable(x: Tensor, name: str) -> None:
    if 0 in x.stride():
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise must(name, "free of broadcast axes, being written in place", f"strides {x.stride()} for shape {tuple(x.shape)}")


def _check_angles(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    batch, _, seq_len, head_dim = q.shape
    check_tensor(cos, "cos", ndim=3, dtypes=(q.dtype, torch.float32))
    if cos.device != q.device:
        raise must("cos.device", q.device, cos.device)
    if cos.shape[0] not in (1, batch) or cos.shape[1] != seq_len or not 0 < 2 * cos.shape[2] <= head_dim:
        raise must("cos.shape", f"(1 or {batch}, {seq_len}, 1 to {head_dim // 2})", tuple(cos.shape))
    check_tensor(sin, "sin", shape=cos.shape, like=cos)


def _check_positions(q: Tensor, positions: Tensor, inv_freq: Tensor) -> None:
    batch, _, seq_len, head_dim = q.shape
    check_tensor(positions, "positions", ndim=2, dtypes=(torch.int32, torch.int64))
    if positions.shape[0] not in (1, batch) or positions.shape[1] != seq_len:
        raise must("positions.shape", f"(1 or {batch}, {seq_len})", tuple(positions.shape))
    check_tensor(inv_freq, "inv_freq", ndim=1, dtypes=(torch.float32,))
    if not 0 < 2 * inv_freq.shape[0] <= head_dim:
        raise must("inv_freq.shape", f"(1 to {head_dim // 2},)", tuple(inv_freq.shape))
    if positions.device != q.device:
        raise must("positions.device", q.device, positions.device)
    if inv_freq.device != q.device:
        raise must("inv_freq.device", q.device, inv_freq.device)
