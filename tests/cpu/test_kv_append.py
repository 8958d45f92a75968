"""Tests special to `kv_append`: what is not stored, views, rotation as `rope` does it, and its
messages.
"""

import pytest
import torch

from tilewright import interpret
from tilewright.launch import Device, counted
from tilewright.ops.kv_append import Problem, kv_append, kv_append_out, plan, space
from tilewright.ops.kv_append.decision import CHOICES
from tilewright.ops.rms_norm import rms_norm
from tilewright.ops.rope import rope

pytestmark = pytest.mark.usefixtures("inference")


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fresh(batch=2, heads=2, tokens=1, dim=32, dtype=torch.bfloat16):
    return torch.randn(batch, heads, tokens, dim).to(dtype)


def tables(rows, half):
    angle = torch.arange(rows)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("paged", [False, True])
def test_only_rows_that_exist_are_written(paged):
    """Negative positions, those past the end, and table entries that name no page leave every byte
    as it was.
    """
    k, v = fresh(batch=4, tokens=2), fresh(batch=4, tokens=2)
    positions = int32([[3, -1], [-5, 16], [2_000_000_000, 15], [0, -2_000_000_000]])
    caches = [torch.full((4, 2, 16, 32), 7.0).bfloat16() for _ in range(2)]
    options = {}
    if paged:
        caches = [torch.full((8, 2, 8, 32), 7.0).bfloat16() for _ in range(2)]
        options["block_table"] = int32([[5, 0], [1, 2], [3, 2147480000], [-9, 4]])
    kv_append(k, v, *caches, positions=positions, **options)
    written = {(5, 3): (0, 0)} if paged else {(0, 3): (0, 0), (2, 15): (2, 1), (3, 0): (3, 0)}
    for x, cache in zip((k, v), caches, strict=True):
        for (outer, row), (b, t) in written.items():
            assert torch.equal(cache[outer, :, row], x[b, :, t])
            cache[outer, :, row] = 7.0
        assert (cache == 7.0).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_rotates_as_rope_does(interleaved):
    batch, tokens, half = 3, 5, 12
    q, k, v = fresh(batch, 6, tokens), fresh(batch, 2, tokens), fresh(batch, 2, tokens)
    cos, sin = tables(40, half)
    positions = int32([[7, 8, 9, 10, 11], [0, 1, 2, 3, 4], [35, 36, 37, 38, 39]])
    k_cache, v_cache = torch.zeros(batch, 2, 40, 32).bfloat16(), torch.zeros(batch, 2, 40, 32).bfloat16()
    expected_q, expected_k = rope(q.clone(), k.clone(), cos[positions.long()], sin[positions.long()], interleaved=interleaved)
    with counted() as counts:
        found = kv_append(k, v, k_cache, v_cache, positions=positions, q=q, cos=cos, sin=sin, interleaved=interleaved)
    assert sum(counts.values()) == 1
    assert all(a is b for a, b in zip(found, (k_cache, v_cache, q), strict=True))
    assert torch.equal(q, expected_q)
    for b in range(batch):
        assert torch.equal(k_cache[b, :, positions[b].long()], expected_k[b])
        assert torch.equal(v_cache[b, :, positions[b].long()], v[b])


def test_the_cache_of_mla_is_two_views_of_one_tensor():
    cache = torch.zeros(2, 1, 20, 576).bfloat16()
    latent, k_rope, q_rope = fresh(2, 1, 1, 512), fresh(2, 1, 1, 64), fresh(2, 16, 1, 64)
    cos, sin = tables(20, 32)
    positions = int32([4, 19])
    expected_q, expected_k = rope(q_rope.clone(), k_rope.clone(), cos[positions.long()][:, None], sin[positions.long()][:, None], interleaved=True)
    with interpret.checking(races=True, order=5):
        kv_append(k_rope, latent, cache[..., 512:], cache[..., :512], positions=positions, q=q_rope, cos=cos, sin=sin, interleaved=True)
    assert torch.equal(q_rope, expected_q)
    for b, row in enumerate(positions.tolist()):
        assert torch.equal(cache[b, 0, row], torch.cat((latent[b, 0, 0], expected_k[b, 0, 0])))
        cache[b, 0, row] = 0
    assert (cache == 0).all()


def test_shares_of_sums_are_added_first():
    """Of three sequences of two tokens; a part of a head is not rotated."""
    shares = torch.randn(4, 3, 2, 8 * 48)  # of heads: 4 of q, 2 of k and 2 of v
    summed = (shares[0] + shares[1] + shares[2] + shares[3]).bfloat16()
    cos, sin = tables(20, 12)
    positions = int32([[4, 5], [0, 1], [18, 19]])
    caches = [torch.zeros(3, 2, 20, 48).bfloat16() for _ in range(4)]
    q, k, v = summed.unflatten(2, (8, 48)).transpose(1, 2).split((4, 2, 2), 1)
    wide = shares.flatten(0, 1).unflatten(2, (8, 48)).transpose(1, 2).split((4, 2, 2), 1)
    rotated = torch.zeros(3, 2, 4 * 48).bfloat16().unflatten(2, (4, 48)).transpose(1, 2)
    for (q_, k_, v_), (k_cache, v_cache), to in ((wide, caches[:2], rotated), ((q, k, v), caches[2:], None)):
        options = cos, sin, *(None,) * 6, False, 1e-6, False, to
        with interpret.checking(races=True):
            kv_append_out(k_, v_, k_cache, v_cache, positions, None, q_, *options)
    assert torch.equal(rotated, q)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("rounded", [False, True])
def test_it_norms_the_latent_as_rms_norm_does(rounded):
    cache = torch.zeros(2, 1, 20, 80).bfloat16()
    latent, k_rope, weight = fresh(2, 1, 3, 64), fresh(2, 1, 3, 16), torch.randn(64).bfloat16()
    positions = int32([[4, 5, 6], [17, 18, 19]])
    with counted() as counts:
        norm = {"v_norm": weight, "eps": 1e-5, "round_before_weight": rounded}
        kv_append(k_rope, latent, cache[..., 64:], cache[..., :64], positions=positions, **norm)
    assert sum(counts.values()) == 1
    expected = rms_norm(latent, weight, 1e-5, round_before_weight=rounded)
    for b in range(2):
        assert torch.equal(cache[b, 0, positions[b].long()], torch.cat((expected[b, 0], k_rope[b, 0]), -1))


def test_codes_are_those_of_the_rotated_value_and_saturate():
    k, v = torch.full((1, 1, 1, 32), 3.0), torch.tensor([1e6, -1e6, 0.5, 0.0]).repeat(8).view(1, 1, 1, 32)
    caches = [torch.zeros(1, 1, 4, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    cos, sin = tables(4, 16)
    kv_append(k, v, *caches, positions=int32([1]), cos=cos, sin=sin, k_scale=torch.tensor(0.25), v_scale=torch.tensor(0.5))
    a, b = 3 * (cos[1] - sin[1]), 3 * (cos[1] + sin[1])
    assert torch.equal(caches[0][0, 0, 1].float(), (torch.cat((a, b)) / 0.25).to(torch.float8_e4m3fn).float())
    assert caches[1][0, 0, 1].float()[:4].tolist() == [448.0, -448.0, 1.0, 0.0]


def test_a_step_of_the_moment_is_no_part_of_a_kernel():
    device = Device.named("H200")

    def constants(max_len: int) -> tuple:
        p = Problem(4, 32, 8, 1, 128, max_len, torch.bfloat16, rotary_dim=128)
        return plan(p, space(p, device)[0], device)[0].compiled

    assert len({constants(n) for n in range(100, 400)}) == 1
    problems = (Problem(4, 32, 8, 1, 128, n, torch.bfloat16, rotary_dim=128) for n in (100, 400))
    config = space(Problem(4, 32, 8, 1, 128, 100, torch.bfloat16, rotary_dim=128), device)[0]
    assert len({CHOICES.timed_as(p, config) for p in problems}) == 1, "neighbours of one are those of the other"


@pytest.mark.parametrize(("batch", "fits"), [(65_535, True), (65_536, False)])
def test_as_many_sequences_as_a_grid_has_blocks(batch, fits):
    assert bool(space(Problem(batch, 0, 8, 1, 128, 64, torch.bfloat16), Device.named("H200"))) == fits


def test_caches_that_share_elements_are_refused():
    """Keys written over values leave no error behind, only wrong attention."""
    k, cache = fresh(2, 2, 1, 32), torch.zeros(2, 2, 16, 40).bfloat16()
    positions = int32([0, 1])
    for k_cache, v_cache in (
        (cache[..., :32], cache[..., :32]),
        (cache[..., :32], cache[..., 8:]),
        (cache[..., :32], cache[..., :32].view(2, 2, 16, 32)),
    ):
        with counted() as counts, pytest.raises(ValueError, match="v_cache must be free of elements of k_cache"):
            kv_append(k, k, k_cache, v_cache, positions=positions)
        assert not counts
    assert (cache == 0).all()
    both = torch.zeros(2, 16, 2, 2, 32).bfloat16()  # beside each other, rows of one between rows of the other
    kv_append(k, k, both[..., 0, :].transpose(1, 2), both[..., 1, :].transpose(1, 2), positions=positions)
    for b in range(2):
        assert torch.equal(both[b, b, :, 0], k[b, :, 0])
        assert torch.equal(both[b, b, :, 1], k[b, :, 0])


def test_two_tokens_of_one_slot_are_a_race_that_the_interpreter_names():
    k = fresh(1, 1, 8)
    caches = [torch.zeros(1, 1, 16, 32).bfloat16() for _ in range(2)]
    with interpret.checking(races=True), pytest.raises(interpret.KernelError):
        kv_append(k, k, *caches, positions=torch.full((1, 8), 3, dtype=torch.int32))


def test_nothing_new_launches_nothing():
    k = fresh(2, 2, 0)
    caches = [torch.zeros(2, 2, 16, 32).bfloat16() for _ in range(2)]
    with counted() as counts:
        kv_append(k, k, *caches, positions=torch.zeros(2, 0, dtype=torch.int32))
    assert not counts


GOOD = {
    "k": torch.zeros(2, 2, 1, 32),
    "v": torch.zeros(2, 2, 1, 32),
    "k_cache": torch.zeros(2, 2, 16, 32),
    "v_cache": torch.zeros(2, 2, 16, 32),
    "positions": int32([0, 1]),
}
HALVES = {"cos": torch.zeros(16, 16), "sin": torch.zeros(16, 16)}
BAD = [
    ({"v_norm": torch.zeros(16)}, ValueError, r"v_norm.shape must be \(32,\), got \(16,\)"),
    ({"k_norm": torch.zeros(16)}, ValueError, r"k_norm.shape must be \(32,\), got \(16,\)"),
    ({"q_norm": torch.zeros(32)}, ValueError, r"q_norm must be given only with q, got Tensor"),
    ({"round_before_weight": True}, ValueError, r"round_before_weight must be False without a norm, got True"),
    ({"k": None}, TypeError, r"k must be a torch.Tensor, got NoneType"),
    ({"v": torch.zeros(2, 1, 1, 32)}, ValueError, r"v.shape must be \(2, 2, 1, 32\), got \(2, 1, 1, 32\)"),
    ({"k_cache": torch.zeros(2, 2, 16, 32).half()}, ValueError, r"k_cache.dtype must be one of float32, float8_e4m3fn, got float16"),
    ({"k_cache": torch.zeros(3, 2, 16, 32)}, ValueError, r"k_cache.shape must be \(2, 2, 16, 32\), got \(3, 2, 16, 32\)"),
    ({"v_cache": torch.zeros(2, 2, 15, 32)}, ValueError, r"v_cache.shape must be \(2, 2, 16, 32\), got \(2, 2, 15, 32\)"),
    ({"v_cache": torch.zeros(2, 2, 1, 32).expand(2, 2, 16, 32)}, ValueError, r"v_cache must be free of broadcast axes"),
    ({"positions": torch.zeros(2)}, ValueError, r"positions.dtype must be int32, got float32"),
    ({"positions": int32([[0, 1], [2, 3]])}, ValueError, r"positions.shape must be \(2, 1\), got \(2, 2\)"),
    ({"block_table": int32([[0]])}, ValueError, r"block_table.shape must be \(2, 1\), got \(1, 1\)"),
    ({"cos": HALVES["cos"]}, ValueError, r"cos and sin must be given together, got cos"),
    ({"q": torch.zeros(2, 4, 1, 32)}, ValueError, r"q must be given only with cos and sin, got Tensor"),
    ({**HALVES, "cos": torch.zeros(16, 17)}, ValueError, r"cos.shape must be \(at least 1, 1 to 16\), got \(16, 17\)"),
    ({**HALVES, "q": torch.zeros(2, 4, 2, 32)}, ValueError, r"q.shape must be \(2, 4, 1, 32\), got \(2, 4, 2, 32\)"),
    ({"k_scale": torch.ones(())}, ValueError, r"k_scale must be None for a cache of float32, got Tensor"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        kv_append(**{**GOOD, **change})
    assert not counts
