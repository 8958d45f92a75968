"""Tests special to `attention`: masks against an independent definition, and its traps."""

import math

import pytest
import torch
from tensors import int32, randn

from tilewright import interpret
from tilewright.launch import Device, counted, forced_config
from tilewright.ops.attention import Config, Problem, attention, plan, reference, space
from tilewright.testing import assert_accurate, embed

HEAD_DIM = 32


pytestmark = pytest.mark.usefixtures("inference")


def by_the_mask(q, k, v, seen):
    """Softmax attention under a boolean mask [batch, q_len, kv_len], in float64, written without
    our reference.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().nan_to_num(0.0) for x in (q, k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(group, 1)) / math.sqrt(q.shape[-1])
    weights = torch.where(seen[:, None], scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhqk,bhkd->bhqd", weights / torch.where(total == 0, 1.0, total), v.repeat_interleave(group, 1))
    return out, total.squeeze(-1).log()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 40, 1000])
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 33), (7, 70), (40, 23), (1, 65)])
def test_masks_are_those_of_the_definition(q_len, kv_len, window, causal):
    q, k, v = randn(2, 4, q_len, HEAD_DIM), randn(2, 2, kv_len, HEAD_DIM), randn(2, 2, kv_len, HEAD_DIM)
    start, end = int32(0, kv_len // 3), int32(kv_len, kv_len - 2)
    key = torch.arange(kv_len)
    seen = torch.zeros(2, q_len, kv_len, dtype=torch.bool)
    for b in range(2):
        for i in range(q_len):
            own = i + int(end[b]) - q_len  # the key of query i
            seen[b, i] = (key >= start[b]) & (key < end[b])
            if causal:
                seen[b, i] &= key <= own
            if window is not None:
                seen[b, i] &= key > own - window
    truth, truth_lse = by_the_mask(q, k, v, seen)
    options = {"causal": causal, "window": window, "kv_start": start, "kv_len": end, "return_lse": True}
    for function in (reference, attention):
        out, lse = function(q, k, v, **options)
        torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [16, 17, 2**31 - 17, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [5, 64])
def test_a_window_as_long_as_the_keys_is_none(q_len, causal, window):
    """Trap: the window plus a key's place, in 32 bits."""
    q, k, v = randn(1, 2, q_len, HEAD_DIM), randn(1, 1, 16, HEAD_DIM), randn(1, 1, 16, HEAD_DIM)
    assert torch.equal(attention(q, k, v, causal=causal, window=window), attention(q, k, v, causal=causal))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    options = {"causal": causal, "cu_seqlens_q": int32(0, 2, q_len), "cu_seqlens_kv": int32(0, 2, 16)}
    assert torch.equal(attention(q, k, v, window=window, **options), attention(q, k, v, **options))


@pytest.mark.parametrize(("shape", "name"), [((70_000, 1), "batch"), ((1, 70_000), "q_heads")])
def test_batches_and_heads_beyond_the_grid_are_refused(shape, name):
    x = torch.zeros(*shape, 1, 16)
    with counted() as counts, pytest.raises(ValueError, match=rf"^{name} of attention must be smaller .* got 70000$"):
        attention(x, x, x)
    assert not counts


def test_lse_is_the_natural_log_of_the_denominator_in_every_row():
    q, k, v = randn(1, 2, 150, HEAD_DIM), randn(1, 2, 150, HEAD_DIM), randn(1, 2, 150, HEAD_DIM)
    _, lse = attention(q, k, v, causal=False, return_lse=True)
    scores = q.double() @ k.double().mT / math.sqrt(HEAD_DIM)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_halves_merged_by_their_lse_are_the_whole():
    q, k, v = randn(1, 2, 20, HEAD_DIM), randn(1, 2, 90, HEAD_DIM), randn(1, 2, 90, HEAD_DIM)
    whole = attention(q, k, v, causal=False)
    parts = [attention(q, k[:, :, s], v[:, :, s], causal=False, return_lse=True) for s in (slice(0, 37), slice(37, 90))]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [None, Config(64, 16), Config(16, 32, parts=2)])
def test_memory_outside_the_keys_may_hold_anything(config):
    q, k, v = randn(3, 2, 12, HEAD_DIM), randn(3, 1, 64, HEAD_DIM), randn(3, 1, 64, HEAD_DIM)
    start, end = int32(0, 17, 60), int32(31, 64, 60)
    expected = forced(config, q, k, v, kv_start=start, kv_len=end, return_lse=True)
    for poison in (torch.nan, torch.inf, -torch.inf):
        dirty_k, dirty_v = k.clone(), v.clone()
        for b in range(3):
            for x in (dirty_k, dirty_v):
                x[b, :, : start[b]] = poison
                x[b, :, end[b] :] = poison
        found = forced(config, q, dirty_k, dirty_v, kv_start=start, kv_len=end, return_lse=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(expected[0][2], torch.zeros_like(expected[0][2]))  # its start is its end: nothing to see
    assert (expected[1][2] == -torch.inf).all()


def forced(config, *args, **options):
    if config is None:
        return attention(*args, **options)
    with forced_config(plan, config):
        return attention(*args, **options)


def test_scores_near_the_end_of_the_range_stay_finite():
    q, k, v = randn(1, 1, 40, HEAD_DIM) * 1e4, randn(1, 1, 40, HEAD_DIM) * 1e4, randn(1, 1, 40, HEAD_DIM)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-4, atol=1e-4)


def test_a_sequence_is_the_same_bits_wherever_it_stands_in_the_batch():
    q, k, v = (randn(4, 2, 50, HEAD_DIM, dtype=torch.bfloat16) for _ in range(3))
    end = int32(50, 3, 17, 50)
    order = torch.tensor([2, 0, 3, 1])
    straight = attention(q, k, v, kv_len=end)
    assert torch.equal(attention(q[order], k[order], v[order], kv_len=end[order]), straight[order])
    alone = attention(q[2:3], k[2:3], v[2:3], kv_len=end[2:3])
    assert torch.equal(alone, straight[2:3])


def test_packed_sequences_are_the_same_bits_as_each_alone():
    q_lens, kv_lens = (5, 0, 33, 1), (9, 4, 33, 40)
    offsets = [int32(*(sum(x[:i]) for i in range(len(x) + 1))) for x in (q_lens, kv_lens)]
    q = randn(sum(q_lens), 4, HEAD_DIM, dtype=torch.bfloat16)
    k, v = (randn(sum(kv_lens), 2, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    config = Config(16, 32)  # tiles do not depend on the lengths
    out, lse = forced(config, q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1], max_q_len=33, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (4, sum(q_lens))
    for i in range(4):
        rows, keys = (slice(int(o[i]), int(o[i + 1])) for o in offsets)
        if q_lens[i] == 0:
            continue
        alone, alone_lse = forced(config, *(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])), return_lse=True)
        assert torch.equal(out[rows], alone[0].transpose(0, 1))
        assert torch.equal(lse[:, rows], alone_lse[0])
    without_longest = forced(config, q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1])
    assert torch.equal(without_longest, out)


@pytest.mark.parametrize("lengths", [[1] * 9 + [70, 0, 0, 16, 0, 1, 33] + [0] * 20, [0, 0, 5], [40], [0, 0], [16, 32, 16, 0, 48]])
@pytest.mark.parametrize("before", [0, 37])
def test_every_row_of_packed_sequences_has_its_tile_and_rows_of_none_are_left_alone(lengths, before):
    """Empty sequences anywhere, and rows before the first and after the last one, as in a captured
    batch.
    """
    total = before + sum(lengths) + 20
    offsets = int32(*(before + sum(lengths[:i]) for i in range(len(lengths) + 1)))
    q, k, v = (randn(total, 1, HEAD_DIM) for _ in range(3))
    out = torch.full_like(q, 7.0)
    with forced_config(plan, Config(16, 32)):
        attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, out=out)
    inside = slice(int(offsets[0]), int(offsets[-1]))
    expected = reference(q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    torch.testing.assert_close(out[inside], expected, rtol=1e-5, atol=1e-5)
    assert (out[: inside.start] == 7.0).all()
    assert (out[inside.stop :] == 7.0).all()


@pytest.mark.parametrize("varlen", [True, False])
def test_rows_beyond_two_to_the_31_elements_are_found(varlen):
    """Trap: a sequence's first row times its stride overflows 32 bits.

    Only these rows of the 5 GB are touched.
    """
    x = torch.empty(40 << 26, dtype=torch.float16).as_strided((40, 1, HEAD_DIM), (1 << 26, HEAD_DIM, 1))
    x.copy_(randn(40, 1, HEAD_DIM))

    def run(x):
        if varlen:
            return attention(x, x, x, cu_seqlens_q=int32(0, 36, 40), cu_seqlens_kv=int32(0, 36, 40))
        x = x.transpose(0, 1)[None]
        return attention(x[:, :, 36:], x, x, kv_start=int32(35))

    assert torch.equal(run(x), run(x.contiguous()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 5, 7, 32])
def test_blocks_that_walk_come_to_every_tile_once(blocks, causal):
    q, k, v = (randn(3, 2, 40, HEAD_DIM) for _ in range(3))
    walking = Config(16, 32, persistent=True, occupancy=blocks, num_ctas=Device.named("CPU").sms)
    (launch,) = plan(Problem(3, 2, 2, 40, 40, HEAD_DIM, torch.float32, causal), walking, Device.named("CPU"))
    (grid,) = launch.grid
    assert grid == min(18, blocks - blocks % 3 if causal and blocks >= 3 else blocks)
    with interpret.checking(races=True):
        found = forced(walking, q, k, v, causal=causal)
    torch.testing.assert_close(found, reference(q, k, v, causal=causal), rtol=1e-5, atol=1e-5)


def test_without_sequences_packed_rows_are_zero():
    q = randn(5, 2, HEAD_DIM)
    assert torch.equal(attention(q, q, q, cu_seqlens_q=int32(0), cu_seqlens_kv=int32(0)), torch.zeros_like(q))


@pytest.mark.parametrize("kind", ["transposed", "fused", "every_second_head"])
def test_strided_inputs(kind):
    batch, heads, n = 2, 4, 37
    if kind == "transposed":
        q, k, v = (randn(batch, n, heads, HEAD_DIM).transpose(1, 2) for _ in range(3))
    elif kind == "fused":
        q, k, v = randn(batch, n, 3, heads, HEAD_DIM).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    else:
        q, k, v = (randn(batch, 2 * heads, n, HEAD_DIM)[:, ::2] for _ in range(3))
    found = attention(embed(q), embed(k), embed(v))
    assert torch.equal(found, attention(q.contiguous(), k.contiguous(), v.contiguous()))
    assert found.transpose(1, 2).is_contiguous()


def test_lengths_may_be_strided():
    q, k, v = (randn(3, 2, 20, HEAD_DIM) for _ in range(3))
    span = torch.tensor([[2, 20], [0, 11], [5, 5]], dtype=torch.int32)
    found = attention(q, k, v, kv_start=span[:, 0], kv_len=span[:, 1])
    assert torch.equal(found, attention(q, k, v, kv_start=span[:, 0].contiguous(), kv_len=span[:, 1].contiguous()))


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0)])
def test_an_empty_input_gives_an_empty_output_and_launches_nothing(shape):
    q = randn(*shape, HEAD_DIM)
    with counted() as counts:
        out, lse = attention(q, q, q, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == shape
    assert not counts


def test_without_keys_the_output_is_zero():
    q, k = randn(1, 2, 5, HEAD_DIM), randn(1, 2, 0, HEAD_DIM)
    out, lse = attention(q, k, k, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -torch.inf).all()


def test_single_precision_stays_single_in_the_gpus_products():
    """Three TF32 products in place of an fp32 one, judged by the accuracy rule on long rows."""
    q, k, v = (randn(1, 1, 64, 128) for _ in range(3))
    truth = reference(q.double(), k.double(), v.double(), causal=False)
    found = forced(Config(64, 16, tf32x3=True), q, k, v, causal=False)
    assert_accurate(found, reference(q, k, v, causal=False), truth)


def test_a_length_of_the_moment_is_no_part_of_a_kernel():
    """Plans for lengths that differ by one differ only in the grid, so nothing new is compiled."""
    device = Device.named("H200")

    def constants(kv_len: int) -> tuple:
        p = Problem(1, 8, 8, 100, kv_len, 128, torch.bfloat16, has_len=True)
        launches = plan(p, space(p, device)[0], device)
        return tuple((name, value) for launch in launches for name, value in launch.constants.items())

    assert len({constants(n) for n in range(1030, 1060)}) == 1


Q = torch.zeros(2, 4, 6, 32)
K = torch.zeros(2, 2, 9, 32)
BAD = [
    ({"q": None}, TypeError, r"q must be a torch.Tensor, got NoneType"),
    ({"q": Q[0]}, ValueError, r"q.dim\(\) must be 4, got 3"),
    ({"q": Q.int()}, ValueError, r"q.dtype must be one of bfloat16, float16, float32, float8_e4m3fn, got int32"),
    ({"q": Q.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, r"q.stride\(-1\) must be 1, got 6"),
    ({"q": torch.zeros(2, 3, 6, 32)}, ValueError, r"q.shape\[1\] must be a multiple of k.shape\[1\] = 2, got 3"),
    ({"q": torch.zeros(2, 4, 6, 300)}, ValueError, r"q.shape\[-1\] must be in 1..256, got 300"),
    ({"k": K.half()}, ValueError, r"k.dtype must be float32, got float16"),
    ({"k": K[:1]}, ValueError, r"k.shape must be \(2, 2, 9, 32\), got \(1, 2, 9, 32\)"),
    ({"v": K[:, :, 1:]}, ValueError, r"v.shape must be \(2, 2, 9, 32\), got \(2, 2, 8, 32\)"),
    ({"scale": 0.0}, ValueError, r"scale must be positive, got 0.0"),
    ({"window": 0}, ValueError, r"window must be at least 1, got 0"),
    ({"kv_len": torch.zeros(2)}, ValueError, r"kv_len.dtype must be int32, got float32"),
    ({"kv_len": int32(1)}, ValueError, r"kv_len.shape must be \(2,\), got \(1,\)"),
    ({"kv_start": 3}, TypeError, r"kv_start must be a torch.Tensor, got int"),
    ({"max_q_len": 4}, ValueError, r"max_q_len must be given only with cu_seqlens_q, got int"),
    ({"cu_seqlens_kv": int32(0, 1)}, ValueError, r"cu_seqlens_kv must be given only with cu_seqlens_q, got Tensor"),
    ({"v": torch.zeros(2, 2, 9, 300)}, ValueError, r"v.shape\[-1\] must be in 1..256, got 300"),
    ({"softcap": 0.0}, ValueError, r"softcap must be positive, got 0.0"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks.shape must be \(4,\), got \(2,\)"),
    ({"sinks": torch.zeros(4).half()}, ValueError, r"sinks.dtype must be float32, got float16"),
    ({"k_scale": torch.ones(2)}, ValueError, r"k_scale must be None for float32, got Tensor"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        attention(**{"q": Q, "k": K, "v": K, **change})
    assert not counts


PACKED_Q, PACKED_K = torch.zeros(6, 4, 32), torch.zeros(9, 2, 32)
BAD_PACKED = [
    ({"q": Q}, r"q.dim\(\) must be 3, got 4"),
    ({"cu_seqlens_kv": None}, r"cu_seqlens_kv must be given with cu_seqlens_q, got None"),
    ({"cu_seqlens_kv": int32(0, 4, 9)}, r"cu_seqlens_kv.shape must be \(2,\), got \(3,\)"),
    ({"cu_seqlens_q": int32(0)[0]}, r"cu_seqlens_q.dim\(\) must be 1, got 0"),
    ({"cu_seqlens_q": int32()}, r"cu_seqlens_q.shape must be \(sequences \+ 1,\), got \(0,\)"),
    ({"kv_len": int32(1)}, r"kv_len must be None with cu_seqlens_q, got Tensor"),
    ({"max_q_len": 0}, r"max_q_len must be at least 1, got 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD_PACKED)
def test_bad_packed_input_is_named(change, message):
    good = {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_K, "cu_seqlens_q": int32(0, 6), "cu_seqlens_kv": int32(0, 9)}
    with counted() as counts, pytest.raises(ValueError, match=message):
        attention(**{**good, **change})
    assert not counts


Q8, K8 = Q.to(torch.float8_e4m3fn), K.to(torch.float8_e4m3fn)
SCALES = {"q_scale": torch.ones(4), "k_scale": torch.ones(2), "v_scale": torch.ones(2)}
BAD_CODES = [
    ({"q_scale": None}, ValueError, r"q_scale must be given for float8_e4m3fn, as fp32 of shape \(4,\), got None"),
    ({"v_scale": torch.ones(4)}, ValueError, r"v_scale.shape must be \(2,\), got \(4,\)"),
    ({"q": torch.zeros(2, 4, 6, 192).to(torch.float8_e4m3fn)}, ValueError, r"q.shape\[-1\] must be in 1..128, got 192"),
    ({"v": K8.expand(2, 2, 9, 32).transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]}, ValueError, r"v.stride\(-1\) must be 1, got 2"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CODES)
def test_bad_codes_are_named(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        attention(**{"q": Q8, "k": K8, "v": K8, **SCALES, **change})
    assert not counts


def test_softcap_bends_scaled_scores_before_the_mask():
    q, k, v = randn(1, 4, 40, HEAD_DIM) * 3, randn(1, 2, 70, HEAD_DIM), randn(1, 2, 70, 48)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / math.sqrt(HEAD_DIM)
    hidden = torch.ones(40, 70, dtype=torch.bool).tril(30).logical_not()

    def output(scores):
        return scores.softmax(-1) @ v.double().repeat_interleave(2, 1)

    found = attention(q, k, v, softcap=2.0).double()
    torch.testing.assert_close(found, output((2 * torch.tanh(scores / 2)).masked_fill(hidden, -torch.inf)), rtol=1e-5, atol=1e-5)
    # If softcap came after the mask, it would turn -inf into -2 and show every hidden key.
    naive = output(2 * torch.tanh(scores.masked_fill(hidden, -torch.inf) / 2))
    assert (found - naive).abs().max() > 0.05


def test_a_sink_is_in_the_denominator_once_and_not_in_lse():
    q, k, v = (randn(1, 2, 150, HEAD_DIM) for _ in range(3))
    sinks = torch.tensor([0.7, 3.0])
    plain, plain_lse = attention(q, k, v, return_lse=True)
    for config in (None, Config(16, 32), Config(64, 64, tail_n=16)):
        found, lse = forced(config, q, k, v, sinks=sinks, return_lse=True)
        torch.testing.assert_close(lse, plain_lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found, plain * torch.sigmoid(plain_lse - sinks[:, None])[..., None], rtol=1e-5, atol=1e-6)
    # Counted once for each step of keys, or in base 2, the sink would give another result.
    assert (found - plain * torch.sigmoid(plain_lse - sinks[:, None] * math.log2(math.e))[..., None]).abs().max() > 0.01


def test_any_sink_gives_numbers():
    q, k, v = (randn(1, 4, 20, HEAD_DIM) for _ in range(3))
    start = int32(8)  # the first eight queries see nothing
    sinks = torch.tensor([torch.inf, -torch.inf, 1e30, 200.0])
    out = attention(q, k, v, sinks=sinks, kv_start=start)
    assert out.isfinite().all()
    assert (out[:, 0] == 0).all()
    assert (out[:, 2] == 0).all()
    assert torch.equal(out[:, 1], attention(q, k, v, kv_start=start)[:, 1])
    assert (out[:, :, :8] == 0).all()


def test_a_chunk_of_a_prompt_is_those_rows_of_the_whole():
    q, k, v = (randn(1, 2, 90, HEAD_DIM) for _ in range(3))
    whole = attention(q, k, v, window=30)
    cache_k, cache_v = (torch.full((1, 2, 128, HEAD_DIM), torch.nan) for _ in range(2))
    cache_k[:, :, :90], cache_v[:, :, :90] = k, v
    for begin, end in ((0, 37), (37, 64), (64, 90)):
        part = attention(q[:, :, begin:end], cache_k, cache_v, kv_len=int32(end), window=30)
        torch.testing.assert_close(part, whole[:, :, begin:end], rtol=1e-5, atol=1e-5)
    upper_left = torch.nn.functional.scaled_dot_product_attention(q[:, :, 64:], k, v, is_causal=True)
    assert (upper_left - attention(q[:, :, 64:], k, v)).abs().max() > 0.1


@pytest.mark.parametrize("config", [Config(16, 16), Config(16, 64, tail_n=16)])
def test_keys_before_every_window_are_not_even_read(config):
    q, k, v = randn(1, 1, 16, HEAD_DIM), randn(1, 1, 320, HEAD_DIM), randn(1, 1, 320, HEAD_DIM)
    expected = forced(config, q, k, v, window=20)
    k[:, :, :272], v[:, :, :272] = torch.nan, torch.nan  # 0 * NaN is NaN: a mask alone would show it
    assert torch.equal(forced(config, q, k, v, window=20), expected)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("tail", "splits"), [(16, 1), (32, 1), (128, 1), (16, 2), (32, 3), (128, 2), (128, 9)])
def test_shorter_steps_and_kv_splits_see_the_same_keys(tail, splits, window):
    """With 9 splits some have no key."""
    q, k, v = randn(1, 2, 200, HEAD_DIM), randn(1, 1, 333, HEAD_DIM), randn(1, 1, 333, HEAD_DIM)
    for causal in (True, False):
        found = forced(Config(32, 128, tail_n=tail, num_kv_splits=splits), q, k, v, causal=causal, window=window)
        torch.testing.assert_close(found, reference(q, k, v, causal=causal, window=window), rtol=1e-5, atol=1e-5)


def eight(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def test_values_of_8_bits_may_lie_either_way():
    q, k, v = eight(2, 4, 30, 64), eight(2, 2, 70, 64), eight(2, 2, 70, 80)
    options = {"q_scale": torch.rand(4) + 0.5, "k_scale": torch.rand(2) + 0.5, "v_scale": torch.rand(2) + 0.5, "return_lse": True}
    turned = v.transpose(2, 3).contiguous().transpose(2, 3)
    for length in ({}, {"kv_len": int32(70, 23)}):
        straight, across = attention(q, k, v, **options, **length), attention(q, k, turned, **options, **length)
        assert straight[0].dtype is torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(straight, across, strict=True))
        values = q.double() * options["q_scale"][:, None, None], k.double() * options["k_scale"][:, None, None]
        _, lse = reference(*values, v.double(), return_lse=True, **length)
        torch.testing.assert_close(straight[1].double(), lse, rtol=1e-6, atol=1e-6)


def test_weights_of_8_bits_reach_far_below_the_largest():
    """One key weighs a thousand times as much as each of a thousand others. e4m3 cannot hold
    weights that small.
    """
    n = 1024
    q, k = torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, n, 32)
    q[..., 0], k[:, :, 0, 0] = 1.0, 1.0
    v = torch.ones(1, 1, n, 32)
    v[:, :, 0] = 0.0
    scale = math.log(n)
    ones = {name: torch.ones(1) for name in SCALES}
    found = attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), **ones, causal=False, scale=scale)
    assert abs(found.float().mean() - 0.5) < 0.01
    weights = torch.exp((q @ k.mT) * scale - scale)  # relative to the largest, as they are
    assert (weights.to(torch.float8_e4m3fn).float() @ v / weights.sum()).max() < 0.01


def test_gradients_are_refused_by_name():
    with torch.inference_mode(False), torch.enable_grad():
        q = torch.zeros(1, 1, 2, 32, requires_grad=True)
        with pytest.raises(ValueError, match=r"q.requires_grad must be False"):
            attention(q, q, q)
