"""How a token is drawn: each request has its own temperature, top_p, top_k, min_p and seed.

transformers applies its logits processors to a step's logits and takes the largest. Ours draws with
the op `sample`, and leaves 1 for the drawn token and 0 for the others. So a draw depends on the
request's seed and the token's position, and not on what else is in the step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.logits_process import LogitsProcessorList

from ...ops.sample import sample_out


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0: the most probable token. top_k 0: all."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float = 0.0


class Draws(ContinuousBatchingLogitsProcessorList):
    """Stands where transformers' list of logits processors does."""

    def __init__(self) -> None:
        super().__init__(LogitsProcessorList())
        self.tensors_required = 7  # rows of int32
        self.do_processing = True

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Nothing to check: `Sampling` is ours."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()  # temperature 0: rows that only pad a step draw nothing

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        asked: list[Sampling] = [state.logit_processor_kwargs["sampling"] for state in states]
        if asked:
            columns = ([getattr(s, name) for s in asked] for name in ("temperature", "top_p", "min_p"))
            floats = torch.tensor(list(columns), dtype=torch.float32).view(torch.int32)
            places = torch.tensor([[s.top_k for s in asked], [state.position_offset for state in states]], dtype=torch.int32)
            seeds = torch.tensor([s.seed for s in asked], dtype=torch.int64).view(torch.int32).view(-1, 2).T
            arg_storage[:, : len(asked)] = torch.cat([floats, places, seeds]).to(arg_storage.device)
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        rows = logits_processor_args[:, : scores.shape[0]]
        temperature, top_p, min_p = rows[:3].contiguous().view(torch.float32)
        seed = rows[5:].T.contiguous().view(torch.int64)[:, 0]
        drawn = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
        sample_out(scores, seed, rows[4].long(), temperature, rows[3].contiguous(), top_p, min_p, drawn)
        return torch.zeros_like(scores).scatter_(1, drawn[:, None], 1.0)
