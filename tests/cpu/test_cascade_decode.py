"""`cascade_decode`: shared keys are read once, and the result is that of attention over all."""

from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.launch import Device, counted, traced
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
    *_, shared, merge = (each.launch for each in launches)
    assert shared.grid[1:] == (KV_HEADS, 1)  # key heads of one sequence
    assert merge.name == "merge_states_kernel"


VIEWS = {
    "q of heads first": lambda x: (x[0].transpose(1, 2).contiguous().transpose(1, 2), *x[1:]),
    "q of a wider row": lambda x: (torch.cat((x[0], x[0]), 3)[..., DIM:], *x[1:]),
    "one q": lambda x: (x[0][:1].expand(BATCH, -1, -1, -1), *x[1:]),
    "prefix of tokens first": lambda x: (x[0], *(y.transpose(0, 1).contiguous().transpose(0, 1) for y in x[1:3]), *x[3:]),
    "every second key of a prefix": lambda x: (x[0], *(y.repeat_interleave(2, 1)[:, ::2] for y in x[1:3]), *x[3:]),
    "one prefix of all heads": lambda x: (x[0], *(y[:1].expand(KV_HEADS, -1, -1) for y in x[1:3]), *x[3:]),
    "keys of all sequences are the first one's": lambda x: (*x[:3], *(y[:1].expand(BATCH, -1, -1, -1) for y in x[3:])),
    "the prefix is a sequence's own keys": lambda x: (x[0], x[3][1], x[4][1], *x[3:]),
    "no prefix": lambda x: (x[0], *(y[:, :0] for y in x[1:3]), *x[3:]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_taken_as_they_lie(view):
    inputs, own = VIEWS[view](drawn()), [48, 5, 17]
    lengths = torch.tensor([48, 99, 5, 99, 17, 99], dtype=INT32)[::2]
    checked(tilewright.cascade_decode(*inputs, lengths, return_lse=True), inputs, own, shared=inputs[1].shape[1])


def test_tables_may_be_views_and_no_prefix_may_be_left():
    inputs = q, prefix_k, prefix_v, k, v = drawn()
    own, pages = [48, 5, 17], [x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1) for x in (k, v)]
    prefix = [x.unflatten(1, (-1, PAGE)).transpose(0, 1) for x in (prefix_k, prefix_v)]
    table, shared = torch.full((BATCH, 6), 10**6, dtype=INT32), torch.full((10,), 10**6, dtype=INT32)
    table[:, ::2], shared[::2] = torch.arange(9).view(BATCH, 3), torch.arange(5)
    lengths = torch.tensor(own, dtype=INT32)
    for length, prefix_table in ((PREFIX, shared[::2]), (0, shared[:0])):
        how = {"block_table": table[:, ::2], "prefix_table": prefix_table, "return_lse": True}
        checked(tilewright.cascade_decode(q, *prefix, *pages, lengths, **how), inputs, own, shared=length)
    none = torch.zeros(BATCH, dtype=INT32)
    out, lse = tilewright.cascade_decode(*inputs, none, prefix_len=none[:1], return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


PAGES = torch.zeros(4, KV_HEADS, PAGE, DIM).bfloat16()
ONE = torch.zeros(1, dtype=INT32)
MISFITS = {
    r"prefix_k.dim\(\) must be 3": lambda x: {"prefix_k": x["prefix_k"][None]},
    "key heads of k and columns of v must be those of the prefix": lambda x: {"k": x["k"][:, :1]},
    r"columns of v must be those of the prefix, \(2, 16\)": lambda x: {"prefix_v": x["prefix_v"][..., :16]},
    r"prefix_len.shape must be \(1,\), got \(2,\)": lambda x: {"prefix_len": torch.tensor([3, 4], dtype=INT32)},
    "prefix_len must be a torch.Tensor, got int": lambda x: {"prefix_len": 3},
    r"prefix_v.shape must be that of prefix_k \(2, 80, 32\), of 1..512 columns, got \(2, 70, 32\)": lambda x: {"prefix_v": x["prefix_v"][:, :70]},
    r"prefix_v.shape .* got \(2, 80, 0\)": lambda x: {"prefix_v": x["prefix_v"][..., :0], "v": x["v"][..., :0]},
    r"prefix_k.shape must be of heads of 32 .* divide the 6 of q, got \(0, 80, 32\)": lambda x: {"prefix_k": x["prefix_k"][:0]},
    r"prefix_k.shape must be of heads of 32 .* divide the 5 of q": lambda x: {"q": x["q"][:, :5]},
    r"q.shape\[-1\] must be in 1..512, or 576, got 0": lambda x: {"q": x["q"][..., :0], "prefix_k": x["prefix_k"][..., :0]},
    "the page size must be a power of two": lambda x: {"prefix_k": PAGES[:, :, :9], "prefix_v": PAGES[:, :, :9], "prefix_table": ONE},
    "prefix_table.dtype must be int32": lambda x: {"prefix_k": PAGES, "prefix_v": PAGES, "prefix_table": ONE.long()},
    "block_table must be a torch.Tensor, got list": lambda x: {"block_table": [[0]]},
    "each sequence's own keys must be at least the 60 newest tokens, got 48": lambda x: {"q": x["q"].expand(-1, -1, 60, -1)},
    "out must be in memory of its own": lambda x: {"out": x["k"].view(-1)[: x["q"].numel()].view(x["q"].shape)},
}


@pytest.mark.parametrize("message", MISFITS)
def test_what_does_not_fit_is_refused_by_its_own_name_and_before_a_launch(message):
    """Errors named arguments of attention_decode, and the first launch was made."""
    inputs = dict(zip(("q", "prefix_k", "prefix_v", "k", "v"), drawn(), strict=True))
    with counted() as launches, pytest.raises((ValueError, TypeError), match=message):
        tilewright.cascade_decode(**inputs | MISFITS[message](inputs))
    assert not launches


def test_values_are_checked_by_their_own_names(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    inputs = drawn(q_len=3)
    own = torch.tensor([48, 5, 17], dtype=INT32)
    with pytest.raises(ValueError, match=r"prefix_len\[0\] must be in 0..80, got 81"):
        tilewright.cascade_decode(*inputs, own, prefix_len=ONE + 81)
    with pytest.raises(ValueError, match=r"kv_len\[1\] must be in 3..48, got 2"):  # of three new tokens
        tilewright.cascade_decode(*inputs, own - 3)
    with pytest.raises(ValueError, match=r"prefix_table\[1\] must be in 0..3, the pages of the cache, got 4"):
        tilewright.cascade_decode(inputs[0], PAGES, PAGES, *inputs[3:], own, prefix_table=torch.tensor([3, 4], dtype=INT32))
    tilewright.cascade_decode(inputs[0], PAGES, PAGES, *inputs[3:], own, prefix_table=torch.tensor([3, 4], dtype=INT32), prefix_len=ONE + 16)


def test_it_compiles_to_one_graph():
    with torch.inference_mode(False), torch.no_grad():
        inputs, how = drawn(), {"prefix_len": torch.tensor([70], dtype=INT32), "return_lse": True}
        found = torch.compile(tilewright.cascade_decode, fullgraph=True, backend="aot_eager")(*inputs, **how)
        assert all(map(torch.equal, found, tilewright.cascade_decode(*inputs, **how)))


def test_what_is_timed_finds_the_same_with_both_calls(monkeypatch) -> None:
    """The pages of the shared keys lie once, in all users' tables."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import cascade

    row = cascade.main(["--users", "2", "--prefix", "64", "--own", "70", "--q-heads", "4", "--kv-heads", "2", "--dim", "32"])
    assert row["difference"] < 0.01
