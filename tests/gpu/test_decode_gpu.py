"""Serving: sizes that grow compile nothing new, and one captured graph serves every length."""

import pytest
import torch
from tests.support.split_attention import compared

import tilewright
from tilewright.engine.attend_splits import form_of
from tilewright.launch import Device, forced_config
from tilewright.ops import attention_decode, sparse_index
from tilewright.testing.check import outputs, run_op


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


@pytest.mark.parametrize(("options", "padded"), [({"head_dim": 20}, 0), ({"head_dim": 5, "v_dim": 2, "shared": True, "q_len": 4, "window": 2}, 1)])
def test_small_pages_of_rows_off_16_bytes(gpu, options, padded):
    """Gathered by TMA, they would be other memory."""
    shape = {"batch": 3, "q_heads": 6, "kv_heads": 2, "max_len": 256, "dtype": torch.bfloat16, "has_len": True, "page_size": 16}
    problem = attention_decode.Problem(**shape, **options)
    for config in attention_decode.space(problem, Device.of(torch.empty(0, device=gpu)))[:4]:
        inputs = problem.inputs(gpu)
        for name in ("k", "v"):
            if inputs.get(name) is not None:
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, padded))[..., : inputs[name].shape[-1]]
        truth = attention_decode.reference(
            **{n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
        )
        found = outputs(run_op(attention_decode, inputs, config))[0]
        torch.testing.assert_close(found.double(), outputs(truth)[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page", [16, 64])
def test_pages_beyond_two_to_the_31_elements(gpu, page):
    """Page offsets need 64 bits: reads the last pages of a cache beyond 2**31 elements.

    Pages of 16 are gathered, pages of 64 come by TMA.
    """
    heads, head_dim = 8, 128
    pages = 2**31 // (page * heads * head_dim) + 64
    if torch.cuda.mem_get_info(gpu)[0] < 4 * pages * page * heads * head_dim:
        pytest.skip("needs 5 GB of free GPU memory")
    cache = torch.zeros(pages, heads, page, head_dim, device=gpu, dtype=torch.bfloat16)
    held = torch.arange(pages - 8, pages, device=gpu, dtype=torch.int32)
    cache[held.long()] = torch.randn(8, heads, page, head_dim, device=gpu, dtype=torch.bfloat16)
    q = torch.randn(1, 32, 1, head_dim, device=gpu, dtype=torch.bfloat16)
    whole = cache[held.long()].transpose(0, 1).flatten(1, 2)[None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, whole, whole, enable_gqa=True)
    found = tilewright.attention_decode(q, cache, cache, block_table=held[None])
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_rows_of_a_sequence_beyond_two_to_the_31_elements(gpu):
    """So do offsets of a sequence's first key, in a cache with tokens as the first axis, and of
    rows by index.

    The axis of the one key head has a stride beyond 2**31 elements, which means nothing.
    """
    tokens, batch, columns, first = 9000, 512, 512, 8900
    if torch.cuda.mem_get_info(gpu)[0] < 5 * tokens * batch * columns:
        pytest.skip("needs 12 GB of free GPU memory")
    torch.manual_seed(0)
    rows = torch.zeros(tokens, batch, columns, device=gpu, dtype=torch.bfloat16)
    cache = rows.permute(1, 0, 2)[:2, None]  # [2, 1, tokens, columns]
    cache[:, :, first:] = torch.randn(2, 1, tokens - first, columns, device=gpu, dtype=torch.bfloat16)
    near = cache[:, :, first:].contiguous()
    q = torch.randn(2, 16, 4, columns, device=gpu, dtype=torch.bfloat16)
    start = torch.full((2,), first + 7, device=gpu, dtype=torch.int32)
    decode, prefill = tilewright.attention_decode, tilewright.attention
    for function, width, last in ((decode, columns, 1), (decode, columns, 4), (prefill, 128, 4)):
        for far_option, near_option in (({"window": 90}, {"window": 90}), ({"kv_start": start}, {"kv_start": start - first})):
            k, close = cache[..., :width], near[..., :width]
            found = function(q[:, :, -last:, :width], k, k, **far_option)
            expected = function(q[:, :, -last:, :width], close, close, **near_option)
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    named = (torch.arange(first, tokens, device=gpu, dtype=torch.int32) * batch)[None, None]  # the rows of the first sequence
    found = tilewright.sparse_decode(q[:1, :, -1:], rows, named, scale=columns**-0.5)
    expected = tilewright.attention_decode(q[:1, :, -1:], near[:1], None)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("keys", [5000, 131_072])
def test_a_list_names_the_largest_scores_whatever_the_config(gpu, keys):
    """Whole numbers as scores, so that thousands are equal: the earlier keys are listed. Each way
    to select them once.
    """
    torch.manual_seed(0)
    scores = torch.randint(0, 256, (2, keys), device=gpu)
    cache = torch.zeros(2, keys, 128, device=gpu, dtype=torch.bfloat16)
    cache[..., 0] = scores
    q = torch.zeros(2, 1, 64, 128, device=gpu, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    weights = torch.full((2, 1, 64), 1 / 64, device=gpu)
    problem = sparse_index.Problem(2, 64, 2048, keys, 128, torch.bfloat16, has_len=False)
    ways = {(c.select, c.ways, c.select_latency): c for c in sparse_index.space(problem, Device.of(q))}
    assert len(ways) > 1
    for config in ways.values():
        with forced_config(sparse_index.plan, config):
            found = tilewright.sparse_index(q, cache, weights, 2048)
        wanted = scores.sort(descending=True, stable=True).indices[:, :2048].sort().values
        assert torch.equal(found[:, 0].long(), wanted + torch.arange(2, device=gpu)[:, None] * keys), config


@pytest.mark.parametrize("axis", [0, 1])
def test_strides_beyond_two_to_the_31_elements(gpu, axis):
    """Where cuTile refuses a stride, the kernel is compiled with 64-bit indices."""
    far = 2**31 + 16
    if torch.cuda.mem_get_info(gpu)[0] < 2.2 * far:
        pytest.skip("needs 5 GB of free GPU memory")
    torch.manual_seed(0)
    memory = torch.zeros(far + 2**20, device=gpu, dtype=torch.bfloat16)

    def spread(x):
        strides = [far if i == axis else stride for i, stride in enumerate(x.stride())]
        return memory.as_strided(x.shape, strides).copy_(x)

    q, one, cos = (torch.randn(2, 2, n, 64, device=gpu, dtype=torch.bfloat16) for n in (200, 1, 200))
    k = torch.randn(2, 2, 200, 64, device=gpu, dtype=torch.bfloat16)
    weight, angles = torch.randn(64, device=gpu, dtype=torch.bfloat16), cos[:, 0, :, :32].contiguous()
    calls = (
        lambda x: tilewright.attention(q, x, k),
        lambda x: tilewright.attention_decode(one, x, k),
        lambda x: tilewright.rms_norm(x[:, :, 0], weight),
        lambda x: tilewright.softmax(x[0, :, 0] if axis else x[:, 0, 0]),
        lambda x: tilewright.rope(x, q.clone(), angles, angles)[0],
        lambda x: tilewright.bmm(x[:, :, 0], k[0], trans_b=True),
    )
    for call in calls:
        torch.testing.assert_close(call(spread(k)), call(k.clone()), atol=2e-2, rtol=2e-2)


def test_one_graph_serves_every_length_of_a_latent_cache(gpu):
    cache = torch.randn(2, 1024, 576, device=gpu, dtype=torch.bfloat16)
    q_latent, q_rope = (torch.randn(2, 16, 2, n, device=gpu, dtype=torch.bfloat16) for n in (512, 64))
    lengths = torch.full((2,), 1024, dtype=torch.int32, device=gpu)
    tilewright.mla_decode(q_latent, q_rope, cache, lengths, scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewright.mla_decode(q_latent, q_rope, cache, lengths, scale=0.1)
    for length in (2, 7, 64, 500, 1023, 1024):
        lengths.fill_(length)
        graph.replay()
        seen = torch.arange(length, device=gpu) <= length - 2 + torch.arange(2, device=gpu)[:, None]
        scores = torch.cat((q_latent, q_rope), -1).float() @ cache[:, None, :length].float().mT * 0.1
        expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ cache[:, None, :length, :512].float()
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_large_scale_does_not_cost_single_precision(gpu, head_dim):
    """What a score is off is multiplied by the scale; term by term it has twice PyTorch's error."""
    q, k, v = (torch.randn(8, heads, rows, head_dim, device=gpu) for heads, rows in ((8, 1), (4, 500), (4, 500)))
    truth, theirs = (
        tilewright.ops.attention_decode.reference(*(x.to(dtype) for x in (q, k, v)), scale=1.0) for dtype in (torch.float64, torch.float32)
    )
    found = tilewright.attention_decode(q, k, v, scale=1.0)
    assert (found - truth).square().mean() < (1.6 * (theirs - truth)).square().mean()


def test_many_tokens_of_512_columns(gpu):
    """16 launches; tiles of rows begin inside q, out and lse."""
    q, k = (torch.randn(2, heads, rows, 512, device=gpu, dtype=torch.bfloat16) for heads, rows in ((16, 64), (1, 1000)))
    lengths = torch.tensor((1000, 70), dtype=torch.int32, device=gpu)
    found = tilewright.attention_decode(q, k, None, lengths, return_lse=True)
    expected = tilewright.ops.attention_decode.reference(q.float(), k.float(), None, lengths, return_lse=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("position", "shares"), [(0, 1), (63, 1), (64, 1), (999, 1), (200, 4)])
@pytest.mark.parametrize(
    ("heads", "dim", "window", "sinks"),
    [(32, 64, None, False), (32, 128, None, False), (16, 128, None, False), (64, 64, 128, True), (64, 64, None, True)],
)
@pytest.mark.parametrize("keys", [256, 1024, 16384])
def test_append_and_attention_in_one_launch(gpu, heads, dim, window, sinks, keys, position, shares):
    """In the forms of the rule, on sm_90."""
    form = form_of(8, keys, dim, window, Device.of(torch.empty(0, device=gpu)))
    options = {"norms": heads == 16, "sinks": sinks, "window": window}
    if shares > 1:
        options["shares"] = shares
    compared(heads, 8, dim, min(position, keys - 1), form, keys, gpu, **options)
