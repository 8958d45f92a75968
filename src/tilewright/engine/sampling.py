"""How the next token is chosen from a step's logits: all on the device, with fixed addresses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..launch import argument_error, check_finite, check_integers, check_number, check_positive
from ..ops.adjust_logits import PROMPT, WORD, adjust_logits_out
from ..ops.argmax import argmax_out
from ..ops.sample import sample_out
from . import torch_calls
from .program import Call, Emit, StepBuffers


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen, as in `tilewright.sample` and `tilewright.adjust_logits`.

    temperature: 0 takes the likeliest token. top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps
        all. seed: equal seeds draw equal tokens.
    repetition_penalty: of tokens in prompt or answer; 1 for none. presence_penalty,
        frequency_penalty: of tokens in the answer; 0 for none.
    logit_bias: token -> number added to its logit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integers(top_k=self.top_k, seed=self.seed)
        check_positive(self.repetition_penalty, "repetition_penalty")
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            check_finite(getattr(self, name), name)
        check_number(self.top_p, "top_p")
        check_number(self.min_p, "min_p")
        if not -(2**63) <= self.seed < 2**63:
            raise argument_error("seed", "a 64-bit number", self.seed)
        if self.temperature < 0:
            raise argument_error("temperature", "0 or more", self.temperature)
        if not 0 <= self.top_k < 2**31:
            raise argument_error("top_k", "0 (all) or more, below 2**31", self.top_k)
        if not 0 < self.top_p <= 1:
            raise argument_error("top_p", "above 0 and at most 1", self.top_p)
        if not 0 <= self.min_p <= 1:
            raise argument_error("min_p", "0 (all) to 1", self.min_p)
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a mapping from tokens to numbers, got {self.logit_bias!r:.80}")
        for token, bias in self.logit_bias.items():
            check_integers(**{"a token of logit_bias": token})
            check_number(bias, f"logit_bias[{token}]")
            if math.isnan(bias):
                raise argument_error(f"logit_bias[{token}]", "a number, or an infinity", bias)

    @property
    def penalties(self) -> dict[str, float]:
        """Those that are given, as `adjust_logits` names them."""
        neutral = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
        return {name: value for name in neutral if (value := getattr(self, f"{name}_penalty")) != neutral[name]}

    @property
    def plain(self) -> bool:
        """Whether logits are taken as they are."""
        return not self.penalties and not self.logit_bias

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides which calls a step makes."""
        drawn = self.temperature > 0
        return drawn, drawn and self.top_k > 0, drawn and self.top_p < 1, drawn and self.min_p > 0, *self.penalties, bool(self.logit_bias)


LIKELIEST = Sampling(temperature=0)


@lru_cache(maxsize=8)
def _offered(vocab: int, never: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [words]: the bits of all tokens but `never`; those behind the vocabulary name none."""
    bits = torch.zeros(math.ceil(vocab / WORD) * WORD, dtype=torch.int64)
    bits[:vocab] = 1
    bits[[token for token in never if 0 <= token < vocab]] = 0
    return (bits.view(-1, WORD) << torch.arange(WORD)).sum(-1).int().to(device)


class Choice:
    """The device tensors that a choice reads and writes.

    batch: rows. vocab: columns of the logits. The larger ones are made when a choice first needs
    them.

    counts: int32 [batch, vocab], as `adjust_logits` has them. mask: int32 [batch, words].
    """

    def __init__(self, batch: int, vocab: int, device: torch.device) -> None:
        self._shape, self._device = (batch, vocab), device
        self._numbers = {
            name: torch.full((1,), value, dtype=dtype, device=device)
            for name, value, dtype in (
                ("seed", 0, torch.int64),
                ("temperature", 1, torch.float32),
                ("top_k", 0, torch.int32),
                ("top_p", 1, torch.float32),
                ("min_p", 0, torch.float32),
                ("repetition_penalty", 1, torch.float32),
                ("presence_penalty", 0, torch.float32),
                ("frequency_penalty", 0, torch.float32),
            )
        }
        self._tables: dict[str, Tensor] = {}

    def _table(self, name: str, wide: int, dtype: torch.dtype, rows: int) -> Tensor:
        if name not in self._tables:
            self._tables[name] = torch.zeros(rows, wide, dtype=dtype, device=self._device)
        return self._tables[name]

    def begin(self, rows: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """rows: the prompts, before their first new token is chosen."""
        for name, tensor in self._numbers.items():
            tensor.fill_(getattr(sampling, name))
        batch, vocab = self._shape
        if sampling.penalties:
            counts = self._table("counts", vocab, torch.int32, batch).zero_()
            for count, row in zip(counts, rows, strict=False):
                count[torch.tensor(sorted(set(row)), device=self._device)] = PROMPT
        if sampling.logit_bias:
            if (last := max(sampling.logit_bias)) >= vocab or min(sampling.logit_bias) < 0:
                raise argument_error("tokens of logit_bias", f"0 to {vocab - 1}", f"{min(sampling.logit_bias)} to {last}")
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
            if len(values) == vocab and bool((values == -math.inf).all()):
                raise argument_error("logit_bias", "above -inf for at least one token", "-inf for all")
            bias = self._table("bias", vocab, torch.float32, 1).zero_()
            bias[0, torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=self._device)] = values.to(self._device)

    def allow(self, mask: Tensor, ended: Sequence[bool], sampling: Sampling) -> None:
        """mask: int32 [sequences, words], the tokens that may come next, as a grammar has them.
        ended: the sequences whose rows do not count. sampling: whose biases may forbid tokens.
        """
        vocab, sequences = self._shape[1], len(ended)
        wide = math.ceil(vocab / WORD)
        if not isinstance(mask, Tensor):
            raise TypeError(f"a grammar's mask must be a tensor, got {mask!r:.80}")
        if mask.dtype != torch.int32 or mask.shape != (sequences, wide):
            raise argument_error("a grammar's mask", f"int32 [{sequences}, {wide}], a row for each sequence", f"{mask.dtype} {tuple(mask.shape)}")
        never = tuple(token for token, bias in sampling.logit_bias.items() if bias < -torch.finfo(torch.float32).max)
        named = (mask & _offered(vocab, never, mask.device)) != 0
        for i, (some, done) in enumerate(zip(named.any(-1).tolist(), ended, strict=True)):
            if not some and not done:
                be = "of at least one token, as for the end of a text" + (", whose logit_bias is above -inf" if never else "")
                raise argument_error(f"a grammar's mask of sequence {i}", be, "none")
        self._table("mask", wide, torch.int32, self._shape[0])[: len(mask)].copy_(mask)

    def calls(self, buffers: StepBuffers, tokens: Tensor, draws: Tensor, sampling: Sampling, *, masked: bool) -> Emit:
        """From the step's logits to `tokens`. draws: int64 [1], how many were made."""
        batch, vocab = buffers.batch, self._shape[1]
        logits = buffers.tensor("logits", batch, vocab)
        penalties = {name: self._numbers[f"{name}_penalty"] for name in sampling.penalties}
        if penalties or sampling.logit_bias or masked:
            counts = self._table("counts", vocab, torch.int32, self._shape[0])[:batch] if penalties else None
            bias = self._table("bias", vocab, torch.float32, 1) if sampling.logit_bias else None
            mask = self._table("mask", math.ceil(vocab / WORD), torch.int32, self._shape[0])[:batch] if masked else None
            adjusted = buffers.tensor("logits.adjusted", batch, vocab, dtype=torch.float32)
            how = {name: penalties.get(name) for name in ("repetition", "presence", "frequency")}
            yield Call.of("adjust", adjust_logits_out, logits=logits, counts=counts, bias=bias, mask=mask, out=adjusted, **how)
            logits = adjusted
        yield from self.choose(logits, tokens, draws, sampling)
        if penalties:
            yield Call("count", torch_calls.count, (self._tables["counts"][:batch], tokens))

    def choose(self, logits: Tensor, tokens: Tensor, draws: Tensor, sampling: Sampling) -> Emit:
        """A token of each row of logits. draws: int64 [1] or [rows]."""
        if sampling.temperature == 0:
            yield Call.of("argmax", argmax_out, x=logits, out=tokens)
        else:
            given = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
            cuts = {name: self._numbers[name] if wanted else None for name, wanted in given.items()}
            how = {"seed": self._numbers["seed"], "offset": draws, "temperature": self._numbers["temperature"]}
            yield Call.of("sample", sample_out, logits=logits, out=tokens, **how, **cuts)
