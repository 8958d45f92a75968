"""Tests special to `attention_decode`: splits, pages, lengths on the device, and the traps."""

import math

import pytest
import torch
from tensors import int32, randn

from tilewright import interpret
from tilewright.launch import Device, counted, forced_config, traced
from tilewright.ops.attention import attention
from tilewright.ops.attention_decode import Config, Problem, attention_decode, plan, reference

HEAD_DIM = 32
pytestmark = pytest.mark.usefixtures("inference")


def forced(config, *args, **options):
    with forced_config(plan, config):
        return attention_decode(*args, **options)


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("options", [{}, {"window": 30}, {"kv_start": (0, 5, 90)}, {"window": 1, "kv_start": (70, 0, 3)}])
def test_any_number_of_ranges_gives_the_same_answer(splits, keys_first, options):
    """Also more splits than tiles, and splits that the length leaves empty."""
    q, k, v = randn(3, 6, 1, HEAD_DIM), randn(3, 2, 200, HEAD_DIM), randn(3, 2, 200, HEAD_DIM)
    kv_len = int32(200, 33, 91)
    options = {name: int32(*value) if isinstance(value, tuple) else value for name, value in options.items()}
    found = forced(Config(16, splits, keys_first), q, k, v, kv_len, return_lse=True, **options)
    expected = reference(q, k, v, kv_len, return_lse=True, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [16, 2**31 - 17, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("options", [{}, {"kv_start": (0, 3)}])
def test_a_window_as_long_as_the_cache_is_none(options, window):
    """Trap: the end of the keys minus the window, in 32 bits."""
    q, k, v = randn(2, 2, 3, HEAD_DIM), randn(2, 1, 16, HEAD_DIM), randn(2, 1, 16, HEAD_DIM)
    options = {name: int32(*value) for name, value in options.items()}
    assert torch.equal(attention_decode(q, k, v, int32(16, 1), window=window, **options), attention_decode(q, k, v, int32(16, 1), **options))
    pages, table = k.transpose(0, 1).reshape(2, 1, 16, HEAD_DIM), int32(0, 1)[:, None]
    found = attention_decode(q, pages, None, int32(16, 5), block_table=table, window=window)
    assert torch.equal(found, attention_decode(q, pages, None, int32(16, 5), block_table=table))


@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_large_scale_does_not_cost_single_precision(head_dim):
    """It multiplies the error of q k^T, which term by term is 2.2 times PyTorch's."""
    q, k, v = randn(8, 4, 1, head_dim), randn(8, 2, 100, head_dim), randn(8, 2, 100, head_dim)
    truth, theirs = (reference(*(x.to(dtype) for x in (q, k, v)), scale=1.0) for dtype in (torch.float64, torch.float32))
    bound = 1.4 * (theirs - truth).square().mean().sqrt()
    for keys_first in (True, False):
        found = forced(Config(128, 1, keys_first), q, k, v, scale=1.0)
        assert (found - truth).square().mean().sqrt() < bound


def test_a_batch_beyond_the_grid_is_refused():
    q = torch.zeros(70_000, 1, 1, 16)
    with counted() as counts, pytest.raises(ValueError, match=r"^batch of attention_decode must be smaller .* got 70000$"):
        attention_decode(q, q, q)
    assert not counts


def test_it_is_the_last_row_of_prefill():
    q, k, v = randn(2, 4, 9, HEAD_DIM), randn(2, 2, 77, HEAD_DIM), randn(2, 2, 77, HEAD_DIM)
    options = {"window": 40, "kv_start": int32(50, 0), "kv_len": int32(77, 60), "return_lse": True}
    rows, rows_lse = attention(q, k, v, **options)
    row, row_lse = attention_decode(q[:, :, -1:], k, v, **options)
    torch.testing.assert_close(row, rows[:, :, -1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_lse, rows_lse[:, :, -1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ends", [None, (77, 6), (90, 60)])
@pytest.mark.parametrize("options", [{}, {"window": 40, "kv_start": (50, 0)}, {"page_size": 16}])
def test_many_tokens_are_rows_of_prefill(options, ends):
    """Also more tokens than keys, and a length beyond the cache."""
    q, k, v = randn(2, 4, 11, HEAD_DIM), randn(2, 2, 80, HEAD_DIM), randn(2, 2, 80, HEAD_DIM)
    given = {name: int32(*value) if isinstance(value, tuple) else value for name, value in options.items()}
    end = None if ends is None else int32(*ends)
    page_size = given.pop("page_size", None)
    expected = attention(q, k, v, kv_len=end, return_lse=True, **given)
    if page_size is not None:
        k, v = (x.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1) for x in (k, v))
        given["block_table"] = torch.arange(len(k), dtype=torch.int32).view(2, -1)
    with counted() as counts:
        found = attention_decode(q, k, v, end, return_lse=True, **given)
    assert sum(count for name, count in counts.items() if "merge" not in str(name)) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_lse_is_the_natural_log_of_the_denominator(splits):
    q, k, v = randn(1, 4, 1, HEAD_DIM), randn(1, 4, 100, HEAD_DIM), randn(1, 4, 100, HEAD_DIM)
    _, lse = forced(Config(16, splits), q, k, v, return_lse=True)
    scores = q.double() @ k.double().mT / math.sqrt(HEAD_DIM)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)


OUTSIDE = [Config(16, 1), Config(32, 3), Config(64, 2, keys_first=True), Config(32, 2, sliced=True), Config(16, 3, sliced=True, paired=True)]


@pytest.mark.parametrize("config", OUTSIDE)
def test_memory_outside_the_keys_may_hold_anything(config):
    q, k, v = randn(4, 4, 1, HEAD_DIM), randn(4, 2, 100, HEAD_DIM), randn(4, 2, 100, HEAD_DIM)
    start, end = int32(0, 31, 40, 0), int32(1, 67, 40, 0)
    clean = forced(config, q, k, v, end, kv_start=start, return_lse=True)
    for poison in (torch.nan, torch.inf, -torch.inf):
        dirty_k, dirty_v = k.clone(), v.clone()
        for b in range(4):
            for x in (dirty_k, dirty_v):
                x[b, :, : start[b]] = poison
                x[b, :, end[b] :] = poison
        found = forced(config, q, dirty_k, dirty_v, end, kv_start=start, return_lse=True)
        for a, b in zip(found, clean, strict=True):
            assert torch.equal(a, b)
    out, lse = clean
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))  # no key to see
    assert (lse[2:] == -torch.inf).all()
    torch.testing.assert_close(out[0], v[0, :, :1].repeat_interleave(2, 0))  # one key: its value


ONE_LOOP = {"sliced": True}


@pytest.mark.parametrize(("tile_n", "option"), [(16, {}), (64, {}), (16, ONE_LOOP), (64, ONE_LOOP), (16, ONE_LOOP | {"paired": True})])
@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_pages_are_the_contiguous_cache(page_size, tile_n, option):
    """Tiles within a page and tiles over several pages.

    Unused pages are poisoned, unused entries out of range.
    """
    batch, max_len = 3, 256
    q, k, v = randn(batch, 4, 1, HEAD_DIM), randn(batch, 2, max_len, HEAD_DIM), randn(batch, 2, max_len, HEAD_DIM)
    end = int32(256, 1, 100)
    per_sequence = max_len // page_size
    order = torch.randperm(batch * per_sequence)
    table = order.view(batch, per_sequence).to(torch.int32)
    pages_k, pages_v = (torch.full((batch * per_sequence + 3, 2, page_size, HEAD_DIM), torch.nan) for _ in range(2))
    for pages, cache in ((pages_k, k), (pages_v, v)):
        for b in range(batch):
            for i in range(per_sequence):
                held = max(0, min(page_size, int(end[b]) - i * page_size))
                pages[table[b, i], :, :held] = cache[b, :, i * page_size : i * page_size + held]
    expected = forced(Config(tile_n, 2), q, k, v, end, return_lse=True)
    for unused in (2147480000, -1, int(order[0])):  # the last: a page that another sequence holds
        entries = torch.where(torch.arange(per_sequence) * page_size < end[:, None], table, unused)
        found = forced(Config(tile_n, 2, **option), q, pages_k, pages_v, end, block_table=entries, return_lse=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


IN_ONE_LOOP = [Config(16, 9, True, parts=2, late=True, sliced=True), Config(32, 3, rows=16, sliced=True)]
IN_ONE_LOOP.append(Config(16, 1, parts=2, late=True, sliced=True))


@pytest.mark.parametrize("config", IN_ONE_LOOP)
@pytest.mark.parametrize("page_size", [0, 32, 64])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_view_of_the_sequence_begins_and_ends_with_it(q_len, page_size, config):
    """Ends at and beside borders of tiles and pages; empty sequences; more splits than tiles.

    Everything else is NaN. Without pages, also starts.
    """
    ends, starts, max_len = (0, 1, 31, 32, 64, 65, 128), (0, 1, 30, 32, 16, 63, 17), 128
    q, keys = randn(7, 3, q_len, 48), randn(7, 1, max_len, 48)
    for given in ({}, {"window": 18}, {"kv_start": int32(*starts)}, {"window": 200, "kv_start": int32(*starts)})[: 1 if page_size else 4]:
        begins = starts if "kv_start" in given else (0,) * 7
        k = torch.full_like(keys, torch.nan)
        for b in range(7):
            k[b, :, begins[b] : ends[b]] = keys[b, :, begins[b] : ends[b]]
        if page_size:
            table = torch.randperm(7 * max_len // page_size).view(7, -1)
            pages = torch.empty(7 * max_len // page_size, 1, page_size, 48)
            pages[table] = k.view(7, -1, 1, page_size, 48)
            k, given = pages, {"block_table": torch.where(torch.arange(table.shape[1]) * page_size < int32(*ends)[:, None], table, -7).int()}
        with interpret.checking(races=True, order=3):
            found = forced(config, q, k, None, int32(*ends), v_dim=32, return_lse=True, **given)
        close(found, expected_rows(q, keys, keys[..., :32], ends, start=begins, window=given.get("window")))


@pytest.mark.parametrize("given", [{"window": 3}, {"kv_start": int32(36)}])
def test_rows_beyond_two_to_the_31_elements_are_found(given):
    """Trap: a sequence's first row times its stride overflows 32 bits.

    Only these rows of the 5 GB are touched.
    """
    k = torch.empty(40 << 26, dtype=torch.float16).as_strided((1, 1, 40, HEAD_DIM), (HEAD_DIM, HEAD_DIM, 1 << 26, 1))
    k.copy_(randn(1, 1, 40, HEAD_DIM))
    q = randn(1, 2, 1, HEAD_DIM).half()
    for config in (Config(16, 2), Config(16, 2, sliced=True)):
        assert torch.equal(forced(config, q, k, k, **given), forced(config, q, k.contiguous(), k.contiguous(), **given))


def test_the_batch_may_be_permuted_bit_for_bit():
    q, k, v = (randn(4, heads, n, HEAD_DIM, dtype=torch.bfloat16) for heads, n in ((4, 1), (2, 90), (2, 90)))
    end = int32(90, 3, 17, 64)
    order = torch.tensor([2, 0, 3, 1])
    straight = attention_decode(q, k, v, end)
    assert torch.equal(attention_decode(q[order], k[order], v[order], end[order]), straight[order])


def test_a_length_past_the_cache_reads_no_further_than_the_cache():
    q, k, v = randn(1, 2, 1, HEAD_DIM), randn(1, 2, 40, HEAD_DIM), randn(1, 2, 40, HEAD_DIM)
    assert torch.equal(attention_decode(q, k, v, int32(1000)), attention_decode(q, k, v))


@pytest.mark.parametrize("config", [Config(16, 2), Config(16, 2, sliced=True)])
def test_a_negative_length_is_none(config):
    q, k = randn(2, 2, 2, HEAD_DIM), randn(2, 2, 40, HEAD_DIM)
    out, lse = forced(config, q, k, k, int32(-3, -100), window=9, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all()


def test_lengths_and_caches_may_be_strided():
    q = randn(2, 1, 4, HEAD_DIM).transpose(1, 2)
    k, v = randn(2, 50, 2, 2, HEAD_DIM).permute(2, 0, 3, 1, 4)
    span = torch.tensor([[3, 50], [0, 20]], dtype=torch.int32)
    found = attention_decode(q, k, v, span[:, 1], kv_start=span[:, 0])
    plain = (x.contiguous() for x in (q, k, v, span[:, 1]))
    assert torch.equal(found, attention_decode(*plain, kv_start=span[:, 0].contiguous()))


def test_a_growing_cache_keeps_its_plan():
    """256 decode steps with a cache that grows by a key each: only the cache's shape changes."""
    device = Device.named("H200")
    plans = set()
    for n in range(600, 856):
        q, cache = torch.empty(4, 32, 1, 128, device="meta"), torch.empty(4, 8, n, 128, device="meta")
        with traced(device) as launches:
            attention_decode(q, cache, cache)
        plans.add(tuple(launch.launch for launch in launches))
    assert len(plans) == 1


def test_only_split_ranges_have_a_merge_and_scratch():
    p = Problem(2, 8, 2, 1024, 64, torch.bfloat16)
    one, many = (plan(p, Config(64, splits), Device.named("H200")) for splits in (1, 5))
    assert [launch.name for launch in one] == ["attention_decode_kernel"]
    assert not one[0].scratch
    assert [launch.name for launch in many] == ["attention_decode_kernel", "attention_decode_merge_kernel"]
    assert [dtype for _, dtype in many[0].scratch.values()] == [torch.float32]  # partials keep fp32


def test_an_empty_batch_or_cache_launches_nothing():
    with counted() as counts:
        empty = attention_decode(randn(0, 2, 1, HEAD_DIM), randn(0, 2, 5, HEAD_DIM), randn(0, 2, 5, HEAD_DIM))
        out, lse = attention_decode(randn(1, 2, 1, HEAD_DIM), randn(1, 2, 0, HEAD_DIM), randn(1, 2, 0, HEAD_DIM), return_lse=True)
    assert empty.shape == (0, 2, 1, HEAD_DIM)
    assert torch.equal(out, torch.zeros(1, 2, 1, HEAD_DIM))
    assert (lse == -torch.inf).all()
    assert not counts


MANY = [Config(16, 1), Config(32, 3, True), Config(16, 2, heads=1), Config(64, 2, heads=2, rows=64), Config(16, 2, parts=2, columns=16)]
MANY += [Config(32, 2, True, late=True), Config(16, 3, rows=64, parts=2, columns=16, late=True)]
MANY += [Config(16, 3, True, parts=2, late=True, sliced=True), Config(32, 1, rows=16, sliced=True)]
MANY += [Config(16, 2, late=True, sliced=True, paired=True), Config(16, 1, True, sliced=True, paired=True)]


def expected_rows(q, k, v, end, *, start=None, window=None, sinks=None):
    """out and lse (without the sink), row by row in float64.

    Token t of q_len sees the keys up to end - q_len + t.
    """
    batch, q_heads, q_len, head_dim = q.shape
    out, lse = torch.zeros(batch, q_heads, q_len, v.shape[-1]).double(), torch.full((batch, q_heads, q_len), -torch.inf).double()
    for b in range(batch):
        for h in range(q_heads):
            for t in range(q_len):
                last = int(end[b]) - q_len + t
                first = max(0 if start is None else int(start[b]), 0 if window is None else last - window + 1)
                if first > last:
                    continue
                shared = h // (q_heads // k.shape[1])
                scores = k[b, shared, first : last + 1].double() @ q[b, h, t].double() / math.sqrt(head_dim)
                lse[b, h, t] = scores.logsumexp(0)
                total = lse[b, h, t] if sinks is None else torch.logaddexp(lse[b, h, t], sinks[h].double())
                out[b, h, t] = (scores - total).exp() @ v[b, shared, first : last + 1].double()
    return out, lse


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", MANY)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"window": 31}, {"kv_start": (0, 20, 3)}])  # 31: the tokens' first keys are in two tiles
def test_tokens_see_up_to_themselves_counted_from_the_end(config, options):
    """Causal from the lower right.

    SDPA's is_causal masks from the upper left and would hide all but the first keys.
    """
    q, k, v = randn(3, 6, 3, HEAD_DIM), randn(3, 2, 80, HEAD_DIM), randn(3, 2, 80, HEAD_DIM)
    end = int32(80, 21, 2)  # the last has fewer keys than tokens
    start = options.get("kv_start")
    given = {name: int32(*value) if isinstance(value, tuple) else value for name, value in options.items()}
    found = forced(config, q, k, v, end, return_lse=True, **given)
    close(found, expected_rows(q, k, v, end, start=start, window=options.get("window")))


@pytest.mark.parametrize("q_heads", [1, 3, 9, 63, 126, 128])
@pytest.mark.parametrize("config", [Config(32, 2, True, heads=8), Config(32, 1, heads=64, rows=64)])
def test_any_number_of_heads_fills_tiles_of_rows(q_heads, config):
    q, k = randn(2, q_heads, 1, HEAD_DIM), randn(2, 1, 70, HEAD_DIM)
    end = int32(70, 33)
    close(forced(config, q, k, None, end, return_lse=True), expected_rows(q, k, k, end))


@pytest.mark.parametrize("config", MANY)
def test_a_sink_counts_once_and_in_the_natural_scaled_domain(config):
    """Not once for each split, not in base 2, and not in the lse."""
    q, k, v = randn(2, 6, 2, HEAD_DIM), randn(2, 2, 90, HEAD_DIM), randn(2, 2, 90, HEAD_DIM)
    end, sinks = int32(90, 40), torch.tensor([0.0, 5.0, -3.0, 9.0, 2.0, 30.0])
    close(forced(config, q, k, v, end, sinks=sinks, return_lse=True), expected_rows(q, k, v, end, sinks=sinks))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_sink_may_be_any_number(splits):
    """exp(sink - max) overflows if the sink is far above the scores."""
    q, k, v = randn(2, 4, 1, HEAD_DIM), randn(2, 2, 50, HEAD_DIM), randn(2, 2, 50, HEAD_DIM)
    end, sinks = int32(50, 0), torch.tensor([math.inf, -math.inf, 1e4, -1e4])
    plain, lse = forced(Config(16, splits), q, k, v, end, return_lse=True)
    found, found_lse = forced(Config(16, splits), q, k, v, end, sinks=sinks, return_lse=True)
    assert torch.equal(found_lse, lse)
    assert torch.equal(found[:, 0::2], torch.zeros_like(found[:, 0::2]))
    torch.testing.assert_close(found[:, 1::2], plain[:, 1::2])


@pytest.mark.parametrize("splits", [1, 3])
def test_scores_and_sink_may_both_lie_beyond_the_range_of_exp(splits):
    q, k, v = randn(1, 4, 1, HEAD_DIM) * 40, randn(1, 1, 50, HEAD_DIM) * 40, randn(1, 1, 50, HEAD_DIM)
    sinks = expected_rows(q, k, v, [50])[1].flatten().float() + torch.tensor([0.0, 1.0, -1.0, 90.0])
    assert (sinks > 1000).all()
    found = forced(Config(16, splits), q, k, v, int32(50), sinks=sinks, return_lse=True)
    for a, b in zip(found, expected_rows(q, k, v, [50], sinks=sinks), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)  # a score of 2000 is a multiple of 1e-4


@pytest.mark.parametrize("config", MANY)
def test_states_of_two_scopes_merge_under_one_sink(config):
    """As in DeepSeek-V4: exp(sink) joins the denominator over both scopes.

    Weighing one scope with it is another function.
    """
    q, k, v = randn(2, 4, 1, HEAD_DIM), randn(2, 1, 60, HEAD_DIM), randn(2, 1, 60, HEAD_DIM)
    sinks, lengths = randn(4), int32(60, 60)
    parts = [forced(config, q, k[:, :, a:b], v[:, :, a:b], normalize=False) for a, b in ((0, 20), (20, 60))]
    assert all(x.dtype == torch.float32 for part in parts for x in part)
    top = torch.maximum(parts[0][1], parts[1][1])
    weights = [(maximum - top).exp() for _, maximum, _ in parts]
    total = sum(w[..., None] * x for w, (x, _, _) in zip(weights, parts, strict=True))
    denominator = sum(w * x for w, (_, _, x) in zip(weights, parts, strict=True))
    found = total / (denominator + (sinks[:, None] - top).exp())[..., None]
    expected, _ = expected_rows(q, k, v, lengths, sinks=sinks)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    wrong = (weights[0][..., None] * parts[0][0] + sinks.exp()[:, None, None] * weights[1][..., None] * parts[1][0]) / denominator[..., None]
    assert (wrong.double() - expected).abs().max() > 0.05


@pytest.mark.parametrize("config", MANY)
def test_a_state_with_no_key_is_zero_and_minus_infinity(config):
    q, k = randn(2, 4, 2, HEAD_DIM), randn(2, 2, 40, HEAD_DIM)
    total, maximum, denominator = forced(config, q, k, None, int32(0, 1), normalize=False)
    assert torch.equal(total[0], torch.zeros_like(total[0]))
    assert (maximum[0] == -torch.inf).all()
    assert (denominator[0] == 0).all()
    assert (maximum[1, :, 0] == -torch.inf).all()  # one key, two tokens
    torch.testing.assert_close(total[1, :, 1], k[1, :, 0].repeat_interleave(2, 0))


@pytest.mark.parametrize(("config", "v_dim"), [(config, (None, 16)[i % 2]) for i, config in enumerate(MANY)])
def test_values_may_be_the_first_columns_of_the_keys(config, v_dim):
    """Also where memory beyond the keys is NaN: one tile serves both products, and 0 * NaN is
    NaN.
    """
    q, k = randn(3, 6, 2, HEAD_DIM + 16), randn(3, 2, 70, HEAD_DIM + 16)
    end = int32(70, 33, 1)
    for b in range(3):
        k[b, :, end[b] :] = torch.nan
    v_dim = HEAD_DIM if v_dim is None else v_dim
    found = forced(config, q, k, None, end, v_dim=v_dim, return_lse=True)
    close(found, expected_rows(q, k, k[..., :v_dim], end))
    separate = forced(config, q, k, k[..., :v_dim].contiguous(), end, return_lse=True)
    close(separate, [x.double() for x in found])


def test_few_keys_in_a_large_cache_are_spread_and_empty_ranges_add_nothing():
    """As many splits as the capacity has tiles; the length fills two of them.

    One block of the merge computes a column of the result.
    """
    q, k = randn(1, 3, 1, 96), randn(1, 1, 640, 96)
    k[:, :, 20:] = torch.nan
    end = int32(20)
    close(forced(Config(16, 40, True, late=True), q, k, None, end, return_lse=True), expected_rows(q, k, k.nan_to_num(), end))
    wide = Problem(1, 16, 1, 4096, 512, torch.bfloat16, shared=True)
    ranges, merge = plan(wide, Config(64, 64), Device.named("H200"))
    assert ranges.grid == (64, 1, 1)
    assert merge.grid == (16 * 8, 1, 1)


def test_a_block_per_head_is_a_config():
    """Another layout for many heads over one key head: each block reads all keys for one head."""
    p = Problem(4, 64, 1, 640, 512, torch.bfloat16, shared=True)
    (packed,), (apart,) = (plan(p, Config(64, 1, heads=heads), Device.named("H200")) for heads in (0, 1))
    assert (packed.grid, apart.grid) == ((1, 1, 4), (64, 1, 4))


Q, K, PAGES = torch.zeros(2, 4, 1, 32), torch.zeros(2, 2, 64, 32), torch.zeros(9, 2, 16, 32)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
BAD = [
    ({"q": torch.zeros(2, 4, 0, 32)}, ValueError, r"q.shape\[2\] must be in 1..256, got 0"),
    ({"q": torch.zeros(2, 4, 257, 32)}, ValueError, r"q.shape\[2\] must be in 1..256, got 257"),
    ({"q": torch.zeros(2, 4, 32)}, ValueError, r"q.dim\(\) must be 4, got 3"),
    ({"k": K[:1]}, ValueError, r"k.shape must be \(2, 2, 64, 32\), got \(1, 2, 64, 32\)"),
    ({"v": K.half()}, ValueError, r"v.dtype must be float32, got float16"),
    ({"q": torch.zeros(2, 3, 1, 32)}, ValueError, r"q.shape\[1\] must be a multiple of k.shape\[1\] = 2, got 3"),
    ({"kv_len": int32(1, 2).long()}, ValueError, r"kv_len.dtype must be int32, got int64"),
    ({"kv_start": int32(1)}, ValueError, r"kv_start.shape must be \(2,\), got \(1,\)"),
    ({"window": -1}, ValueError, r"window must be at least 1, got -1"),
    ({"v_dim": 16}, ValueError, r"v_dim must be None where v is given, got 16"),
    ({"v": None, "v_dim": 33}, ValueError, r"v_dim must be in 1..32, got 33"),
    ({"v": K[:, :, :9]}, ValueError, r"v.shape must be \(2, 2, 64\) and 1..512 columns, got \(2, 2, 9, 32\)"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks.shape must be \(4,\), got \(3,\)"),
    ({"sinks": torch.zeros(4).half()}, ValueError, r"sinks.dtype must be float32, got float16"),
    ({"normalize": False, "return_lse": True}, ValueError, r"normalize must be True with return_lse or sinks: .*, got False"),
    ({"q": torch.zeros(2, 4, 1, 520), "k": torch.zeros(2, 2, 9, 520)}, ValueError, r"q.shape\[-1\] must be in 1..512, or 576, got 520"),
    ({"q": torch.zeros(2, 4, 1, 512), "k": torch.zeros(2, 2, 9, 512)}, ValueError, r"q.shape\[-1\] must be in 1..256 in float32, got 512"),
    ({"scale": -1.0}, ValueError, r"scale must be positive, got -1.0"),
    ({"block_table": TABLE.long()}, ValueError, r"block_table.dtype must be int32, got int64"),
    ({"block_table": TABLE[0]}, ValueError, r"block_table.dim\(\) must be 2, got 1"),
    ({"block_table": TABLE[:1]}, ValueError, r"block_table.shape must be \(2, 3\), got \(1, 3\)"),
    ({"block_table": 3}, TypeError, r"block_table must be a torch.Tensor, got int"),
    ({"k": PAGES[:, :, :12], "v": PAGES[:, :, :12], "block_table": TABLE}, ValueError, r"the page size must be a power of two, at least 16"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        attention_decode(**{"q": Q, "k": K, "v": K, **change})
    assert not counts
