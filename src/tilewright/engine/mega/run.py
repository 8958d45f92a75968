"""The step: buffers made once, one launch for one or more tokens."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...launch import Bound, Device, Launch, argument_error, next_pow2
from ...ops.common.softmax_tiles import LOG2E
from .kernel import mega_kernel
from .pack import Weights, as_words, head_norm_words, pack, rope_words, stream_words
from .shape import Config, Schedule, default_blocks, default_config, why_not
from .words import ARRIVAL, FIELD, FIELD_BITS, FRACTION, HALF_FIELD, NOWHERE, RANGE

PLACES = ("qkv", "shares of attention", "the sum behind attention", "the sum behind the MLP")  # of a layer, by number: what a poll is for
SPIN_LIMIT = 1 << 24  # polls, a minute of them


@dataclass(frozen=True, slots=True)
class Clocks:
    """The device tensors of `engine.state.State` that a step reads and moves on."""

    tokens: Tensor
    counters: Tensor
    recent: Tensor
    clock: Tensor


def plan(schedule: Schedule, spin_limit: int) -> Launch:
    """The launch of a step."""
    s, d, c = schedule, schedule.dims, schedule.config
    constants = {
        "model": (d.layers, d.hidden, d.q_heads, d.kv_heads, d.vocab, int(d.head_norms)),
        "forms": (*s.wide, s.out.width, *s.split.down),
        "counts": (s.qkv_groups, s.out_groups, s.down_groups, s.down_part, s.head_groups, s.split.out_parts, s.out_words),
        "classes": (s.attending, s.split.qkv, s.attending_head_groups, *s.split.attending, *s.split.others),
        "turns": s.turns,
        "sizes": (c.strips, c.line, c.span, c.short, c.latency),
        "blocks": s.blocks,
        "limit": spin_limit,
    }
    return Launch(mega_kernel, (s.blocks,), constants, occupancy=1, num_worker_warps=c.num_worker_warps)


class Mega:
    """A model's step with its buffers. `step` launches it, for the sequence of `clocks`."""

    def __init__(  # noqa: PLR0913 options by keyword
        self,
        weights: Weights,
        clocks: Clocks,
        cache: tuple[Tensor, Tensor],
        *,
        logits: Tensor | None = None,
        blocks: int | None = None,
        config: Config | None = None,
        choose: bool = True,
        spin_limit: int = SPIN_LIMIT,
        tiles: Tensor | None = None,
    ) -> None:
        """
        Args:
            cache: keys and values, [layers, kv_heads, max_len, head_dim] each.
            logits: where they go, [1, vocab]; by default a buffer of its own.
            blocks: of the grid; by default as `default_blocks` finds.
            choose: the likeliest token follows; without it a step ends with the logits.
            spin_limit: polls after which a block gives up, for `check`; 0 waits for ever.
            tiles: the weights as `pack` makes them, of another Mega with the same schedule.
        Raises: ValueError if so many blocks can't be resident at once: they would wait for each
            other for ever; or for sizes that no tile holds.
        """
        device, d, like = Device.of(weights.embedding), weights.dims, weights.embedding
        config = config or default_config(device, d.head_dim)
        while cache[0].shape[2] % config.span:
            config = replace(config, span=config.span // 2)
        blocks = blocks or default_blocks(d, device, config)
        if not device.is_cpu and not 1 <= blocks <= device.sms:
            raise argument_error("blocks", f"1 to {device.sms}, the multiprocessors of {device.name}: all must be resident, one on each", blocks)
        reason = why_not(d, blocks, config)
        if reason:
            raise argument_error("the model's sizes", "sizes that fit the megakernel's tiles", reason)
        self.weights, self.clocks, self.cache, self.schedule = weights, clocks, cache, Schedule(d, blocks, config)
        s, where = self.schedule, like.device
        self.tiles = pack(weights, s) if tiles is None else tiles
        self.logits = torch.zeros(1, d.vocab, dtype=like.dtype, device=where) if logits is None else logits
        head_words, threads = d.head_dim // 2, 32 * (config.num_worker_warps or 8)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=where)

        self._sums = zeros(4 * d.layers, s.hidden_words + 1)
        self._qkv = zeros(d.layers, 2 * s.qkv_rows // 2)
        self._epoch, self._stuck = zeros(blocks, dtype=torch.int32), zeros(2, dtype=torch.int32)
        self._shares = zeros(d.layers * d.q_heads, next_pow2(max(s.split.out_parts, threads // 4 // head_words)), 4, head_words)
        self._best = zeros(2, next_pow2(max(blocks, threads // 2)))
        copies = max(1, threads // head_words)
        arguments = {
            "w": self.tiles,
            "embedding": stream_words(like, s),
            "norms": stream_words(weights.norms, s),
            "head_norms": head_norm_words(weights),
            "rope": rope_words(weights),
            "k": as_words(cache[0]).view(d.layers * d.kv_heads, -1, head_words),
            "v": as_words(cache[1]).view(d.layers * d.kv_heads, -1, head_words),
            "sums": self._sums.as_strided(
                (4 * d.layers, max(1, threads // s.wide.width // config.strips), s.hidden_words + 1), (s.hidden_words + 1, 0, 1)
            ),
            "qkv_words": self._qkv.as_strided((d.layers, copies, s.qkv_rows), (s.qkv_rows, 0, 1)),
            "shares": self._shares,
            "best": self._best,
            "logits": self.logits.view(-1),
            "epoch": self._epoch,
            "stuck": self._stuck,
            "tokens": clocks.tokens,
            "counters": clocks.counters,
            "recent": clocks.recent,
            "clock": clocks.clock,
        }
        self._launch = Bound([plan(s, spin_limit)], (*arguments, "steps", "choose", "eps", "scale"), device)
        self._args, self._rest = tuple(arguments.values()), (int(choose), weights.eps, weights.scale * LOG2E)
        self.restart()

    def restart(self) -> None:
        """As if no token had been written: also after a block gave up."""
        for tensor in (self._sums, self._qkv, self._epoch, self._stuck, self._shares, self._best):
            tensor.zero_()
        self._stuck.fill_(NOWHERE)
        self._sums[2 * self.weights.dims.layers :, :-1] = ARRIVAL  # the first epoch is odd: of its sums, the clearing counts as done

    def step(self, tokens: int = 1) -> None:
        """So many tokens, in one launch. No synchronisation, nothing allocated: may be captured.
        Two launches must not run at the same time.
        """
        self._launch.run(*self._args, tokens, *self._rest)

    def check(self) -> None:
        """Waits for the device. Raises RuntimeError, naming what was waited for and the block, if
        one gave up, or if a sum may have left its range; and makes steps possible again.
        """
        waited, ranged = self._stuck.tolist()
        if int(self._sums[:, -1].max()) > RANGE // 2:  # of the last token, whose sums nobody has cleared
            ranged = min(ranged, NOWHERE - 1)
        if min(waited, ranged) == NOWHERE:
            return
        self.restart()
        if ranged < NOWHERE:  # such sums may have kept others waiting
            raise RuntimeError(f'a sum may have left the fixed point\'s range of {RANGE}: use mode="graph" for this model')
        place, block = divmod(waited, 256)
        layer, number = divmod(place, 8)
        what = "the blocks' best tokens" if layer == self.weights.dims.layers else f"{PLACES[number]} of layer {layer}"
        raise RuntimeError(f"block {block} of {self.schedule.blocks} gave up waiting for {what}")

    def named(self) -> dict[str, Tensor]:
        """What the last token's blocks told each other, by name."""
        d, s = self.weights.dims, self.schedule
        parity = int(self._epoch[0]) & 1
        found: dict[str, Tensor] = {}
        for layer in range(d.layers):
            found[f"layers.{layer}.qkv"] = self._qkv[layer, : s.qkv_rows // 2].int().view(self.logits.dtype)
            for half, (name, adders) in enumerate((("out", d.q_heads), ("down", s.blocks))):
                found[f"layers.{layer}.{name}"] = fixed_to_float(self._sums[parity * 2 * d.layers + 2 * layer + half, :-1], adders)[: d.hidden]
        return found | {"logits": self.logits[0]}


def fixed_to_float(words: Tensor, adders: int) -> Tensor:
    """The values of whole words of a sum, fp32."""
    offset = HALF_FIELD // adders * adders
    fields = torch.stack((words & FIELD, (words >> FIELD_BITS) & FIELD), -1)
    return (fields - offset).flatten().float() * 2.0**-FRACTION
