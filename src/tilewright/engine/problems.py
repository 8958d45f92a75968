"""The problems of a known model in the engine, found by running its calls on meta tensors.

Tuner and benchmark use them.
"""

import torch

from .. import ops
from ..launch import Device, decisions, one_of, traced
from ..models.configs import CONFIGS
from ..testing import op_name
from ..testing.problems import Task
from .prefill import Prefill
from .program import Call, distinct
from .read import read
from .sampling import LIKELIEST
from .state import State
from .weights import Fusion

STEPS = (1, 2, 4, 8, 16, 32, 64)  # tokens of a decode step: one of each sequence
PROMPTS = (128, 512, 2048, 8192)  # tokens of a prompt
CONTEXTS = (1024, 4096, 16_384)  # keys that a decode step finds
LAYERS = 2  # DeepSeek's first layer is dense, the others have experts; elsewhere all are alike


def of_engine(name: str, device: Device) -> list[Task]:
    """Every problem of decode steps of 1 to 64 sequences and of prompts up to 8192 tokens, once.

    Args:
        name: a key of models.configs.CONFIGS.
        device: the GPU that will run them.
    Raises: KeyError that names the known models; ImportError without transformers.
    """
    if name not in CONFIGS:
        raise KeyError(f"model must be {one_of(CONFIGS, name)}, got {name!r}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(f"transformers must be installed (pip install 'tilewright[models]'): {error}") from None

    config = AutoConfig.for_model(**CONFIGS[name] | {"num_hidden_layers": LAYERS})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    decoder = read(model, Fusion(), max(CONTEXTS), lambda *unused: None)
    calls: list[Call] = []
    for context in CONTEXTS:
        for batch in STEPS:
            state = State(decoder, batch, context, 1)
            buffers = state.buffers(batch)
            calls += decoder.body_calls(buffers, state.tokens[:batch], state.caches)
            calls += decoder.head_calls(buffers)
            calls += [call for call in state.choose_calls(buffers, LIKELIEST) if call.name == "argmax"]
    for length in PROMPTS:
        calls += Prefill.of(decoder, State(decoder, 1, max(PROMPTS), 1), 1, length, length, length).body
    with traced(device), decisions() as found, torch.inference_mode():
        for call in distinct(calls):
            call()
    known = {op_name(op): op for op in ops.ALL}
    return list(dict.fromkeys((known[d.decision.op], d.problem) for d in found))


def of_all(device: Device) -> list[Task]:
    """Every problem that the engine asks to run any of the known models, once."""
    return list(dict.fromkeys(task for name in CONFIGS for task in of_engine(name, device)))
