"""The megakernel on a GPU: every value of small random models in the noise band, and many launches
without a wrong token.
"""

import pytest
import torch

from tilewright.engine.mega.difftest import differences
from tilewright.engine.mega.pack import Weights
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.engine.mega.shape import Config
from tilewright.engine.read import read
from tilewright.engine.weights import Fusion
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
# One line a row and tile; three sets of x; tiles whose words are fewer than threads.
FORMS = {"narrow": {}, "norms of heads, 3 sets": {"model_type": "qwen3", "hidden_size": 768, "head_dim": 128}, "few words": {"hidden_size": 320}}


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS.keys())
def weights(request) -> Weights:
    model = random_model(SIZES | request.param, dtype=torch.bfloat16).cuda()
    return Weights.of(read(model, Fusion(), 2048, lambda *progress: None))


@pytest.mark.parametrize("position", [0, 21, 300, 2000])
@pytest.mark.parametrize("config", [Config(), Config(span=128, parts=1)], ids=str)
def test_every_value_is_within_the_noise_band(weights: Weights, config: Config, position: int) -> None:
    with torch.inference_mode():
        found = differences(weights, position, config=config)
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
