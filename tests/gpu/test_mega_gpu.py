"""The megakernel on a GPU: every value of a small random Llama in the noise band, with both
kernels, and many launches without a wrong token.
"""

import pytest
import torch

from tilewright.engine.mega import Config, phases
from tilewright.engine.mega.difftest import differences
from tilewright.engine.mega.pack import LayerStacks, Weights
from tilewright.engine.mega.run import Clocks
from tilewright.engine.mega.stream import mega_of
from tilewright.engine.mega.stream_schedule import StreamConfig
from tilewright.engine.read import read
from tilewright.models import random_model

SIZES = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def weights() -> Weights:
    model = random_model(SIZES, dtype=torch.bfloat16).cuda()
    stacks = LayerStacks.of(model)
    return Weights.of(read(model, stacks, 2048, lambda *progress: None), stacks)


@pytest.mark.parametrize("position", [0, 21, 300, 2000])
@pytest.mark.parametrize("config", [Config(), StreamConfig(), StreamConfig(rows=32), StreamConfig(span=32)], ids=str)
def test_every_value_is_within_the_noise_band(weights: Weights, config: Config | StreamConfig, position: int) -> None:
    with torch.inference_mode():
        found = differences(weights, list(phases(weights.dims)), position, config=config)
    assert {d.name: str(d.accuracy) for d in found if not d.accuracy.ok} == {}


def test_a_graph_of_several_tokens_replays_to_the_tokens_of_single_steps(weights: Weights) -> None:
    d, written = weights.dims, []
    for tokens in (1, 8):
        cache = torch.zeros(2, d.layers, d.kv_heads, 2048, d.head_dim, dtype=torch.bfloat16, device="cuda")
        integers = [torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((16,), (512, 16), (2,))]
        clocks = Clocks(integers[0], torch.zeros(2, 16, dtype=torch.int32, device="cuda"), *integers[1:])
        mega = mega_of(weights, list(phases(d)), clocks, (cache[0], cache[1]), config=StreamConfig())
        mega.step(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mega.step(tokens)
        for _ in range(400 // tokens - 1):
            graph.replay()
        written.append(clocks.recent[:400, 0].tolist())
    assert written[0] == written[1]
