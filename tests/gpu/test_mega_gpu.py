"""The megakernel on a GPU: every value of small random models in the noise band, and many launches
without a wrong token.
"""

from dataclasses import replace

import pytest
import torch

from tilewright.engine.mega.difftest import differences
from tilewright.engine.mega.pack import Weights
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.engine.mega.shape import Config
from tilewright.engine.read import read
from tilewright.engine.weights import Fusion
from tilewright.models import random_model
from tilewright.models.quantized import quantize

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
QWEN3 = {"model_type": "qwen3", "hidden_size": 768, "head_dim": 128}
# One line a row and tile; three sets of x; tiles whose words are fewer than threads; e4m3 weights.
FORMS = {
    "narrow": ({}, False),
    "norms of heads, 3 sets": (QWEN3, False),
    "few words": ({"hidden_size": 320}, False),
    "e4m3": ({}, True),
    "e4m3, norms of heads": (QWEN3, True),
    "e4m3, sizes of Llama-3.1-8B": ({"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}, True),
}


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS.keys())
def weights(request) -> Weights:
    sizes, small = request.param
    model = random_model(SIZES | sizes, dtype=torch.bfloat16).cuda()
    if small:
        quantize(model, "e4m3")
    return Weights.of(read(model, Fusion(), 2048, lambda *progress: None))


@pytest.mark.parametrize("position", [0, 21, 300, 2000])
@pytest.mark.parametrize("config", [Config(), Config(span=128, parts=1)], ids=str)
def test_every_value_is_within_the_noise_band(weights: Weights, config: Config, position: int) -> None:
    if weights.pairs > 1 and config.span > 64:
        pytest.skip("the shipped tiles of keys alone, with e4m3 weights")
    with torch.inference_mode():
        found = differences(weights, position, config=replace(config, pairs=weights.pairs))
    assert {d.name: str(d.accuracy) for d in found if not d.accuracy.ok} == {}


def test_a_graph_of_several_tokens_replays_to_the_tokens_of_single_steps(weights: Weights) -> None:
    d, written = weights.dims, []
    for tokens in (1, 8):
        cache = torch.zeros(2, d.layers, d.kv_heads, 2048, d.head_dim, dtype=torch.bfloat16, device="cuda")
        clocks = Clocks.at(0, 0, 512, torch.device("cuda"))
        mega = Mega(weights, clocks, (cache[0], cache[1]))
        mega.step(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mega.step(tokens)
        for _ in range(400 // tokens - 1):
            graph.replay()
        mega.check()
        written.append(clocks.recent[:400, 0].tolist())
    assert written[0] == written[1]
