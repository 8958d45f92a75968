"""Peers without a GPU: what each library would be called with, and what counts as the same."""

import gc
import importlib
import inspect
import os
import types
import weakref

import pytest
import torch

from tilewright import ops
from tilewright.bench import flashinfer_calls, libraries, library_calls, linear_peers
from tilewright.bench.inputs import kept
from tilewright.bench.libraries import backend_of, library_peers, strays
from tilewright.bench.peers import peers_of
from tilewright.ops import (
    attention,
    attention_decode,
    bmm,
    gated_delta_rule,
    layer_norm,
    matmul,
    merge_states,
    mla,
    mla_decode,
    rms_norm,
    rope,
    silu_mul,
    softmax,
    ssd,
)
from tilewright.ops.common.scaling import Scaling
from tilewright.testing import op_name
from tilewright.testing.cases import cases


class Recorder:
    """A stand-in for a library and all that it returns. It records every call."""

    def __init__(self, path, noted):
        self._path, self._noted = path, noted

    def __getattr__(self, name):
        return Recorder((*self._path, name), self._noted)

    def __call__(self, *args, **kwargs):
        self._noted.append((self._path, args, kwargs))
        return Recorder((*self._path, "()"), self._noted)

    def __getitem__(self, index):
        return self

    def __iter__(self):
        return iter((self, self))


def bound(path, args, kwargs):
    """Whether the called function exists in the library and takes these arguments; False for calls
    on a result.
    """
    found = importlib.import_module(path[0])
    for name in path[1:]:
        if name != "()":
            found = getattr(found, name)
        elif not isinstance(found, type):
            return False
    method = "()" in path
    if path[-1] == "apply":  # of a torch.autograd.Function
        found, method = found.__self__.forward, True
    signature = inspect.signature(found)
    signature.bind(*([None] if method else []), *args, **{name: value for name, value in kwargs.items() if name != "backend"})
    named = {p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
    # TileGym's softmax and rms_norm pass options of their cuTile kernels as **kwargs.
    assert set(kwargs) <= named | {"backend", "use_chunked", "offset"} | set(FLASHINFER_PLAN), (path, set(kwargs) - named)
    return True


FLASHINFER_PLAN = ("q_data_type", "sm_scale", "q_len_per_req")  # of batch decode, through **kwargs
HALF = torch.bfloat16
PROBLEMS = {
    "rms_norm": (
        rms_norm.Problem(4, 64, HALF),
        rms_norm.Problem(4, 64, HALF, residual=True),
        rms_norm.Problem(4, 64, HALF, residual=True, weight_offset=1.0),
    ),
    "layer_norm": (layer_norm.Problem(4, 64, HALF),),
    "softmax": (softmax.Problem(4, 64, HALF), softmax.Problem(1, 32_768, HALF)),
    "silu_mul": (silu_mul.Problem(4, 64, HALF), silu_mul.Problem(4, 64, HALF, fused=True), silu_mul.Problem(4, 64, HALF, gelu_tanh=True)),
    "rope": (rope.Problem(2, 4, 2, 8, 64, HALF),),
    "matmul": (matmul.Problem(64, 64, 64, HALF), matmul.Problem(64, 128, 256, torch.float8_e4m3fn, trans_b=True, scaling=Scaling.BLOCK)),
    "bmm": (bmm.Problem(2, 64, 64, 64),),
    "attention": (
        attention.Problem(2, 4, 2, 32, 64, 64, HALF),
        attention.Problem(2, 4, 2, 32, 64, 64, HALF, has_len=True),
        attention.Problem(3, 4, 2, 32, 64, 64, HALF, varlen=True),
    ),
    "attention_decode": (
        attention_decode.Problem(2, 8, 2, 64, 64, HALF, has_len=False),
        attention_decode.Problem(2, 8, 8, 64, 64, HALF),
        attention_decode.Problem(2, 8, 2, 64, 64, HALF, page_size=16),
        attention_decode.Problem(2, 8, 2, 64, 64, HALF, q_len=2),
    ),
    "mla": (mla.Problem(2, 4, 32, 32, HALF), mla.Problem(2, 4, 32, 64, HALF, has_len=True)),
    "mla_decode": (mla_decode.Problem(2, 16, 64, HALF, has_len=False), mla_decode.Problem(2, 16, 64, HALF, page_size=16)),
    "merge_states": (merge_states.Problem(3, 8, 64, HALF, base2=True),),
    "gated_delta_rule": (
        gated_delta_rule.Problem(2, 1, 2, 70, 32, HALF),
        gated_delta_rule.Problem(2, 1, 2, 1, 32, HALF),
        gated_delta_rule.Problem(2, 1, 2, 70, 32, HALF, varlen=True, has_state=False),
    ),
    "ssd": (ssd.Problem(2, 2, 1, 70, 32, 16, HALF), ssd.Problem(2, 2, 1, 1, 32, 16, HALF, gate=True)),
}


def noted_calls(monkeypatch, library, op):
    """The calls of a peer's entry, over the problems of the op that it takes."""
    call, applies = libraries._CALLS[library, op]
    noted = []
    for file in (library_calls, flashinfer_calls, linear_peers):
        monkeypatch.setattr(file, "module", lambda name: Recorder((name,), noted))
    taken = 0
    for problem in PROBLEMS[op]:
        inputs = problem.inputs(torch.device("cpu"))
        if applies(inputs):
            taken += 1
            call(**inputs)
    assert taken, "it takes none of the op's problems"
    return noted


@pytest.mark.parametrize(("library", "op"), libraries._CALLS)
def test_each_call_takes_the_arguments_of_its_op_and_is_of_its_library(library, op, monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    noted = noted_calls(monkeypatch, library, op)
    assert {path[0].split(".")[0] for path, _, _ in noted} == {libraries.LIBRARIES[library]}
    if library == "tilegym":
        assert os.environ.pop("DISABLE_FALLBACK") == "1"
        assert all(kwargs["backend"] == "cutile" for path, _, kwargs in noted if "()" not in path)


@pytest.mark.parametrize(("library", "op"), libraries._CALLS)
def test_each_call_is_as_the_installed_library_declares_it(library, op, monkeypatch):
    pytest.importorskip(libraries.LIBRARIES[library])
    noted = noted_calls(monkeypatch, library, op)
    assert sum(bound(*each) for each in noted)


@pytest.mark.parametrize("op", ops.ALL, ids=op_name)
def test_every_case_knows_its_peers(op, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for problem in cases(op, "small"):
        found = peers_of(op_name(op), problem.inputs(torch.device("cpu")))
        assert len({peer.name for peer in found}) == len(found)


def test_other_libraries_are_peers_where_they_are_installed_and_compute_the_same(monkeypatch):
    monkeypatch.setattr(libraries, "_module", lambda name: types.ModuleType(name))

    def names(op, problem, device="meta"):
        return {peer.name for peer in library_peers(op_name(op), problem.inputs(torch.device(device)))}

    single = torch.float32
    assert names(rms_norm, rms_norm.Problem(4, 64, HALF)) == {"tilegym", "liger", "flashinfer", "quack"}
    assert names(rms_norm, rms_norm.Problem(4, 64, HALF, residual=True)) == {"liger", "flashinfer", "quack"}
    assert names(rms_norm, rms_norm.Problem(4, 64, HALF, round_before_weight=True)) == {"liger"}
    assert names(layer_norm, layer_norm.Problem(4, 64, torch.float16)) == {"tilegym", "liger", "quack"}
    assert names(layer_norm, layer_norm.Problem(4, 64, HALF, weight=False)) == set()
    assert names(matmul, matmul.Problem(64, 64, 64, HALF)) == {"tilegym"}
    assert names(matmul, matmul.Problem(64, 64, 64, single)) == set(), "TileGym's fp32 product is TF32"
    assert names(matmul, matmul.Problem(64, 64, 64, HALF, bias=True)) == set()
    assert names(matmul, PROBLEMS["matmul"][1]) == {"deepgemm"}
    assert names(bmm, bmm.Problem(2, 64, 64, 64)) == {"tilegym"}
    assert names(bmm, bmm.Problem(2, 64, 64, 64, one_b=True)) == set()
    assert names(bmm, bmm.Problem(2, 64, 64, 64, out_dtype=single)) == set()
    assert names(rope, rope.Problem(2, 4, 2, 8, 64, HALF)) == {"tilegym", "liger", "flashinfer"}
    assert names(rope, rope.Problem(2, 4, 2, 8, 64, HALF, heads_inside=False)) == set(), "Liger would copy"
    assert names(rope, rope.Problem(2, 4, 2, 8, 64, HALF, interleaved=True)) == {"flashinfer"}
    assert names(rope, rope.Problem(2, 4, 2, 8, 64, HALF, rotary_dim=32)) == {"liger", "flashinfer"}
    assert names(attention, attention.Problem(2, 4, 2, 64, 64, 64, HALF)) == {"tilegym", "flashinfer"}
    assert names(attention, attention.Problem(2, 4, 2, 64, 64, 80, HALF)) == set()
    assert names(attention, attention.Problem(1, 4, 2, 64, 64, 64, HALF, window=16)) == set()
    assert names(attention, attention.Problem(1, 4, 2, 64, 64, 64, HALF, has_len=True), "cpu") == {"tilegym", "flashinfer"}
    assert names(attention, attention.Problem(2, 4, 2, 64, 64, 64, HALF, has_len=True), "cpu") == {"flashinfer"}, "TileGym knows no lengths"
    for change, found in (
        ({}, {"flashinfer"}),
        ({"has_len": False}, {"tilegym", "flashinfer"}),
        ({"sinks": True}, set()),
        ({"normalize": False}, set()),
    ):
        assert names(attention_decode, attention_decode.Problem(2, 8, 2, 64, 64, HALF, **change), "cpu") == found
    assert names(mla_decode, mla_decode.Problem(1, 16, 64, HALF), "cpu") == {"tilegym", "flashinfer"}
    assert names(mla_decode, mla_decode.Problem(1, 16, 64, HALF, latent=256), "cpu") == {"tilegym"}
    assert names(merge_states, merge_states.Problem(3, 8, 64, HALF)) == set(), "FlashInfer's logarithms are to base 2"


def test_what_is_made_once_lives_as_long_as_its_tensor():
    made = []
    make = kept(lambda x: made.append(x.shape) or x.clone())
    x = torch.ones(3)
    assert make(x) is make(x)
    y = torch.ones(3)
    assert make(y) is not make(x), "by identity, not by value"
    assert len(made) == 2
    gone = weakref.ref(make(y))
    del y
    gc.collect()
    assert gone() is None


def test_a_cache_without_pages_is_seen_as_pages():
    cache = torch.randn(3, 2, 64, 8)
    pages = flashinfer_calls._as_pages(cache)
    lengths = [64, 0, 17]
    starts, numbers, last = flashinfer_calls._pages_of(lengths, *flashinfer_calls._paged(None, 3, 64, 2)[::2])
    assert starts.tolist() == [0, 4, 4, 6]
    assert last.tolist() == [16, 0, 1]
    for sequence, length in enumerate(lengths):
        mine = numbers[starts[sequence] : starts[sequence + 1]].long()
        assert pages[mine].transpose(0, 1).flatten(1, 2)[:, :length].equal(cache[sequence, :, :length])


def test_no_library_is_no_peer():
    assert library_peers("rms_norm", {}) == []
    assert backend_of("torch.eager") == f"torch {torch.__version__}"
    assert backend_of("cudnn").startswith("cuDNN")


def test_a_result_that_is_not_ours_is_told():
    a = torch.randn(64, 64)
    assert strays([a], [a + 0.01 * torch.randn(64, 64)]) == ""
    assert "away from ours" in strays([a], [a.tril()])
    assert "away from ours" in strays([a], [torch.full_like(a, torch.nan)])
    assert "shape (64, 63)" in strays([a], [a[:, 1:]])
    assert "float16" in strays([a], [a.half()])
