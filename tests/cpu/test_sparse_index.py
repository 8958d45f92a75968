"""Tests special to `sparse_index`: which keys a list names, ties, the order of blocks, and the
attention of DeepSeek-V3.2 that follows from the lists.
"""

import itertools

import pytest
import torch
from tensors import int32

from tilewright import interpret
from tilewright.launch import Device, counted, forced_config, traced
from tilewright.ops.sparse_decode import sparse_decode
from tilewright.ops.sparse_index import Config, Problem, comparable, plan, reference, space, sparse_index
from tilewright.testing.poison import poisoned_empty

CODE = torch.float8_e4m3fn
CONFIGS = [Config(2, 16, 1, select=64, ways=3), Config(1, 16, 3, select=16, ways=1), Config(4, 8, 2, select=256, ways=7)]
CONFIGS += [Config(1, 16, 1, select=32, ways=3, blocks=4), Config(1, 16, 1, select=16, ways=15, blocks=2)]


pytestmark = pytest.mark.usefixtures("inference")


def forced(config, *args, **options):
    with forced_config(plan, config):
        return sparse_index(*args, **options)


def of_scores(scores, **options):
    """A call whose scores are these [batch, q_len, keys], whole numbers: each is a product."""
    batch, q_len, keys = scores.shape
    cache = torch.zeros(batch, keys, 16)
    cache[..., :q_len] = scores.abs().mT
    q = torch.zeros(batch, q_len, 2, 16)
    for t in range(q_len):
        q[:, t, :, t] = 1.0
    return {"q": q.bfloat16(), "cache": cache.bfloat16(), "weights": torch.tensor([0.75, 0.25]).expand(batch, q_len, 2).contiguous(), **options}


def expected(scores, topk, starts, ends):
    """By sorting the keys of each token, equal scores by position."""
    batch, q_len, keys = scores.shape
    out = torch.full((batch, q_len, topk), -1, dtype=torch.int32)
    for b, t in itertools.product(range(batch), range(q_len)):
        seen = range(starts[b], max(starts[b], ends[b] - q_len + t + 1))
        best = sorted(sorted(seen, key=lambda s: (-scores[b, t, s].item(), s))[:topk])
        out[b, t, : len(best)] = torch.tensor([b * keys + s for s in best], dtype=torch.int32)
    return out


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("topk", [1, 7, 40])
def test_of_equal_scores_the_earlier_keys_are_listed(config, topk):
    """Five different scores of 70 keys, so every list ends among equal ones, or has holes."""
    torch.manual_seed(topk)
    scores, starts, ends = torch.randint(0, 5, (3, 3, 70)).float(), (0, 9, 33), (70, 2, 51)
    found = forced(config, **of_scores(scores, topk=topk, kv_len=int32(*ends), kv_start=int32(*starts)))
    assert torch.equal(found, expected(scores, topk, starts, ends))


@pytest.mark.parametrize("config", CONFIGS)
def test_negative_and_wide_scores_are_in_order(config):
    """Traps: the bits of negative floats fall where the floats rise; -0.0 is 0.0; scores beyond
    2**31 places apart; a NaN is the largest.
    """
    values = torch.tensor([-3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38])
    scores = values[torch.randperm(60) % 8].clone()
    scores[41] = torch.nan
    keys = torch.zeros(1, 60, 16)
    keys[0, :, 0], keys[0, :, 1] = scores.clamp(min=0), (-scores).clamp(min=0)
    keys[scores[None].isnan()] = torch.nan
    q = torch.eye(2, 16)[None, None]
    weights = torch.tensor([[[1.0, -1.0]]])
    for topk in (1, 5, 20, 31, 59):
        found = forced(config, q, keys, weights, topk)
        order = torch.where(scores == 0, 0.0, scores).sort(descending=True, stable=True).indices
        assert found[0, 0].tolist() == sorted(order[:topk].tolist())
        assert 41 in found


@pytest.mark.parametrize("order", [0, 1, 4])
def test_blocks_do_not_depend_on_their_order(order):
    """Nor on memory that nobody wrote: the keys that no token sees are not scored."""
    p = Problem(2, 4, 12, 90, 32, CODE, page_size=16, q_len=5, has_start=True)
    torch.manual_seed(0)
    inputs = p.inputs(torch.device("cpu"))
    for config in CONFIGS:
        with poisoned_empty(), interpret.checking(races=True, order=order, unwritten=True):
            found = forced(config, **inputs)
        wanted = reference(**inputs)
        assert torch.equal(comparable(found, **inputs), comparable(wanted, **inputs))


def test_pages_are_the_keys_in_the_order_of_the_table():
    """Entries behind the length may be anything, and so may the keys on pages that nobody holds."""
    q, cache, weights = torch.randn(2, 3, 4, 32).half(), torch.randn(2, 64, 32).half(), torch.rand(2, 3, 4)
    kv_len = int32(50, 17)
    pages = torch.full((9, 16, 32), torch.nan).half()
    table = int32((7, 2, 5, 0), (8, 3, 2147480000, -5))
    for b, i in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
        pages[table[b, i]] = cache[b, i * 16 : i * 16 + 16]
    flat = sparse_index(q, cache, weights, 9, kv_len=kv_len)
    own = flat - torch.arange(2)[:, None, None] * 64
    rows = torch.where(flat < 0, flat, table.gather(1, (own.clamp(min=0) // 16).flatten(1)).view_as(flat) * 16 + own % 16)
    assert torch.equal(sparse_index(q, pages, weights, 9, kv_len=kv_len, block_table=table), rows.int())


@pytest.mark.parametrize("config", CONFIGS)
def test_codes_times_their_scales_are_the_keys(config):
    """The scale is a power of two, so that both have the same scores."""
    q, keys, scale = torch.randn(2, 3, 4, 64).to(CODE), torch.randn(2, 60, 64).to(CODE), torch.exp2(torch.randint(-3, 4, (2, 60)).float())
    weights = torch.randn(2, 3, 4)
    found = forced(config, q, keys, weights, 11, cache_scale=scale)
    assert torch.equal(found, reference(q.float(), keys.float() * scale[..., None], weights, 11))


def test_attention_over_the_lists_of_a_prompt_is_attention_under_their_mask():
    """Sparse prefill: every token of a prompt has its own list, of rows of the latent cache."""
    q_len, keys, topk, columns, ends = 6, 12, 4, 64, (12, 9)
    q, latents = torch.randn(2, 3, q_len, columns).half(), torch.randn(2, keys, columns).half()
    index_q = {"q": torch.randn(2, q_len, 4, 16), "cache": torch.randn(2, keys, 16), "weights": torch.rand(2, q_len, 4), "topk": topk}
    listed = sparse_index(**index_q, kv_len=int32(*ends))
    found = sparse_decode(q, latents, listed, scale=0.1)
    scores = (torch.einsum("bthd,bsd->bths", index_q["q"], index_q["cache"]).relu() * index_q["weights"][..., None]).sum(2)
    token, key = torch.arange(q_len)[:, None], torch.arange(keys)
    scores = scores.masked_fill(key > torch.tensor(ends)[:, None, None] - q_len + token, -torch.inf)
    seen = (scores >= scores.topk(topk).values[..., -1:]) & (scores > -torch.inf)
    weights = (q.float() @ latents.float().mT[:, None] * 0.1).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(found.float(), weights @ latents.float()[:, None], rtol=2e-3, atol=2e-3)


# --- plans


def test_lengths_change_no_plan():
    q, weights = torch.empty(2, 1, 64, 128, device="meta").to(CODE), torch.empty(2, 1, 64, device="meta")
    with traced(Device.named("H200")) as launches:
        for keys in (3000, 4000, 4096):
            cache, scale = torch.empty(2, keys, 128, device="meta").to(CODE), torch.empty(2, keys, device="meta")
            sparse_index(q, cache, weights, 2048, cache_scale=scale, kv_len=torch.empty(2, dtype=torch.int32, device="meta"))
    assert [launch.launch.name for launch in launches[:2]] == ["sparse_index_scores_kernel", "sparse_index_select_kernel"]
    assert len({launch.launch for launch in launches}) == 2


def test_no_codes_where_the_device_has_no_such_format():
    assert not space(Problem(1, 64, 2048, 4096, 128, CODE), Device.named("A100"))


def test_without_keys_there_are_holes_and_without_tokens_nothing():
    with counted() as counts:
        none = sparse_index(torch.randn(2, 1, 4, 16), torch.randn(2, 0, 16), torch.rand(2, 1, 4), 3)
        empty = sparse_index(torch.randn(0, 1, 4, 16), torch.randn(0, 5, 16), torch.rand(0, 1, 4), 3)
    assert none.tolist() == [[[-1] * 3]] * 2
    assert empty.shape == (0, 1, 3)
    assert not counts


Q, CACHE, WEIGHTS = torch.zeros(2, 1, 4, 16), torch.zeros(2, 8, 16), torch.zeros(2, 1, 4)
BAD = [
    ({"q": Q.double()}, ValueError, r"q.dtype must be one of float8_e4m3fn, bfloat16, float16, float32, got float64"),
    ({"q": torch.zeros(2, 1, 129, 16)}, ValueError, r"q.shape\[2\] must be in 1..128, got 129"),
    ({"q": torch.zeros(2, 1, 4, 300)}, ValueError, r"q.shape\[3\] must be in 1..256, of e4m3 a multiple of 16, got 300"),
    ({"q": torch.zeros(2, 1, 4, 24).to(CODE)}, ValueError, r"q.shape\[3\] must be in 1..256, of e4m3 a multiple of 16, got 24"),
    ({"cache": CACHE.half()}, ValueError, r"cache.dtype must be float32, got float16"),
    ({"cache": CACHE[:1]}, ValueError, r"cache.shape must be \(2, 8, 16\), got \(1, 8, 16\)"),
    ({"cache": CACHE[..., :8]}, ValueError, r"cache.shape must be \(2, 8, 16\), got \(2, 8, 8\)"),
    ({"weights": WEIGHTS.half()}, ValueError, r"weights.dtype must be float32, got float16"),
    ({"weights": WEIGHTS[:1]}, ValueError, r"weights.shape must be \(2, 1, 4\), got \(1, 1, 4\)"),
    ({"topk": 0}, ValueError, r"topk must be in 1\.\.2\*\*31 - 1, got 0"),
    ({"topk": 2.0}, TypeError, r"topk must be a Python integer, got 2.0"),
    ({"cache_scale": torch.ones(2, 8)}, ValueError, r"cache_scale must be given for e4m3 keys, and None for others, got Tensor"),
    ({"q": Q.to(CODE), "cache": CACHE.to(CODE)}, ValueError, r"cache_scale must be given for e4m3 keys, and None for others, got None"),
    ({"kv_len": int32(1)}, ValueError, r"kv_len.shape must be \(2,\), got \(1,\)"),
    ({"kv_start": torch.zeros(2)}, ValueError, r"kv_start.dtype must be int32, got float32"),
    ({"block_table": int32((0, 1), (1, 0))}, ValueError, r"the page size must be a power of two, at least 16, got 8"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        sparse_index(**{"q": Q, "cache": CACHE, "weights": WEIGHTS, "topk": 3, **change})
