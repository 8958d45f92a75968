"""The megakernel: transformers' tokens from one launch a token, races watched; schedules, refusals,
the reference machine and the difference test.
"""

import re
import subprocess
import tempfile

import pytest
import torch
from test_engine import NEW, prompts, stock_tokens, tiny

from tilewright.compile import ResultCache, compile_launches, find_tool
from tilewright.compile.job import Job
from tilewright.engine import Engine, Sampling
from tilewright.engine.mega import Config, Dims, Kind, Schedule, phases
from tilewright.engine.mega.difftest import differences, program_of
from tilewright.engine.mega.pack import LayerStacks, Weights, refuse
from tilewright.engine.mega.program import MATRICES
from tilewright.engine.mega.reference import Machine, MissingDependency
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.engine.read import read
from tilewright.interpret import checking
from tilewright.launch import Device, counted, traced

SIZES = {"hidden_size": 64, "intermediate_size": 96}
SMALL = Config(tile=512, depth=2, span=8, tile_kv=8, merged=2, num_worker_warps=None)
LLAMA_1B = Dims(16, 2048, 32, 8, 64, 8192, 128256)
LLAMA_3B = Dims(28, 3072, 24, 8, 128, 8192, 128256)
SMOLLM = Dims(30, 576, 9, 3, 64, 1536, 49152)


def weights_of(model) -> Weights:
    refuse(model, Device.named("CPU"))
    stacks = LayerStacks.of(model)
    return Weights.of(read(model, stacks, 64, lambda *progress: None), stacks)


def clocks() -> Clocks:
    integers = torch.int64
    return Clocks(*(torch.zeros(n, dtype=t) for n, t in ((16, integers), ((2, 16), torch.int32), ((32, 16), integers), (2, integers))))


@pytest.mark.parametrize("changes", [{}, {"hidden_size": 96, "num_attention_heads": 6}, {"tie_word_embeddings": True}], ids=str)
def test_engine_writes_the_tokens_of_transformers_in_one_launch_a_token(changes: dict) -> None:
    model = tiny("llama", **(SIZES | changes))
    prompt = prompts()[1]
    expected = stock_tokens(model, prompt)
    with Engine(model, max_len=64, mode="mega") as engine, counted() as launches:
        engine.warm_up(1, len(prompt))
        launches.clear()
        assert engine.generate([prompt], NEW).tokens == [expected]
        assert launches["mega_kernel"] == NEW - 1
        assert launches["argmax_kernel"] == 1  # of the prompt
        assert engine.generate([prompt[:3]], NEW).tokens == [stock_tokens(model, prompt[:3])]
    assert stock_tokens(model, prompt) == expected


def test_logits_and_sampling_are_those_of_the_eager_engine() -> None:
    model = tiny("llama", **SIZES)
    given, sampling = [[7, 50, 3]], Sampling(temperature=0.8, top_k=20, seed=3)
    found = []
    for mode in ("eager", "mega"):
        with Engine(model, max_len=64, mode=mode) as engine:
            found.append((engine.logits(prompts()[:1], given), engine.generate(prompts()[:1], NEW, sampling=sampling).tokens))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize("blocks", [1, 5])
def test_any_number_of_blocks_in_any_order_races_for_nothing(blocks: int) -> None:
    model = tiny("llama", **SIZES)
    prompt = prompts()[1]
    expected = stock_tokens(model, prompt, 3)
    weights, where = weights_of(model), clocks()
    d = weights.dims
    cache = torch.zeros(2, d.layers, d.kv_heads, 64, d.head_dim)
    cache[1] = float("nan")
    step = Mega(weights, list(phases(d)), where, (cache[0], cache[1]), blocks=blocks, config=SMALL, spin_limit=1000)
    written = []
    with checking(races=True, order=blocks):
        for i in range(len(prompt) + 2):
            if i < len(prompt):
                where.tokens[0] = prompt[i]
            step.step()
            step.check()
            written.append(int(where.tokens[0]))
    assert written[len(prompt) - 1 :] == expected


def test_a_block_that_never_arrives_is_named() -> None:
    weights, where = weights_of(tiny("llama", **SIZES)), clocks()
    d = weights.dims
    cache = torch.zeros(2, d.layers, d.kv_heads, 64, d.head_dim)
    step = Mega(weights, list(phases(d)), where, (cache[0], cache[1]), blocks=2, config=SMALL, spin_limit=2000)
    step._arrived[0, 3] = -1  # as if one block fewer had come
    step.step()
    with pytest.raises(RuntimeError, match=r"block \d of 2 waited in vain for phase layers\.0\.gate_up"):
        step.check()
    where.counters.zero_()
    where.clock.zero_()
    step.step()
    step.check()


@pytest.mark.parametrize(("layers", "stop_after", "last"), [(0, "", "chosen logit"), (1, "gate_up", "layers.0.active"), (2, "qkv", "layers.1.qkv")])
def test_every_value_is_within_the_noise_band(layers: int, stop_after: str, last: str) -> None:
    weights, program = program_of(weights_of(tiny("llama", torch.bfloat16, **SIZES)), layers, stop_after)
    found = differences(weights, program, 21, blocks=3)
    assert found[-1].name == last
    assert {d.name: str(d.accuracy) for d in found if not d.accuracy.ok} == {}


def test_the_machine_misses_what_was_not_written() -> None:
    weights = weights_of(tiny("llama", **SIZES))
    d = weights.dims
    cache = torch.zeros(2, d.layers, d.kv_heads, 64, d.head_dim)
    program = [phase for phase in phases(d) if phase.kind is not Kind.GATE_UP]
    machine = Machine(weights, Schedule(d, 3, SMALL), 5, 9, (cache[0], cache[1]))
    with pytest.raises(MissingDependency, match=r"layers\.0\.active is read before it is written whole"):
        machine.run(program)


@pytest.mark.parametrize("dims", [LLAMA_1B, LLAMA_3B, SMOLLM], ids=["1b", "3b", "135m"])
@pytest.mark.parametrize("blocks", [132, 148, 48])
def test_a_schedule_deals_every_row_once(dims: Dims, blocks: int) -> None:
    schedule = Schedule(dims, blocks, Config())
    for kind in Kind:
        starts = schedule.starts(kind)
        assert len(starts) == blocks + 1
        assert (starts[0], starts[-1]) == (0, schedule.units(kind))
        assert starts == sorted(starts)
    for kind in MATRICES:
        rows, columns = dims.shape(kind)
        assert schedule.units(kind) * schedule.rows(kind) == rows
        end = 0
        for width, index in schedule.chunks(kind):
            assert width * index == end
            end += width
        assert end == columns
    assert 0 < schedule.balance() <= 1
    if dims is not SMOLLM:
        assert schedule.balance() > 0.9


def meta_weights(d: Dims) -> Weights:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layers = [meta(d.layers, *d.shape(kind)) for kind in MATRICES[:4]]
    rope = [meta(4096, d.head_dim // 2, dtype=torch.float32) for _ in range(2)]
    return Weights(d, meta(d.vocab, d.hidden), meta(2 * d.layers + 1, d.hidden), *layers, meta(1, d.vocab, d.hidden), *rope, 1e-5, 0.125)


INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);|^(\.L_\w+):", re.MULTILINE)


def loops_of_waits(sass: str) -> list[list[str]]:
    """The smallest loop around each instruction that reads what other blocks write, of those within
    300 instructions: a larger one is no wait.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for found in INSTRUCTION.finditer(sass):
        if found[2]:
            labels[found[2]] = len(code)
        else:
            code.append(found[1])
    jumps = [
        (labels[target[1]], i) for i, line in enumerate(code) if (target := re.search(r"\bBRA\S* .*`\((\.L_\w+)\)", line)) and target[1] in labels
    ]
    spans = set()
    for i, line in enumerate(code):
        if re.search(r"\bLDG\S*STRONG|\bATOMG", line):
            around = [(end - start, start, end) for start, end in jumps if start <= i <= end]
            spans |= {min(around)} if around and min(around)[0] < 300 else set()
    return [code[start : end + 1] for _, start, end in sorted(spans)]


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(find_tool("nvdisasm")), "-c", file.name], capture_output=True, text=True, check=True).stdout


def assert_blocks_leave_waits_together(cubin: bytes, waits: int) -> None:
    """A loop with a barrier must decide by what came through shared memory: of what they loaded
    themselves warps see different states, leave at different looks, and are at different barriers
    from then on.
    """
    loops = loops_of_waits(disassembled(cubin))
    assert len(loops) >= waits
    for loop in loops:
        looked = next(i for i, line in enumerate(loop) if re.search(r"\bLDG|\bATOMG", line))
        assert not any("BAR.SYNC" in line for line in loop) or any(re.search(r"\bLDS", line) for line in loop[looked:]), "\n".join(loop)


def test_blocks_leave_the_waits_of_phases_together() -> None:
    for limit in (0, 1000):
        assert_blocks_leave_waits_together(traced_job(LLAMA_1B, "H200", limit).build(), 7)


def traced_job(d: Dims, gpu: str, spin_limit: int = 0) -> Job:
    device = Device.named(gpu)
    cache = torch.empty(d.layers, d.kv_heads, 4096, d.head_dim, dtype=torch.bfloat16, device="meta")
    with traced(device) as launches:
        where = Clocks(*(tensor.to("meta") for tensor in (getattr(clocks(), name) for name in ("tokens", "counters", "recent", "clock"))))
        Mega(meta_weights(d), list(phases(d)), where, (cache, cache), spin_limit=spin_limit).step()
    return Job.of(launches[0], device.arch)


@pytest.mark.parametrize("gpu", ["H200", "GB10"])
def test_llama_1b_compiles_without_spills(gpu: str, tmp_path) -> None:
    device = Device.named(gpu)
    d = LLAMA_1B
    cache = torch.empty(d.layers, d.kv_heads, 4096, d.head_dim, dtype=torch.bfloat16, device="meta")
    with traced(device) as launches:
        where = Clocks(*(tensor.to("meta") for tensor in (getattr(clocks(), name) for name in ("tokens", "counters", "recent", "clock"))))
        Mega(meta_weights(d), list(phases(d)), where, (cache, cache)).step()
    (found,) = compile_launches([(launches[0], device.arch)], jobs=1, cache=ResultCache(tmp_path))
    assert found.error == ""
    assert found.ok
    assert found.resources.count("UTMALDG") == 0  # TMA would take half of the registers
    assert found.resources.count("LDG") > 100
    assert launches[0].launch.grid == (device.sms,)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi3", {}, "model.config.model_type must be one of llama"),
        ("llama-tied-bias", {}, "the model must be without biases"),
        ("qwen3", {}, "the model must be without norms of queries and keys"),
        ("mistral", {}, "model.config.sliding_window must be None"),
        ("llama", {"head_dim": 24}, "head_dim must be a power of two"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(name: str, changes: dict, message: str) -> None:
    model = tiny(name, **changes)
    before = {p: p.untyped_storage().data_ptr() for p in model.parameters()}
    with pytest.raises(ValueError, match=message):
        Engine(model, mode="mega")
    assert all(p.untyped_storage().data_ptr() == at for p, at in before.items())
    with pytest.raises(ValueError, match="max_batch must be 1"):
        Engine(model, mode="mega", max_batch=2)


def test_more_blocks_than_multiprocessors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(tiny("llama", **SIZES))
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: Device.named("H200")))
    with pytest.raises(ValueError, match="blocks must be 1 to 132"):
        Mega(weights, list(phases(weights.dims)), clocks(), (torch.zeros(1), torch.zeros(1)), blocks=133)


def test_weights_are_held_once() -> None:
    model = tiny("llama", **SIZES)
    before = sum(p.nbytes for p in model.parameters())
    with Engine(model, max_len=64, mode="mega"):
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(storages.values()) == before
    assert all(p.is_contiguous() for p in model.parameters())
