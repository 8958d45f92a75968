"""Tests special to `dropout`: the generator's published values, the mask, the backward, edges,
messages.
"""

import pytest
import torch

from tilewright import dropout
from tilewright.launch import Device, counted, forced_config
from tilewright.ops import dropout as op
from tilewright.ops.common.philox import philox_reference
from tilewright.testing.definitions import DEFINITIONS


def int64(value):
    return torch.tensor(value, dtype=torch.int64)


# The known answers that come with the authors' Random123: counter, key, words
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_generator_gives_the_published_words(counter, key, words):
    found = philox_reference(tuple(map(int64, counter)), tuple(map(int64, key)))
    assert tuple(map(int, found)) == words


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [None, 0, 2**32 - 3, -7, 2**62])
def test_same_bits_as_the_definition_whatever_the_tile(seed, offset):
    x = torch.randn(3, 5, 67)
    offset = None if offset is None else int64(offset)
    expected = op.reference(x, 0.37, int64(seed), offset)
    for name in ("CPU", "H200", "A100"):
        for config in op.space(op.Problem(x.numel(), x.dtype), Device.named(name)):
            with forced_config(op.plan, config):
                assert torch.equal(dropout(x, 0.37, int64(seed), offset), expected)


def test_a_word_just_below_the_limit_is_dropped():
    """2**31 - 14, in fp32 2**31: definitions that compared it with p * 2.0**32 kept the element."""
    x, seed, offset = torch.ones(4), int64(0x0123_4567_89AB_CDEF), int64(2**32 - 5 + 20_349_355 // 4)
    for found in (dropout(x, 0.5, seed, offset), op.reference(x, 0.5, seed, offset), *DEFINITIONS["dropout"](x, 0.5, seed, offset)):
        assert found.tolist() == [0.0, 2.0, 2.0, 0.0]


def test_backward_is_dropout_of_the_gradient():
    x, grad, seed, offset = torch.randn(1000, requires_grad=True), torch.randn(1000), int64(11), int64(5)
    op.reference(x, 0.3, seed, offset).backward(grad)
    assert torch.equal(dropout(grad, 0.3, seed, offset), x.grad)


def test_mask_has_the_rate_and_seeds_and_offsets_differ():
    ones = torch.ones(1 << 18)
    kept = [dropout(ones, 0.1, int64(seed), int64(offset)) > 0 for seed, offset in ((1, 0), (2, 0), (1, ones.numel() // 4), (1 + 2**32, 0))]
    for mask in kept:
        assert abs(mask.double().mean() - 0.9) < 4 * (0.09 / ones.numel()) ** 0.5
    for i, a in enumerate(kept):
        for b in kept[:i]:
            assert abs((a ^ b).double().mean() - 0.18) < 0.01  # independent: 2 * 0.9 * 0.1
    assert torch.equal((dropout(ones, 0.1, int64(1), int64(1)) > 0)[:-4], kept[0][4:])  # one counter on, four elements on


def test_probability_zero_keeps_and_one_clears_everything():
    x = torch.tensor([1.5, -torch.inf, torch.nan, 0.0, 3e38])
    assert torch.equal(dropout(x, 0.0, int64(3)).nan_to_num(), x.nan_to_num())
    assert torch.equal(dropout(x, 1.0, int64(3)), torch.zeros(5))
    assert torch.equal(dropout(x, 1 - 2.0**-40, int64(3)), torch.zeros(5))
    many = dropout(torch.full((4096,), torch.nan), 0.5, int64(3))
    assert 0 < many.isnan().sum() < 4096  # what is dropped is 0, whatever it was
    assert (many[~many.isnan()] == 0).all()


def test_layouts():
    x = torch.randn(6, 8, 10)
    expected = dropout(x.transpose(0, 1).contiguous(), 0.5, int64(1))
    assert torch.equal(dropout(x.transpose(0, 1), 0.5, int64(1)), expected)
    assert dropout(torch.tensor(2.0), 0.0, int64(1)) == 2.0
    with counted() as counts:
        assert dropout(torch.empty(3, 0), 0.5, int64(1)).shape == (3, 0)
    assert not counts


X, SEED = torch.zeros(8), torch.tensor(1)
BAD = [
    ({"x": X.long()}, ValueError, r"x.dtype must be one of bfloat16, float16, float32, got int64"),
    ({"x": torch.zeros(3, 4).T}, ValueError, r"x.stride\(-1\) must be 1, got 4"),
    ({"p": 1.5}, ValueError, r"p must be 0 to 1, got 1.5"),
    ({"p": float("nan")}, ValueError, r"p must be 0 to 1, got nan"),
    ({"seed": 5}, TypeError, r"seed must be a torch.Tensor, got int"),
    ({"seed": torch.tensor(1.0)}, ValueError, r"seed.dtype must be int64, got float32"),
    ({"seed": torch.tensor([1])}, ValueError, r"seed.shape must be \(\), got \(1,\)"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        dropout(**{"x": X, "p": 0.5, "seed": SEED, **change})
    assert not counts
