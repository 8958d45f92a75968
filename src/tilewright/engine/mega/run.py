"""The step: buffers made once, one launch a token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...launch import Bound, Device, Launch, argument_error, next_pow2
from ...ops.common.softmax_tiles import LOG2E
from .kernel import mega_kernel
from .pack import Weights
from .program import MATRICES, Dims, Kind, Phase, table, value_name
from .schedule import Config, Schedule, default_config


@dataclass(frozen=True, slots=True)
class Clocks:
    """The device tensors of `engine.state.State` that a step reads and moves on."""

    tokens: Tensor
    counters: Tensor
    recent: Tensor
    clock: Tensor


@dataclass(frozen=True, slots=True)
class Values:
    """What the phases write: a slot for each layer, so that any of it can be looked at after the
    step. Names as in `program`.
    """

    heads: Tensor
    parts: Tensor
    maxima: Tensor
    denominators: Tensor
    stream: Tensor
    active: Tensor
    logits: Tensor
    best: Tensor

    @staticmethod
    def of(schedule: Schedule, dtype: torch.dtype, device: torch.device, logits: Tensor | None = None) -> "Values":
        """logits: where they go, [1, vocab]."""
        d, splits = schedule.dims, schedule.splits

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Values(
            heads=zeros(d.layers, d.heads, d.head_dim),
            parts=zeros(d.layers, splits, d.q_heads, d.head_dim, dtype=torch.float32),
            maxima=zeros(d.layers, splits, d.q_heads, dtype=torch.float32),
            denominators=zeros(d.layers, splits, d.q_heads, dtype=torch.float32),
            stream=zeros(2 * d.layers, d.hidden),
            active=zeros(d.layers, d.inter),
            logits=zeros(1, d.vocab) if logits is None else logits,
            best=zeros(2, schedule.blocks, dtype=torch.int32),
        )

    def named(self, program: list[Phase], schedule: Schedule, position: int) -> dict[str, Tensor]:
        """Every value that the program wrote, by name, in its order; `parts` as the merged
        attention.
        """
        found: dict[str, Tensor] = {}
        for phase in program:
            i = phase.layer
            if phase.kind is Kind.QKV:
                found[phase.writes] = self.heads[i]
            elif phase.kind is Kind.ATTENTION:
                found[value_name("attention", i)] = self.merged(i, -(-(position + 1) // schedule.keys_per_range(position)))
            elif phase.kind is Kind.OUT:
                found[phase.writes] = self.stream[2 * i]
            elif phase.kind is Kind.GATE_UP:
                found[phase.writes] = self.active[i]
            elif phase.kind is Kind.DOWN:
                found[phase.writes] = self.stream[2 * i + 1]
            elif phase.kind is Kind.HEAD:
                found[phase.writes] = self.logits[0]
        return found

    def merged(self, layer: int, ranges: int) -> Tensor:
        """[q_heads, head_dim]: attention of a layer, of its first ranges of keys."""
        maxima, denominators = self.maxima[layer, :ranges], self.denominators[layer, :ranges]
        factors = torch.exp2(maxima - maxima.amax(0))
        total = (self.parts[layer, :ranges] * factors[..., None]).sum(0)
        return (total / (denominators * factors).sum(0)[:, None]).to(self.stream.dtype)


def plan(schedule: Schedule, phases: int, spin_limit: int) -> Launch:
    """The launch of a step."""
    d, c = schedule.dims, schedule.config
    constants = {
        "hidden": d.hidden,
        "q_heads": d.q_heads,
        "kv_heads": d.kv_heads,
        "half": d.head_dim // 2,
        "splits": schedule.splits,
        "blocks": schedule.blocks,
        "chunks": tuple(schedule.chunks(kind) for kind in (Kind.QKV, Kind.OUT, Kind.DOWN)),
        "rows": tuple(schedule.rows(kind) for kind in MATRICES),
        "depth": c.depth,
        "tile_b": next_pow2(schedule.blocks),
        "tile_p": next_pow2(phases),
        "merged": min(c.merged, schedule.splits),
        "span": c.span,
        "tile_kv": c.tile_kv,
        "limit": spin_limit,
    }
    return Launch(mega_kernel, (schedule.blocks,), constants, occupancy=1, num_worker_warps=c.num_worker_warps)


def resident_blocks(device: Device, blocks: int | None) -> int:
    """Blocks of the grid, by default one for each multiprocessor. Raises ValueError for more than
    can be resident: they wait for each other.
    """
    blocks = blocks or device.sms
    if not device.is_cpu and not 1 <= blocks <= device.sms:
        raise argument_error("blocks", f"1 to {device.sms}, the multiprocessors of {device.name}: all must be resident, one on each", blocks)
    return blocks


class Mega:
    """A program with its buffers. `step` launches it: one token for the sequence of `clocks`."""

    def __init__(
        self,
        weights: Weights,
        program: list[Phase],
        clocks: Clocks,
        cache: tuple[Tensor, Tensor],
        *,
        logits: Tensor | None = None,
        blocks: int | None = None,
        config: Config | None = None,
        spin_limit: int = 0,
    ) -> None:
        """
        Args:
            program: phases, the first of any length of `phases(weights.dims)`.
            cache: keys and values, [layers, kv_heads, max_len, head_dim] each.
            logits: where they go, [1, vocab]; by default a buffer of its own.
            blocks: of the grid; by default one for each multiprocessor.
            spin_limit: looks at a counter after which a block gives up, for `check`; 0 waits for
                ever.
        Raises: ValueError if so many blocks can't be resident at once: they would wait for each
            other for ever.
        """
        device = Device.of(weights.embedding)
        blocks = resident_blocks(device, blocks)
        self.weights, self.program, self.clocks, self.cache = weights, program, clocks, cache
        self.schedule = Schedule(weights.dims, blocks, config or default_config(device))
        where = weights.embedding.device
        self.values = Values.of(self.schedule, weights.embedding.dtype, where, logits)
        self._arrived = torch.zeros(2, len(program), dtype=torch.int32, device=where)
        self._turn = torch.zeros(1, dtype=torch.int32, device=where)
        self._stuck = torch.zeros(2, dtype=torch.int32, device=where)
        arguments = {
            "program": table(program).to(where),
            "starts": self.schedule.table().to(where),
            "arrived": self._arrived,
            "turn": self._turn,
            "stuck": self._stuck,
            "tokens": clocks.tokens,
            "counters": clocks.counters,
            "recent": clocks.recent,
            "clock": clocks.clock,
            "embedding": weights.embedding,
            "norms": weights.norms,
            "w_qkv": weights.qkv,
            "w_out": weights.out,
            "w_gate_up": weights.gate_up,
            "w_down": weights.down,
            "w_head": weights.head,
            "cos": weights.cos,
            "sin": weights.sin,
            "k": cache[0],
            "v": cache[1],
            **{name: getattr(self.values, name) for name in ("heads", "parts", "maxima", "denominators", "stream", "active", "logits", "best")},
            "steps": len(program),
            "eps": weights.eps,
            "scale": weights.scale * LOG2E,
        }
        self._launch = Bound([plan(self.schedule, len(program), spin_limit)], tuple(arguments), device)
        self._args = tuple(arguments.values())

    @property
    def dims(self) -> Dims:
        return self.weights.dims

    def named(self, position: int) -> dict[str, Tensor]:
        """What the last step, of a token at `position`, wrote: see `Values.named`."""
        return self.values.named(self.program, self.schedule, position)

    def step(self) -> None:
        """One token. No synchronisation, nothing allocated: may be captured in a graph. Two steps
        must not run at the same time on one GPU.
        """
        self._launch.run(*self._args)

    def check(self) -> None:
        """Waits for the device. Raises RuntimeError naming phase and block if one gave up waiting
        (`spin_limit`), and makes steps possible again.
        """
        phase, block = self._stuck.tolist()
        if phase:
            for tensor in (self._arrived, self._turn, self._stuck):
                tensor.zero_()
            raise RuntimeError(f"block {block} of {self.schedule.blocks} waited in vain for phase {self.program[phase - 1]}")
