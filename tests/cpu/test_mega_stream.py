"""The megakernel's stream: transformers' tokens, races watched; every value in the noise band;
dealing, refusals, and what the SASS must hold.
"""

import re
from dataclasses import replace

import pytest
import torch
from test_engine import NEW, prompts, stock_tokens, tiny
from test_mega import LLAMA_1B, LLAMA_3B, SMOLLM, assert_blocks_leave_waits_together, clocks, disassembled, weights_of

from tilewright.compile.disassemble import disassemble, usage
from tilewright.compile.job import Job
from tilewright.engine import Engine
from tilewright.engine.mega import Dims, Kind, phases
from tilewright.engine.mega.difftest import differences, program_of, scheduled
from tilewright.engine.mega.pack import Weights, one_stream
from tilewright.engine.mega.program import MATRICES, Phase
from tilewright.engine.mega.reference import MissingDependency
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.engine.mega.stream import StreamMega, mega_of, why_not
from tilewright.engine.mega.stream_reference import Deadlock, StreamMachine
from tilewright.engine.mega.stream_schedule import StreamConfig, StreamSchedule, Work, default_stream_config
from tilewright.interpret import checking
from tilewright.launch import Device, counted, traced

SIZES = {"hidden_size": 64, "intermediate_size": 128}
SMALL = StreamConfig(splits=4, span=4, tile_kv=4, tile_long=2, ahead=2, num_worker_warps=None)


def cache_of(d: Dims, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (d.layers, d.kv_heads, 64, d.head_dim)
    return torch.zeros(shape, dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)


def test_many_tokens_a_launch_in_any_order_race_for_nothing() -> None:
    model = tiny("llama", **SIZES, num_hidden_layers=1)
    prompt = prompts()[1][:3]
    expected = stock_tokens(model, prompt, 4)
    weights, where = weights_of(model), clocks()
    step = StreamMega(weights, list(phases(weights.dims)), where, cache_of(weights.dims), blocks=7, config=SMALL, spin_limit=3000)
    with checking(races=True, order=3):
        for token in prompt:
            where.tokens[0] = token
            step.step()
        step.step(3)  # across the end of a range of keys: two of them are merged
        step.check()
    assert where.recent[len(prompt) - 1 : len(prompt) + 3, 0].tolist() == expected
    assert where.counters[:, 0].tolist() == [len(prompt) + 3] * 2
    assert where.clock.tolist() == [len(prompt) + 3] * 2


def test_engine_takes_the_stream_where_the_model_fits_and_holds_weights_once() -> None:
    model = tiny("llama", **SIZES, tie_word_embeddings=True)
    prompt = prompts()[1]
    expected, before = stock_tokens(model, prompt), sum(p.nbytes for p in model.parameters())
    with Engine(model, max_len=64, mode="mega", check_every=4) as engine, counted() as launches:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(storages.values()) == before
        engine.warm_up(1, len(prompt))
        launches.clear()
        found = engine.generate([prompt], NEW)
    assert found.tokens == [expected]
    assert len(found.step_s) == NEW - 1
    assert launches["mega_stream_kernel"] == -(-NEW // 4)  # one between two looks of the host
    assert stock_tokens(model, prompt) == expected


@pytest.mark.parametrize(("stop_after", "layers"), [("", 0), ("attention", 1)])
def test_every_value_is_within_the_noise_band(stop_after: str, layers: int) -> None:
    weights, program = program_of(weights_of(tiny("llama", torch.bfloat16, **SIZES)), layers, stop_after)
    found = differences(weights, program, 21, blocks=7, config=SMALL)
    assert len(found) == (2 if stop_after else 14)  # of a layer qkv, attention, middle, active, stream; logits, what was appended, what was chosen
    assert {d.name: str(d.accuracy) for d in found if not d.accuracy.ok} == {}


def test_a_block_that_waits_in_vain_is_named() -> None:
    weights, where = weights_of(tiny("llama", **SIZES)), clocks()
    step = StreamMega(weights, list(phases(weights.dims)), where, cache_of(weights.dims), blocks=2, config=SMALL, spin_limit=200)
    step._epoch[0] = 5  # as if block 1 were tokens behind
    step.step()
    with pytest.raises(RuntimeError, match=r"block \d of 2 waited in vain for phase layers\.0\.(qkv|attention)"):
        step.check()


def test_more_blocks_than_multiprocessors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(tiny("llama", **SIZES))
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: Device.named("H200")))
    with pytest.raises(ValueError, match="blocks must be 1 to 132"):
        StreamMega(weights, list(phases(weights.dims)), clocks(), cache_of(weights.dims), blocks=133)


def test_what_is_no_stream_runs_phase_by_phase() -> None:
    weights = weights_of(tiny("llama", hidden_size=64, intermediate_size=96))
    where, cache = clocks(), cache_of(weights.dims)
    assert isinstance(mega_of(weights, list(phases(weights.dims)), where, cache, blocks=1), Mega)
    with pytest.raises(ValueError, match="the model's sizes must be those of one stream of weights, got inter is no power of two"):
        mega_of(weights, list(phases(weights.dims)), where, cache, blocks=1, config=SMALL)
    assert why_not(LLAMA_1B, torch.bfloat16, StreamConfig()) == ""
    assert all(why_not(dims, torch.bfloat16, StreamConfig()) for dims in (LLAMA_3B, SMOLLM))
    narrow = Dims(2, 256, 4, 2, 64, 1024, 32768)
    assert "fewer than 256 threads" in why_not(narrow, torch.bfloat16, StreamConfig())
    assert why_not(narrow, torch.bfloat16, StreamConfig(num_worker_warps=4)) == ""
    assert "2 pieces that are read at once" in why_not(LLAMA_1B, torch.float32, StreamConfig(rows=4))


@pytest.mark.parametrize(("gpu", "blocks"), [("H200", 132), ("GB10", 48)])
def test_tiles_are_dealt_evenly(gpu: str, blocks: int) -> None:
    schedule = StreamSchedule(LLAMA_1B, blocks, default_stream_config(Device.named(gpu)))
    assert schedule.size * schedule.config.rows * LLAMA_1B.hidden == sum(
        (1 if kind is Kind.HEAD else 16) * rows * columns for kind in MATRICES for rows, columns in [LLAMA_1B.shape(kind)]
    )
    assert schedule.balance() >= 0.99
    small = StreamSchedule(replace(LLAMA_1B, q_heads=2, kv_heads=2, head_dim=16), blocks, schedule.config)
    assert small.slices <= 8 < small.splits


def test_keys_behind_all_ranges_go_round_by_the_tiles_that_long_ranges_are_read_in() -> None:
    schedule = StreamSchedule(LLAMA_1B, 132, StreamConfig(span=64, tile_kv=32, tile_long=16))
    assert schedule.splits == 16
    assert [schedule.range_of(p) for p in (0, 63, 64, 1023)] == [0, 0, 1, 15]
    assert [schedule.range_of(p) for p in (1024, 1039, 1040, 1056, 1024 + 256)] == [0, 0, 1, 2, 0]


@pytest.mark.parametrize("position", [70, 4000])
def test_the_machine_runs_the_schedule_of_48_multiprocessors(position: int) -> None:
    """Llama-3.2-1B's sizes but for layers and vocabulary: no block waits in vain, no word is
    overwritten, who reads a key has written it.
    """
    d = replace(LLAMA_1B, layers=1, vocab=4096)
    whole, bases, parts = one_stream(d, torch.empty(0, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    whole.copy_(torch.randn(64, d.hidden, generator=generator).repeat(len(whole) // 64 + 1, 1)[: len(whole)] * d.hidden**-0.5)
    angles = torch.randn(position + 2, d.head_dim // 2, generator=generator)
    norms = torch.ones(3, d.hidden, dtype=torch.bfloat16)
    stacks = [parts[kind] for kind in MATRICES]
    weights = Weights(d, parts[Kind.HEAD][0], norms, *stacks, angles.cos(), angles.sin(), 1e-5, 0.125, whole, bases)
    machine = scheduled(weights, list(phases(d)), Device.named("GB10"), position, 2)
    assert len(machine.tokens) == 2
    assert len(machine._appended) == 2 * d.kv_heads
    assert StreamSchedule(LLAMA_1B, 48, machine.schedule.config).balance() >= 0.99


def test_the_machine_finds_what_a_schedule_forgets_or_has_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(tiny("llama", **SIZES))
    program = list(phases(weights.dims))
    schedule = StreamSchedule(weights.dims, 3, SMALL)

    def machine() -> StreamMachine:
        return StreamMachine(weights, schedule, 5, 9, cache_of(weights.dims), order=1)

    with pytest.raises(MissingDependency, match=r"waits for layers\.0\.active, which no phase writes"):
        machine().run([phase for phase in program if phase.kind is not Kind.GATE_UP])
    queue = StreamSchedule.queue

    def late(self: StreamSchedule, block: int, program: list[Phase]) -> list[Work]:
        """Block 1 reads its first `out` before it has attended."""
        works = list(queue(self, block, program))
        if block == 1:
            first = next(i for i, work in enumerate(works) if work.kind is Kind.OUT)
            works.insert(0, works.pop(first))
        return works

    monkeypatch.setattr(StreamSchedule, "queue", late)
    with pytest.raises(Deadlock, match="3 of 3 blocks wait for each other"):
        machine().run(program)


def traced_job(gpu: str, spin_limit: int = 0) -> Job:
    device, d = Device.named(gpu), LLAMA_1B

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    whole, bases, parts = one_stream(d, meta(1))
    rope = [meta(16384, d.head_dim // 2, dtype=torch.float32) for _ in range(2)]
    weights = Weights(d, parts[Kind.HEAD][0], meta(33, d.hidden), *(parts[kind] for kind in MATRICES), *rope, 1e-5, 0.125, whole, bases)
    where = Clocks(*(tensor.to("meta") for tensor in (getattr(clocks(), name) for name in ("tokens", "counters", "recent", "clock"))))
    cache = meta(d.layers, d.kv_heads, 16384, d.head_dim)
    with traced(device) as launches:
        StreamMega(weights, list(phases(d)), where, (cache, cache), spin_limit=spin_limit).step()
    return Job.of(launches[0], device.arch)


@pytest.mark.parametrize("gpu", ["GB10", "B200", "B300"])
def test_llama_1b_compiles_without_spills(gpu: str) -> None:
    found = usage(traced_job(gpu).build())
    assert not found.spills
    assert found.shared_bytes >= (48 << 10 if gpu == "GB10" else 160 << 10)


def test_the_binary_holds_what_the_design_relies_on() -> None:
    cubin = traced_job("H200").build()
    found = disassemble(cubin)
    assert not found.spills  # a value that is spilled comes back behind the weights that are under way
    assert 160 << 10 <= found.shared_bytes <= 227 << 10  # weights under way: 4.4 TB/s need 40 KB a multiprocessor, a phase's wait three times that
    assert_blocks_leave_waits_together(cubin, 5)
    sass = disassembled(cubin)
    assert not re.search(r"\bCCTL", sass)  # an acquire would wait for all loads
    assert not re.search(r"MEMBAR\S*\.GPU", sass)  # a release would hold the producer up
    # A full and an empty one for each buffer: with a single buffer nothing is read while it is
    # multiplied.
    assert len(re.findall(r"SYNCS\.EXCH", sass)) >= 2 * 3
    # The consumers wait for a full buffer and the producer for an empty one, each with a slow path:
    # for nothing else of each other's.
    assert len(re.findall(r"PHASECHK\.TRANS64\.TRYWAIT", sass)) == 4
    assert sass.count("UTMALDG") <= 4  # the loop is there once
    lines = sass.splitlines()
    loop = next(i for i, line in enumerate(lines) if "PHASECHK" in line)
    last = next(i for i in range(loop, len(lines)) if "STRONG" in lines[i] and "STG" in lines[i])
    products = [i for i in range(loop, last) if "FFMA" in lines[i]]
    # Two pieces of 8 strips: 64 products of a thread each, and no predicates that go round through
    # the stages of the ring (twice the time, H200).
    assert len(products) <= 140
    assert products[-1] - loop <= 260
    assert sum("BAR.SYNC" in line for line in lines[loop:last]) <= 4  # what comes of a turn: one sum over its warps
    # Keys and the next norm's weights, late behind the weights under way, are asked for before the
    # product of a turn, not where they are needed.
    assert sum(bool(re.search(r"\bLDG\.E\.128 ", line)) for line in lines[loop - 200 : loop]) >= 12
    # A block waits by an atomic, one word of its own, before all threads look.
    assert 2 <= sum("ATOMG" in line for line in lines) <= 8
    assert_blocks_leave_waits_together(traced_job("H200", spin_limit=1000).build(), 5)
    producer = sass[sass.rindex("USETMAXREG.DEALLOC", 0, sass.index("UTMALDG")) : sass.rindex("UTMALDG")]
    assert "STRONG" not in producer  # it waits for nobody's words
    assert not re.search(r"\bLDG", producer)
