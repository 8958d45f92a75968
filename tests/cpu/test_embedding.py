"""Tests special to `embedding`: ids outside the vocabulary, layouts, messages."""

import pytest
import torch
import torch.nn.functional as F

from tilewright import embedding, interpret
from tilewright.launch import Device, counted, forced_config
from tilewright.ops import embedding as op


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_outside_the_vocabulary_gives_a_row_of_nan(dtype):
    info = torch.iinfo(dtype)
    ids = torch.tensor([0, -1, 9, 10, info.min, 4, info.max, 3], dtype=dtype)
    if dtype is torch.int64:
        ids = torch.cat((ids, torch.tensor([2**32, -(2**32) + 1, 2**31])))  # would be valid if cut to 32 bits
    weight = torch.randn(10, 72)
    problem = op.Problem(len(ids), 72, weight.dtype, dtype is torch.int64)
    spaces = [op.space(problem, Device.named(name)) for name in ("CPU", "H200")]
    for configs in (*spaces, [op.Config(1, 4, units=64)]):
        for config in configs:
            with forced_config(op.plan, config):
                out = embedding(ids, weight)
            known = (ids >= 0) & (ids < 10)
            assert torch.equal(out[known], weight[ids[known].long()])
            assert out[~known].isnan().all()
            assert torch.equal(out.isnan(), op.reference(ids, weight).isnan())


def test_bits_are_copied_and_scaled_as_torch_does():
    weight = torch.randn(50, 96).to(torch.bfloat16)
    weight[7, 3], weight[8, 0] = torch.inf, -0.0
    ids = torch.randint(50, (4, 5))
    assert torch.equal(embedding(ids, weight), F.embedding(ids, weight))
    assert torch.equal(embedding(ids, weight, scale=96**0.5), F.embedding(ids, weight) * 96**0.5)


def test_units_of_any_number_of_rows():
    """Ends of rows inside a block, the end of all inside and at the end of one; rows of the table
    with a stride.
    """
    for tokens, dim, dtype in ((1, 8, torch.bfloat16), (37, 72, torch.bfloat16), (16, 64, torch.float32), (5, 4, torch.float32)):
        ids, weight = torch.randint(9, (tokens,)), torch.randn(9, dim + 16).to(dtype)[:, :dim]
        with forced_config(op.plan, op.Config(1, 8, units=32)), interpret.checking(races=True, order=3):
            assert torch.equal(embedding(ids, weight), F.embedding(ids, weight))


def test_layouts():
    weight = torch.randn(20, 48)
    ids = torch.randint(20, (3, 8))
    assert embedding(ids, weight).shape == (3, 8, 48)
    assert torch.equal(embedding(ids[:, :5], weight), weight[ids[:, :5]])
    assert torch.equal(embedding(ids, weight[:, 8:40]), weight[ids][..., 8:40])
    assert torch.equal(embedding(torch.tensor(3), weight), weight[3])
    with counted() as counts:
        assert embedding(ids[:0], weight).shape == (0, 8, 48)
        assert embedding(ids, weight[:, :0]).shape == (3, 8, 0)
    assert not counts


IDS, WEIGHT = torch.zeros(4, dtype=torch.int64), torch.zeros(10, 64)
BAD = [
    ({"ids": IDS.float()}, ValueError, r"ids.dtype must be one of int32, int64, got float32"),
    ({"ids": torch.zeros(4, 3, dtype=torch.int64).T}, ValueError, r"ids.stride\(-1\) must be 1, got 3"),
    ({"weight": WEIGHT[0]}, ValueError, r"weight.dim\(\) must be 2, got 1"),
    ({"weight": WEIGHT.int()}, ValueError, r"weight.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"weight": torch.zeros(64, 10).T}, ValueError, r"weight.stride\(-1\) must be 1, got 10"),
    ({"weight": torch.zeros(0, 64)}, ValueError, r"weight.shape\[0\] must be at least 1, got 0"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        embedding(**{"ids": IDS, "weight": WEIGHT, **change})
    assert not counts


def test_units_are_counted_below_two_to_the_31() -> None:
    """Beyond, the count wrapped: rows of another token, or none. Tiles have no such count."""
    for tokens, few in ((2**21, True), (2**23 - 64, True), (2**23, False), (2**24, False)):
        found = {c.units > 0 for c in op.space(op.Problem(tokens, 2048, torch.bfloat16), Device.named("H200"))}
        assert found == ({False, True} if few else {False})
