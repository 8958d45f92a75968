"""What a launch of `attention` comes to."""

import cuda.tile as ct

from ...launch import Device, Plan
from ..attention_tiles import walkers, widths_of
from .candidates import Config
from .kernel import attention_kernel
from .problem import Problem


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    ragged = p.varlen or p.has_start or p.has_len
    masked = p.causal or ragged or p.window is not None or p.kv_len % c.tile_n != 0
    flags = (p.causal, p.window is not None, p.has_start, p.has_len, p.varlen, p.return_lse, p.softcap is not None, p.has_sinks, p.scaled)
    least = 32 if p.scaled else 16  # one step of a product
    widths = (*widths_of(p.head_dim, least), *widths_of(p.values_dim, least, c.pad_values))
    tiles = (p.q_heads // p.kv_heads, *widths, c.tile_m, c.tile_n, c.tail_n or c.tile_n, c.parts, c.latency, c.tf32x3)
    each = (ct.cdiv(p.q_len, c.tile_m), p.q_heads, p.batch)
    grid: tuple[int, ...] = (p.q_len // c.tile_m + p.batch, p.q_heads) if p.varlen else each  # see packed_tile
    if c.persistent:
        grid = walkers(each, device.sms * (c.occupancy or 1) // (c.num_ctas or 1), p.causal)
    return Plan(attention_kernel, grid, (*flags, p.keys_last, masked, c.persistent, *tiles), c.num_ctas, c.occupancy, c.num_worker_warps)
