"""Serving: sizes that grow compile nothing new, and one captured graph serves every length."""

import pytest
import torch

import tilewright


@pytest.fixture
def cache(gpu):
    torch.manual_seed(0)
    return tuple(torch.randn(2, 8, 1024, 128, device=gpu, dtype=torch.bfloat16) for _ in range(2))


def test_256_decode_steps_compile_nothing_new(gpu, cache, compilations):
    k, v = cache
    x = torch.randn(2, 4096, device=gpu, dtype=torch.bfloat16)
    weight = torch.randn(4096, device=gpu, dtype=torch.bfloat16)
    projection = torch.randn(4096, 4096, device=gpu, dtype=torch.bfloat16) / 64
    angles = torch.randn(1024, 64, device=gpu, dtype=torch.bfloat16)

    def step(length: int) -> torch.Tensor:
        h = tilewright.rms_norm(x, weight)
        q = tilewright.matmul(h, projection, trans_b=True).view(2, 32, 1, 128)
        new = k[:, :, length - 1 : length]
        cos = angles[length - 1 : length].cos()[None]
        tilewright.rope(q, new, cos, angles[length - 1 : length].sin()[None])
        lengths = torch.full((2,), length, dtype=torch.int32, device=gpu)
        out = tilewright.attention_decode(q, k, v, lengths)
        return tilewright.silu_mul(out.reshape(2, -1), h)

    step(1)
    step(2)
    before = len(compilations)
    for length in range(3, 259):
        step(length)
    assert compilations[before:] == []


def test_one_graph_serves_every_length(gpu, cache):
    k, v = cache
    q = torch.randn(2, 32, 1, 128, device=gpu, dtype=torch.bfloat16)
    lengths = torch.full((2,), 1024, dtype=torch.int32, device=gpu)
    tilewright.attention_decode(q, k, v, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewright.attention_decode(q, k, v, lengths)
    for length in (1, 7, 64, 500, 1023, 1024):
        lengths.fill_(length)
        graph.replay()
        expected = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length], enable_gqa=True)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
