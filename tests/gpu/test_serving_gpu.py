"""Pages on a GPU: the engine's in a graph, transformers' in continuous batching, pools beyond 2**31
elements.
"""

import copy

import pytest
import torch
from inherited_context import threads_inherit
from test_engine_gpu import made, prompts  # noqa: F401  (a fixture)

from tilewright import attention_decode, kv_append, patch
from tilewright.engine import Engine
from tilewright.launch import counted
from tilewright.testing import assert_accurate

PAGED = {"cache": "paged", "page_size": 64, "cache_tokens": 1024}


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v2"])
def test_a_graph_on_pages_chooses_the_eager_tokens(gpu, prompts, name):  # noqa: F811
    model = made(name, gpu)
    found = []
    for mode in ("eager", "graph"):
        with Engine(model, max_batch=8, max_len=512, mode=mode, prefill_tokens=128, **PAGED) as engine:
            for _ in range(2):  # the second time in other pages
                found.append(engine.generate(prompts, 100).tokens)
                assert engine.cache_tokens_held == 0
    assert found[1:] == found[:1] * 3


def test_logits_on_pages_obey_the_rule(gpu, prompts):  # noqa: F811
    model = made("llama", gpu)
    given = [[7, 50, 3, 91]] * len(prompts)
    with torch.inference_mode(False):
        wide = copy.deepcopy(model).float()
    truth, stock = [], []
    for prompt, more in zip(prompts, given, strict=True):
        ids = torch.tensor([prompt + more], device=gpu)
        truth.append(wide(ids).logits[0, len(prompt) - 1 :])
        stock.append(model(ids).logits[0, len(prompt) - 1 :])
    with Engine(model, max_batch=8, max_len=512, mode="graph", **PAGED) as engine:
        assert_accurate(engine.logits(prompts, given), torch.stack(stock), torch.stack(truth))


@pytest.mark.parametrize("graphs", [False, True])
def test_continuous_batching_writes_the_tokens_of_transformers(gpu, prompts, graphs):  # noqa: F811
    from transformers import ContinuousBatchingConfig, GenerationConfig

    if not hasattr(ContinuousBatchingConfig(), "page_size"):
        pytest.skip("continuous batching with block tables came after this transformers")
    with torch.inference_mode(False):
        model = made("llama", gpu).float()
    greedy = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64, "max_requests_per_batch": 4}

    def tokens(**more):
        paging = ContinuousBatchingConfig(**options, **more)
        found = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=paging)
        return [request.generated_tokens for request in found.values()]

    with torch.inference_mode(False), torch.no_grad():  # a thread of the manager writes into tensors that this one makes
        model = made("llama", gpu).float()
        stock = tokens(use_cuda_graph=False, auto_switch_to_flash=False)
        assert {len(row) for row in stock} == {40}  # a manager without memory ends its requests with none
        with patch(model), counted() as launches, threads_inherit():
            assert tokens(use_cuda_graph=graphs) == stock
    assert launches["attention_decode_kernel"]


def test_a_pool_of_more_than_2_to_the_31_elements(gpu):
    pages, page_size, heads, dim = 9000, 256, 8, 128
    keys, values = (torch.zeros(pages, page_size, heads, dim, dtype=torch.bfloat16, device=gpu) for _ in range(2))
    assert keys.numel() > 2**31
    table = torch.tensor([[8999, 3, 8998], [17, 8997, 4]], dtype=torch.int32, device=gpu)
    kv_len = torch.tensor([700, 513], dtype=torch.int32, device=gpu)
    for pool in (keys, values):
        pool[table.flatten().long()] = torch.randn(6, page_size, heads, dim, dtype=torch.bfloat16, device=gpu)
    near = [pool[table.flatten().long()].clone().transpose(1, 2) for pool in (keys, values)]
    near_table = torch.arange(6, dtype=torch.int32, device=gpu).view(2, 3)
    q, k, v = (torch.randn(2, h, 1, dim, dtype=torch.bfloat16, device=gpu) for h in (32, heads, heads))
    found = []
    for pools, where in ((near, near_table), ([keys.transpose(1, 2), values.transpose(1, 2)], table)):
        kv_append(k, v, *pools, positions=kv_len - 1, block_table=where)
        found.append(attention_decode(q, *pools, kv_len, block_table=where))
    assert torch.equal(*found)
    assert torch.equal(keys[8998, 699 - 512], k[0, :, 0])
