"""`cascade_decode`: shared keys are read once, and the result is that of attention over all."""

import pytest
import torch

import tilewright
from tilewright.launch import Device, traced
from tilewright.ops.attention_decode import reference
from tilewright.testing.accuracy import assert_accurate

pytestmark = pytest.mark.usefixtures("inference")
BATCH, HEADS, KV_HEADS, DIM, PREFIX, OWN, PAGE = 3, 6, 2, 32, 80, 48, 16
INT32 = torch.int32


def drawn(q_len=1, columns=DIM, dtype=torch.bfloat16, device="cpu"):
    """q, the shared keys and values, and each sequence's own."""
    shapes = (
        (BATCH, HEADS, q_len, DIM),
        (KV_HEADS, PREFIX, DIM),
        (KV_HEADS, PREFIX, columns),
        (BATCH, KV_HEADS, OWN, DIM),
        (BATCH, KV_HEADS, OWN, columns),
    )
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def whole(q, prefix_k, prefix_v, k, v, own, shared=PREFIX, **options):
    """Attention over the shared keys and what follows them, a sequence at a time."""
    found = []
    for i, n in enumerate(own):
        keys, values = (torch.cat((x[:, :shared], y[i, :, :n]), 1)[None] for x, y in ((prefix_k, k), (prefix_v, v)))
        found.append(reference(q[i : i + 1], keys, values, return_lse=True, **options))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def checked(found, inputs, own, **options):
    truth = whole(*(x.double() for x in inputs), own, **options)
    theirs = whole(*inputs, own, **options)
    for a, b, c in zip(found, theirs, truth, strict=True):
        assert_accurate(a, b, c)


@pytest.mark.parametrize("how", [{}, {"q_len": 3, "columns": 48}], ids=["one token", "drafted"])
def test_the_result_is_that_of_attention_over_all_keys(how):
    inputs, own = drawn(**how), [48, 5, 17]
    for x in inputs[1:3]:
        x[:, 70:] = torch.nan  # behind the shared keys
    lengths, shared = torch.tensor(own, dtype=INT32), torch.tensor([70], dtype=INT32)
    found = tilewright.cascade_decode(*inputs, lengths, prefix_len=shared, scale=0.3, return_lse=True)
    checked(found, inputs, own, shared=70, scale=0.3)


def test_both_parts_may_lie_in_pages_of_one_pool():
    q, prefix_k, prefix_v, k, v = inputs = drawn()
    own, count = [48, 5, 17], PREFIX // PAGE
    order = torch.randperm(count + BATCH * OWN // PAGE, dtype=INT32)
    pool = []
    for shared, mine in ((prefix_k, k), (prefix_v, v)):
        pages = torch.cat((shared.unflatten(1, (-1, PAGE)).transpose(0, 1), mine.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)))
        pool.append(torch.empty_like(pages).index_copy_(0, order.long(), pages))
    tables = {"prefix_table": order[:count], "block_table": order[count:].view(BATCH, -1)}
    out = torch.empty(BATCH, HEADS, 1, DIM, dtype=q.dtype)
    found = tilewright.cascade_decode(q, *pool, *pool, torch.tensor(own, dtype=INT32), **tables, return_lse=True, out=out)
    assert found[0] is out
    checked(found, inputs, own)


def test_shared_keys_are_read_once_for_all_sequences():
    with traced(Device.named("H200")) as launches:
        tilewright.cascade_decode(*drawn(device="meta"))
    shared, *_, merge = (each.launch for each in launches)
    assert shared.grid[1:] == (KV_HEADS, 1)  # key heads of one sequence
    assert merge.name == "merge_states_kernel"


def test_what_does_not_fit_is_refused():
    q, prefix_k, prefix_v, k, v = drawn()
    for change, message in (
        ({"prefix_k": prefix_k[None]}, "prefix_k must be 3-dimensional|prefix_k.dim"),
        ({"k": k[:, :1]}, "key heads of k and columns of v must be those of the prefix"),
        ({"prefix_v": prefix_v[:, :, :16]}, "key heads of k and columns of v must be those of the prefix"),
        ({"prefix_len": torch.tensor([3, 4], dtype=INT32)}, "kv_len"),
    ):
        with pytest.raises(ValueError, match=message):
            tilewright.cascade_decode(**{"q": q, "prefix_k": prefix_k, "prefix_v": prefix_v, "k": k, "v": v, **change})
