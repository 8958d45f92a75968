"""The step as one stream of weights: which models fit, buffers, and the launch of
`mega_stream_kernel`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...launch import Bound, Device, Launch, argument_error, next_pow2
from ...ops.common.softmax_tiles import LOG2E
from .pack import LARGEST, Weights
from .program import MATRICES, Dims, Kind, Phase, value_name
from .run import Clocks, Mega, resident_blocks
from .schedule import Config
from .stream_kernel import LANES, mega_stream_kernel
from .stream_schedule import StreamConfig, StreamSchedule, default_stream_config

PHASES = (Kind.QKV, Kind.ATTENTION, Kind.OUT, Kind.GATE_UP, Kind.DOWN)  # by the number that the kernel gives the words of each: see `place`


def why_not(dims: Dims, dtype: torch.dtype, config: StreamConfig) -> str:
    """What keeps a model from being one stream, or "" if nothing does."""
    packed = packed_in(dtype)

    def power(n: int) -> bool:
        return n > 0 and n & (n - 1) == 0

    if not power(dims.hidden) or dims.q_heads * dims.head_dim != dims.hidden:
        return "hidden is no power of two, or not the width of all query heads"
    if dims.inter % dims.hidden or not power(dims.inter // dims.hidden):
        return "inter is no power of two times hidden"
    if not power(dims.group) or not power(dims.kv_heads):
        return "query heads of a key head, or key heads, are no power of two"
    fold, rows = dims.inter // dims.hidden, config.rows
    if config.strips % fold or (dims.hidden // packed * fold) % config.strips:
        return f"{config.strips} strips do not divide {fold} rows of the stream, a row of `down`"
    width = strip_width(dims, packed, config)
    if rows % (2 * packed) or rows % (fold * packed) or rows % (fold * config.pair):
        return f"{rows} rows are no multiple of the neighbours in a word, or of the {config.pair} pieces that are read at once"
    if dims.head_dim % rows or rows > width:
        return f"{rows} rows do not divide head_dim, or are more than {width}, a strip's words"
    threads, head_words = 32 * (config.num_worker_warps or 0), dims.head_dim // packed
    if min(dims.hidden // packed, dims.group * head_words * (packed + 2)) < threads:
        return f"words that are waited for together are fewer than {threads} threads: see `words` in the kernel"
    if any(rows * columns // dims.hidden % config.rows for rows, columns in map(dims.shape, MATRICES)):
        return f"a matrix's rows are no multiple of {config.rows}"
    size = sum(rows * columns * (1 if kind is Kind.HEAD else dims.layers) for kind in MATRICES for rows, columns in [dims.shape(kind)])
    if size // packed > LARGEST:
        return f"{size} elements of all matrices are more than 32-bit indices reach"
    return ""


def strip_width(dims: Dims, packed: int, config: StreamConfig) -> int:
    """Words of a strip that are read at once."""
    return min(LANES, dims.hidden // packed * (dims.inter // dims.hidden) // config.strips)


@dataclass(frozen=True, slots=True)
class Words:
    """What the phases say, flat; `arguments` has it as `mega_stream_kernel` does."""

    heads: Tensor
    parts: Tensor
    attended: Tensor
    active: Tensor
    stream: Tensor
    logits: Tensor
    best: Tensor

    @staticmethod
    def of(schedule: StreamSchedule, dtype: torch.dtype, device: torch.device, logits: Tensor | None) -> "Words":
        d, splits, packed = schedule.dims, next_pow2(schedule.splits), packed_in(dtype)
        head_words = d.head_dim // packed

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return Words(
            heads=words(d.layers, schedule.padded(Kind.QKV) // packed),
            parts=words(d.layers * d.kv_heads, next_pow2(packed + 2), splits, d.group * head_words),
            attended=words(d.layers, d.hidden // packed),
            active=words(d.layers, schedule.padded(Kind.GATE_UP) // 2 // packed),
            stream=words(2 * d.layers, max(schedule.padded(Kind.OUT), schedule.padded(Kind.DOWN) // schedule.fold) // packed),
            logits=torch.zeros(1, d.vocab, dtype=dtype, device=device) if logits is None else logits,
            best=words(2, schedule.tile_best),
        )

    def arguments(self, schedule: StreamSchedule) -> dict[str, Tensor]:
        """By the kernel's names, as they are read, and as tiles write them: a block's stand
        `blocks` apart, so rows are longer than what is read of them.
        """
        d, packed, c = schedule.dims, packed_in(self.logits.dtype), schedule.config
        said = c.rows // packed
        width = strip_width(schedule.dims, packed, c)

        def dealt(rows: Tensor, kind: Kind, words: int) -> Tensor:
            tiles = schedule.padded(kind) // c.rows
            return rows[:, : tiles * words].view(len(rows), -1, schedule.blocks, words)

        # Queries of a key head, and keys and values, each as often as gives every thread a word of
        # its own to look at.
        head_words, length = d.head_dim // packed, self.heads.shape[1]
        copies = max(d.group, 32 * (c.num_worker_warps or 0) // head_words)
        size = d.group * head_words
        queries = self.heads.as_strided((d.layers, d.kv_heads, copies // d.group, size), (length, size, 0, 1))
        own = self.heads.as_strided((d.layers, 2 * d.kv_heads, copies, head_words), (length, head_words, 0, 1), d.q_heads * head_words)
        return {
            "queries": queries,
            "own": own,
            "by_qkv": dealt(self.heads, Kind.QKV, said),
            "parts": self.parts,
            "attended": self.attended,
            "active": self.active[:, : d.inter // packed].view(len(self.active), c.strips, -1, width),
            "by_gate_up": dealt(self.active, Kind.GATE_UP, said // 2),
            "stream": self.stream[:, : d.hidden // packed],
            "by_out": dealt(self.stream, Kind.OUT, said),
            "by_down": dealt(self.stream, Kind.DOWN, said // schedule.fold),
            "logits": self.logits.view(-1),
            "best": self.best,
            "touched": torch.zeros(schedule.blocks, 1, c.tile_kv, head_words, dtype=torch.int32, device=self.best.device),
        }

    def plain(self, words: Tensor) -> Tensor:
        """The values in words of the model's dtype, flat."""
        return words.to(torch.int32).contiguous().view(self.logits.dtype).flatten()

    def named(self, program: list[Phase], schedule: StreamSchedule) -> dict[str, Tensor]:
        """Every value that the program wrote, by name, in its order; `parts` as the merged
        attention.
        """
        d, found = schedule.dims, dict[str, Tensor]()
        packed = packed_in(self.logits.dtype)
        for phase in program:
            i = min(phase.layer, d.layers - 1)
            if phase.kind is Kind.QKV:
                found[phase.writes] = self.plain(self.heads[i, : d.heads * d.head_dim // packed])
            elif phase.kind is Kind.ATTENTION:
                found[value_name("attention", i)] = self.plain(self.attended[i])
            elif phase.kind is Kind.OUT:
                found[phase.writes] = self.plain(self.stream[2 * i, : d.hidden // packed])
            elif phase.kind is Kind.GATE_UP:
                found[phase.writes] = self.plain(self.active[i, : d.inter // packed])
            elif phase.kind is Kind.DOWN:
                found[phase.writes] = self.plain(self.stream[2 * i + 1, : d.hidden // packed])
            elif phase.kind is Kind.HEAD:
                found[phase.writes] = self.logits[0]
        return found


def packed_in(dtype: torch.dtype) -> int:
    """Values of a word."""
    return 1 if dtype is torch.float32 else 2


def plan(schedule: StreamSchedule, bases: tuple[int, ...], dtype: torch.dtype, spin_limit: int) -> Launch:
    """The launch of a step. bases: first row of each kind of matrix in the stream of weights."""
    d, c = schedule.dims, schedule.config
    width = strip_width(d, packed_in(dtype), c)
    constants = {
        "layers": d.layers,
        "hidden": d.hidden,
        "q_heads": d.q_heads,
        "kv_heads": d.kv_heads,
        "half": d.head_dim // 2,
        "fold": schedule.fold,
        "r": c.rows,
        "t": c.strips,
        "pair": c.pair,
        "counts": schedule.counts,
        "turns": tuple(schedule.turns(kind, width) for kind in MATRICES[:4]),
        "bases": tuple(base // c.rows for base in bases),
        "blocks": schedule.blocks,
        "tile_b": schedule.tile_best,
        "splits": schedule.splits,
        "slices": schedule.slices,
        "span": c.span,
        "tile_kv": c.tile_kv,
        "tile_long": c.tile_long,
        "ahead": c.ahead,
        "packed": packed_in(dtype),
        "limit": spin_limit,
    }
    return Launch(mega_stream_kernel, (schedule.blocks,), constants, occupancy=1, num_worker_warps=c.num_worker_warps)


def as_words(tensor: Tensor) -> Tensor:
    """int32 view of a tensor: two neighbours of 16 bits, or one of 32, in each."""
    return tensor.view(torch.int32)


def reduced(config: StreamConfig, dims: Dims, dtype: torch.dtype) -> StreamConfig:
    """With as few rows as a small model needs."""
    while config.rows > 2 and why_not(dims, dtype, config):
        config = replace(config, rows=config.rows // 2)
    return config


class StreamMega:
    """A program with its buffers, as `Mega`. `step` launches it."""

    def __init__(
        self,
        weights: Weights,
        program: list[Phase],
        clocks: Clocks,
        cache: tuple[Tensor, Tensor],
        *,
        logits: Tensor | None = None,
        blocks: int | None = None,
        config: StreamConfig | None = None,
        spin_limit: int = 0,
    ) -> None:
        """Args and Raises: as `Mega`; and ValueError for a model that is no stream, with the
        reason.
        """
        device, dtype = Device.of(weights.embedding), weights.embedding.dtype
        blocks = resident_blocks(device, blocks)
        config = config or default_stream_config(device)
        if config.num_worker_warps is None and not device.is_cpu:
            raise argument_error("config.num_worker_warps", "a number on a GPU: the words that are waited for together depend on it", None)
        config = reduced(config, weights.dims, dtype)
        if weights.whole is None or why_not(weights.dims, dtype, config):
            raise argument_error("the model's sizes", "those of one stream of weights", why_not(weights.dims, dtype, config))
        self.weights, self.program, self.clocks, self.cache = weights, program, clocks, cache
        self.schedule = schedule = StreamSchedule(weights.dims, blocks, config)
        where = weights.embedding.device
        self.values = Words.of(schedule, dtype, where, logits)
        self._epoch = torch.zeros(blocks, dtype=torch.int32, device=where)
        self._stuck = torch.zeros(2, dtype=torch.int32, device=where)
        packed = packed_in(dtype)
        width = strip_width(weights.dims, packed, config)
        strip = weights.dims.inter // packed // config.strips
        filled = sum(schedule.turns(phase.kind, width) for phase in program if phase.kind in MATRICES)
        arguments = {
            "epoch": self._epoch,
            "stuck": self._stuck,
            "tokens": clocks.tokens,
            "counters": clocks.counters,
            "recent": clocks.recent,
            "clock": clocks.clock,
            "w": as_words(weights.whole).view(-1, strip // width, width),
            "embedding": as_words(weights.embedding),
            "norms": as_words(weights.norms),
            "cos": weights.cos,
            "sin": weights.sin,
            "k": as_words(cache[0]),
            "v": as_words(cache[1]),
            **self.values.arguments(schedule),
            "turns": filled + (program[-1].kind is Kind.ATTENTION),  # which comes before the turn behind it
            "filled": filled,
            "attentions": sum(phase.kind is Kind.ATTENTION for phase in program),
            "choices": int(program[-1].kind is Kind.CHOOSE),
            "chunk_tiles": config.span // config.tile_long,
            "most": LARGEST,
            "eps": weights.eps,
            "scale": weights.scale * LOG2E,
        }
        self._launch = Bound([plan(schedule, weights.bases, dtype, spin_limit)], (*arguments, "steps"), device)
        self._args = tuple(arguments.values())

    @property
    def dims(self) -> Dims:
        return self.weights.dims

    def named(self, position: int) -> dict[str, Tensor]:
        """What the last step, of a token at `position`, wrote: see `Words.named`."""
        return self.values.named(self.program, self.schedule)

    def step(self, tokens: int = 1) -> None:
        """So many tokens, in one launch. No synchronisation, nothing allocated: may be captured.
        Two launches must not run at the same time.
        """
        self._launch.run(*self._args, tokens)

    def check(self) -> None:
        """Waits for the device. Raises RuntimeError naming phase and block if one gave up waiting
        (`spin_limit`), and makes steps possible again.
        """
        place, block = self._stuck.tolist()
        if place:
            self._stuck.zero_()
            layer, number = divmod(place - 1, 8)
            phase = Phase(Kind.HEAD if layer == self.dims.layers else PHASES[number], layer)
            raise RuntimeError(f"block {block} of {self.schedule.blocks} waited in vain for phase {phase}")


def mega_of(
    weights: Weights,
    program: list[Phase],
    clocks: Clocks,
    cache: tuple[Tensor, Tensor],
    *,
    logits: Tensor | None = None,
    blocks: int | None = None,
    config: Config | StreamConfig | None = None,
    spin_limit: int = 0,
) -> Mega | StreamMega:
    """The step as one stream of weights if the model fits and `config` does not say otherwise, else
    phase by phase. Arguments: as `Mega`.
    """
    device = Device.of(weights.embedding)
    fits = weights.whole is not None
    if fits and config is None:
        fits = not why_not(weights.dims, weights.embedding.dtype, reduced(default_stream_config(device), weights.dims, weights.embedding.dtype))
    if isinstance(config, StreamConfig) or (config is None and fits):
        return StreamMega(weights, program, clocks, cache, logits=logits, blocks=blocks, config=config, spin_limit=spin_limit)
    return Mega(weights, program, clocks, cache, logits=logits, blocks=blocks, config=config, spin_limit=spin_limit)
