"""The step: buffers made once, one launch for one or more tokens."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...launch import Bound, Device, Launch, next_pow2
from ...ops.common.tiles import LOG2E
from .kernel import mega_kernel
from .pack import Packed, Weights, as_words, head_norm_words, pack, rope_words, stream_words
from .shape import Config, default_config, schedule_of
from .sums import ARRIVAL, FIELD, FIELD_BITS, FRACTION, HALF_FIELD, RANGE
from .words import NOWHERE

PLACES = ("qkv", "shares of attention", "the sum behind attention", "the sum behind the MLP")  # of a layer: what a block waits for
SPIN_LIMIT = 1 << 24  # polls, a minute of them
WARPS = 8


class OutOfRange(RuntimeError, ValueError):
    """The sums of a model leave the megakernel's fixed point: about the model, not a bug."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """The device tensors of `engine.state.State` that a step reads and moves on."""

    tokens: Tensor
    counters: Tensor
    recent: Tensor
    clock: Tensor

    @staticmethod
    def at(token: int, position: int, rows: int, device: torch.device) -> "Clocks":
        """Of one sequence that stands at a position, with room for `rows` tokens."""
        tokens, counters = torch.tensor([token], device=device), torch.full((2, 16), position, dtype=torch.int32, device=device)
        recent, clock = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((rows, 16), (2,)))
        return Clocks(tokens.repeat(16), counters, recent, clock)


class Mega:
    """A model's step with its buffers. `step` launches it, for the sequence of `clocks`."""

    def __init__(  # noqa: PLR0913 options by keyword
        self,
        weights: Weights,
        clocks: Clocks,
        cache: tuple[Tensor, Tensor],
        *,
        logits: Tensor | None = None,
        blocks: int = 0,
        config: Config | None = None,
        choose: bool = True,
        spin_limit: int = SPIN_LIMIT,
        packed: Packed | None = None,
    ) -> None:
        """
        Args:
            cache: keys and values, [layers, kv_heads, max_len, head_dim] each.
            logits: where they go, [1, vocab]; by default a buffer of its own.
            blocks: of the grid; 0 and ValueError as in `schedule_of`.
            choose: the likeliest token follows; without it a step ends with the logits.
            spin_limit: polls after which a block gives up, for `check`; 0 for never.
            packed: the weights, of another Mega with the same schedule.
        """
        d, like, device = weights.dims, weights.embedding, Device.of(weights.embedding)
        config = config or default_config(device, d.head_dim, weights.pairs > 1)
        while cache[0].shape[2] % config.span:
            config = replace(config, span=config.span // 2)
        self.weights, self.clocks, self.cache, self.schedule = weights, clocks, cache, schedule_of(d, device, blocks, config)
        s, head_words, threads = self.schedule, d.head_dim // 2, 32 * WARPS
        self.packed = packed or pack(weights, s)
        self.logits = torch.zeros(1, d.vocab, dtype=like.dtype, device=like.device) if logits is None else logits

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        def copies(tensor: Tensor, words: int) -> Tensor:
            """With an axis of copies, so that each thread has one of so many words to poll."""
            return tensor[:, None].expand(-1, max(1, threads // words), -1)

        self._sums, self._qkv = zeros(4 * d.layers, s.hidden_words + 1), zeros(d.layers, s.qkv_rows)
        self._epoch, self._stuck = zeros(s.blocks, dtype=torch.int32), zeros(2, dtype=torch.int32)
        self._shares = zeros(d.layers * d.q_heads, next_pow2(max(s.split.out_parts, threads // 4 // head_words)), 4, head_words)
        self._best = zeros(2, next_pow2(max(s.blocks, threads // 2)))
        arguments = {
            "w": self.packed.tiles,
            "scales": self.packed.scales,
            "embedding": stream_words(like, s),
            "norms": stream_words(weights.norms, s),
            "head_norms": head_norm_words(weights),
            "rope": rope_words(weights),
            "k": as_words(cache[0]).view(d.layers * d.kv_heads, -1, head_words),
            "v": as_words(cache[1]).view(d.layers * d.kv_heads, -1, head_words),
            "sums": copies(self._sums, s.wide_width * config.strips),
            "qkv_words": copies(self._qkv, head_words),
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
        constants = {"schedule": s.numbers(), "limit": spin_limit}
        launch = Launch(mega_kernel, (s.blocks,), constants, occupancy=1, num_worker_warps=None if device.is_cpu else WARPS)
        self._launch = Bound([launch], (*arguments, "steps", "choose", "eps", "scale"), device)
        self._args, self._rest = tuple(arguments.values()), (int(choose), weights.eps, weights.scale * LOG2E)
        self.restart()

    def restart(self) -> None:
        """As if no token had been written, also after a block gave up."""
        for tensor in (self._sums, self._qkv, self._epoch, self._shares, self._best):
            tensor.zero_()
        self._stuck.fill_(NOWHERE)
        self._sums[2 * self.weights.dims.layers :, :-1] = ARRIVAL  # the first epoch is odd, and nobody clears its sums before it

    def step(self, tokens: int = 1) -> None:
        """So many tokens, in one launch. It neither synchronises nor allocates, so it may be
        captured. Two launches must not run at the same time.
        """
        self._launch.run(*self._args, tokens, *self._rest)

    def check(self) -> None:
        """Waits for the device. Raises RuntimeError if a block gave up, with its number and what it
        waited for, OutOfRange if a sum may have left its range. Steps are possible again after it.
        """
        waited, ranged = self._stuck.tolist()
        if int(self._sums[:, -1].max()) > RANGE // 2:  # of the last token, whose sums nobody has cleared
            ranged = min(ranged, NOWHERE - 1)
        if min(waited, ranged) == NOWHERE:
            return
        self.restart()
        if ranged < NOWHERE:  # such a sum may also have kept others waiting
            raise OutOfRange(f'a sum may have left the fixed point\'s range of {RANGE}: use mode="graph" for this model')
        place, block = divmod(waited, 256)
        layer, number = divmod(place, 8)
        what = "the blocks' best tokens" if layer == self.weights.dims.layers else f"{PLACES[number]} of layer {layer}"
        raise RuntimeError(f"block {block} of {self.schedule.blocks} gave up waiting for {what}")

    def named(self) -> dict[str, Tensor]:
        """The values that blocks exchanged for the last token, by name."""
        d, s, found = self.weights.dims, self.schedule, dict[str, Tensor]()
        sums = self._sums.view(2, d.layers, 2, -1)[int(self._epoch[0]) & 1, ..., :-1]
        for layer in range(d.layers):
            found[f"layers.{layer}.qkv"] = self._qkv[layer, : s.qkv_rows // 2].int().view(self.logits.dtype)
            for name, words, adders in zip(("out", "down"), sums[layer], (d.q_heads, s.blocks), strict=True):
                found[f"layers.{layer}.{name}"] = fixed_to_float(words, adders)[: d.hidden]
        return found | {"logits": self.logits[0]}


def fixed_to_float(words: Tensor, adders: int) -> Tensor:
    """The values of whole words of a sum, fp32."""
    fields = torch.stack((words & FIELD, (words >> FIELD_BITS) & FIELD), -1)
    return (fields - HALF_FIELD // adders * adders).flatten().float() * 2.0**-FRACTION
