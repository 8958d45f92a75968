"""The megakernel: transformers' tokens, races watched; every value in the noise band; the reference
machine with faults; packing, refusals, and what the SASS must hold.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import fields, replace

import binaries
import pytest
import torch
from engine_models import NEW, prompts, stock_tokens, tiny
from transformers import AutoConfig

from tilewright.compile import find_tool
from tilewright.compile.disassemble import usage
from tilewright.compile.job import Job
from tilewright.engine import Engine, Sampling, keep_modes
from tilewright.engine.keep_modes import KEPT, keep
from tilewright.engine.mega import Config, Dims, Schedule, resources
from tilewright.engine.mega.difftest import differences, scheduled
from tilewright.engine.mega.pack import Weights, dims_of_config, inner_columns, pack, packed_bytes, refuse
from tilewright.engine.mega.reference import Corrupt, Deadlock, Faults, Machine
from tilewright.engine.mega.resources import launch_of
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.engine.mega.shape import ROWS, layout_of, placed, schedule_of
from tilewright.engine.modes import faster, rows
from tilewright.engine.read import read
from tilewright.engine.weights import Fusion
from tilewright.interpret import checking
from tilewright.launch import Device, counted
from tilewright.models.configs import CONFIGS
from tilewright.models.quantized import quantize

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
ODD = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 160}
SMALL = Config(strips=2, line=16, parts=2, span=4, short=8)
LLAMA_1B = Dims(16, 2048, 32, 8, 64, 8192, 128256)
RUN = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-0.6B", "Qwen3-8B", "SmolLM2-135M")
MODELS = {
    **{name: dims_of_config(AutoConfig.for_model(**CONFIGS[name])) for name in RUN},
    "Mistral-7B": Dims(32, 4096, 32, 8, 128, 14336, 32768),
    "Qwen3-1.7B": Dims(28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": Dims(36, 2560, 32, 8, 128, 9728, 151936, True),
    "SmolLM2-360M": Dims(32, 960, 15, 5, 64, 2560, 49152),
}
BF16 = torch.bfloat16


def weights_of(model) -> Weights:
    return Weights.of(read(model, Fusion(), 64, lambda *progress: None))


@pytest.fixture(scope="module")
def small():
    """A model, and its weights; nothing writes to them."""
    model = tiny("llama", BF16, **SIZES)
    return model, weights_of(model)


def clocks() -> Clocks:
    return Clocks.at(0, 0, 32, torch.device("cpu"))


def cache_of(d: Dims, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (d.layers, d.kv_heads, 64, d.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize(
    ("family", "changes", "tokens", "blocks", "dtype"),
    [
        ("llama", {}, 6, 9, BF16),
        ("qwen3", {}, 3, 5, torch.float16),
        ("llama", ODD, 4, 9, BF16),  # no prompt behind which two tokens tie
    ],
    ids=["llama", "head norms, fp16", "odd sizes"],
)
def test_many_tokens_a_launch_in_any_order_race_for_nothing(family: str, changes: dict, tokens: int, blocks: int, dtype: torch.dtype) -> None:
    model = tiny(family, dtype, **(SIZES | changes))
    prompt = prompts()[1][:tokens]
    expected = stock_tokens(model, prompt, 4)
    weights, where = weights_of(model), clocks()
    step = Mega(weights, where, cache_of(weights.dims, dtype), blocks=blocks, config=SMALL, spin_limit=3000)
    assert step.schedule.splits(8) == (family == "llama" and not changes)
    with checking(races=True, order=blocks):
        for token in prompt:
            where.tokens[0] = token
            step.step()
        step.step(3)  # of the first of these families, the last splits the keys
        step.check()
    assert where.recent[len(prompt) - 1 : len(prompt) + 3, 0].tolist() == expected
    assert where.counters[:, 0].tolist() == [len(prompt) + 3] * 2
    assert where.clock.tolist() == [len(prompt) + 3] * 2


def test_engine_writes_the_tokens_of_transformers_in_few_launches() -> None:
    model = tiny("llama", BF16, **SIZES, tie_word_embeddings=True)
    prompt = prompts()[1]
    expected = stock_tokens(model, prompt)
    with Engine(model, max_len=64, mode="mega", check_every=4) as engine, counted() as launches:
        engine.warm_up(1, len(prompt))
        launches.clear()
        found = engine.generate([prompt], NEW)
        assert engine._programs.megas[0].packed.tiles.nbytes == packed_bytes(model.config, Device.named("CPU"), False)
    assert found.tokens == [expected]
    assert len(found.step_s) == NEW - 1
    assert launches["mega_kernel"] == -(-NEW // 4)  # one between two looks of the host
    assert stock_tokens(model, prompt) == expected


def test_logits_and_sampling_are_those_of_the_eager_engine(small) -> None:
    given, sampling = [[7, 50, 3]], Sampling(temperature=0.8, top_k=20, seed=3)
    found = []
    for mode in ("eager", "mega"):
        with Engine(small[0], max_len=64, mode=mode) as engine:
            found.append((engine.logits(prompts()[:1], given).float(), engine.generate(prompts()[:1], 3, sampling=sampling).tokens))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2**-6, atol=2**-6)
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize(("position", "changes", "small"), [(0, {}, False), (21, {}, False), (61, {}, False), (21, ODD, True)])
def test_every_value_is_within_the_noise_band(position: int, changes: dict, small: bool) -> None:
    model = tiny("llama", BF16, **(SIZES | {"num_hidden_layers": 2} | changes))
    if small:
        quantize(model, "e4m3")
        model.model.norm.weight.data.exp2_().mul_(2.0**60)  # x of the head, whose products in fp16 need a unit
    found = differences(weights_of(model), position, blocks=9, config=replace(SMALL, pairs=1 + small))
    assert len(found) == 10  # of a layer qkv, out, down; logits, what was appended, what was chosen
    assert {d.name: str(d.accuracy) for d in found if not d.accuracy.ok} == {}


def test_a_block_that_waits_in_vain_is_named(small) -> None:
    step = Mega(small[1], clocks(), cache_of(small[1].dims), blocks=5, config=SMALL, spin_limit=200)
    step._epoch[0] = 6  # as if block 0 were ahead
    step.step()
    with pytest.raises(RuntimeError, match=r"block \d of 5 gave up waiting for qkv of layer 0"):
        step.check()
    step.clocks.counters.zero_()
    step.clocks.clock.zero_()
    step.step()
    step.check()


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_sum_beyond_its_range_is_an_error(small, tokens: int) -> None:
    weights = replace(small[1], out=tuple(1e5 * matrix for matrix in small[1].out))
    step = Mega(weights, clocks(), cache_of(weights.dims), blocks=5, config=SMALL, spin_limit=200)
    step.step(tokens)
    with pytest.raises(ValueError, match="may have left the fixed point's range of 1024"):
        step.check()


def test_a_nan_of_one_output_is_an_error(small) -> None:
    """Fixed point has none: it would count as 0."""
    matrix = small[1].out[0].clone()
    matrix[-1] = torch.nan
    weights = replace(small[1], out=(matrix, *small[1].out[1:]))
    step = Mega(weights, clocks(), cache_of(weights.dims), blocks=5, config=SMALL, spin_limit=200)
    step.step()
    with pytest.raises(ValueError, match="may have left the fixed point's range of 1024"):
        step.check()


def test_more_blocks_than_multiprocessors_are_refused(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: Device.named("H200")))
    with pytest.raises(ValueError, match="blocks must be 1 to 132"):
        Mega(small[1], clocks(), cache_of(small[1].dims), blocks=133)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi3", {}, "model.config.model_type must be one of llama, mistral, qwen3 with"),
        ("llama-tied-bias", {}, "the model must be without biases"),
        ("mistral", {}, "model.config.sliding_window must be None"),
        ("llama", {"head_dim": 24}, "head_dim must be a power of two"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(name: str, changes: dict, message: str) -> None:
    model = tiny(name, BF16, **changes)
    before = {p: p.untyped_storage().data_ptr() for p in model.parameters()}
    with pytest.raises(ValueError, match=message):
        Engine(model, mode="mega")
    assert all(p.untyped_storage().data_ptr() == at for p, at in before.items())
    with pytest.raises(ValueError, match=message):
        refuse(model.config, Device.named("H200"), BF16)  # the config alone tells
    with pytest.raises(ValueError, match="max_batch must be 1"):
        Engine(model, mode="mega", max_batch=2)
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16"):
        refuse(tiny("llama").config, Device.named("H200"), torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 512}, "head_dim must be a power of two from 16 to 256, got 512"),
        ({"num_attention_heads": 64}, "64 query heads are more than 48"),
    ],
)
def test_sizes_of_no_schedule_are_refused_too(changes: dict, message: str) -> None:
    config = AutoConfig.for_model(**CONFIGS["Llama-3.2-1B"] | changes)
    with pytest.raises(ValueError, match=message):
        refuse(config, Device.named("GB10"), BF16)


def test_auto_takes_what_was_the_faster_one(small, tmp_path) -> None:
    config, device, table = small[0].config, Device.named("H200"), tmp_path / "modes.jsonl"
    sizes = {f.name: getattr(dims_of_config(config), f.name) for f in fields(Dims)}

    def measured(**us: tuple[float, float]) -> None:
        """us: of keys, in "graph" and "mega"."""
        some = {"op": "decode", "gpu": "H200", "dtype": "bfloat16", "sizes": sizes, "date": "", "clocks": "", "more": 1}
        lines = [
            some | {"mode": mode, "keys": int(keys[1:]), "time_us": t}
            for keys, both in us.items()
            for mode, t in zip(("graph", "mega"), both, strict=True)
        ]
        (tmp_path / "suite.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, some | {"mode": "eager"})))
        assert keep(tmp_path / "suite.jsonl", table) == len(lines)

    def chosen(max_len: int = 4096, dtype: torch.dtype = BF16) -> str:
        return faster(config, device, dtype, max_len, rows(table))

    assert chosen() == "graph"  # nothing was measured
    measured(k96=(880.0, 760.0))
    assert chosen(max_len=3072) == "mega"
    assert chosen() == "graph"  # nothing was measured near so many keys
    measured(k96=(880.0, 760.0), k8192=(1000.0, 1100.0))
    assert chosen() == "mega"
    assert chosen(max_len=8192) == "graph"
    assert chosen(dtype=torch.float16) == "graph"
    assert faster(config, device, BF16, 4096, rows(table), "e4m3") == "graph"
    assert faster(config, device, BF16, 4096, [row | {"weights": "e4m3"} for row in rows(table)], "e4m3") == "mega"
    assert faster(small[0].config, Device.named("B200"), BF16, 4096, rows(table)) == "graph"
    measured(k96=(740.0, 760.0))  # replaces its rows alone
    assert chosen() == "graph"
    assert len(rows(table)) == 4
    with Engine(small[0], max_len=64, mode="auto") as engine:
        assert engine.mode == "eager"  # on a CPU


def test_what_auto_goes_by_is_stored_without_a_warning(tmp_path, monkeypatch, capsys) -> None:
    file, table = tmp_path / "suite.jsonl", tmp_path / "modes.jsonl"
    row = {"op": "decode", **dict.fromkeys(KEPT, 1), "mode": "mega"}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"mode": "eager"}) + "\n")
    command = (sys.executable, "-W", "error", "-m", "tilewright.engine.keep_modes", file, "--to", table)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"1 rows now in {table}\n", "")
    file.write_text("")
    for name, message in ((tmp_path / "none", "file must exist, got "), (file, "file must hold rows ")):
        monkeypatch.setattr(sys, "argv", ["keep_modes", str(name), "--to", str(table)])
        with pytest.raises(SystemExit):
            keep_modes.main()
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("blocks", [5, 9])
def test_every_element_is_packed_once(small, blocks: int) -> None:
    schedule = Schedule(small[1].dims, blocks, SMALL)
    numbered, start = {}, 1
    for name in ("qkv", "out", "gate_up", "down"):
        (matrix,) = getattr(small[1], name)
        numbered[name] = (torch.arange(start, start + matrix.numel()).to(torch.int16).view(matrix.shape).view(BF16),)
        start += matrix.numel()
    head = torch.arange(start, start + small[1].head.numel()).to(torch.int16).view(small[1].head.shape).view(BF16)
    assert start + head.numel() < 2**16
    tiles = pack(replace(small[1], head=head, **numbered), schedule).tiles
    found = tiles.view(torch.int16).flatten().to(torch.int64) & 65535
    assert found.count_nonzero() == start + head.numel() - 1
    assert len(found[found > 0].unique()) == start + head.numel() - 1
    assert len(tiles) == schedule.size * ROWS * SMALL.strips
    s, placed_tiles = layout_of(schedule.numbers()), list[int]()
    for block in range(blocks):
        for turn in range(s.layers * s.layer_turns + s.turns[4]):
            *_, groups, sets, first = placed(s, turn, block)
            placed_tiles += range(first, first + groups * sets)
    assert sorted(placed_tiles) == list(range(schedule.size)), "and read once"
    columns = torch.cat([of_class.flatten() for of_class in inner_columns(schedule, torch.device("cpu"))])
    assert sorted(columns[columns < 128].tolist()) == list(range(128))


SMS = (132, 148, 160, 48, 170)
DEALT = [(name, SMS[(i + more) % len(SMS)]) for i, name in enumerate(MODELS) for more in (range(5) if name == "Llama-3.2-1B" else (0, 2))]


@pytest.mark.parametrize(("name", "sms"), DEALT)
def test_every_row_is_dealt_once(name: str, sms: int) -> None:
    d, device = MODELS[name], replace(Device.named({48: "GB10", 170: "RTX5090"}.get(sms, "H200")), sms=sms)
    schedule = schedule_of(d, device)
    assert schedule.down_sets <= 7
    every = range(schedule.blocks)
    assert [row for block in every for row in schedule.qkv(block)] == list(range(schedule.qkv_rows))
    assert [row for block in every for row in schedule.head(block)] == list(range(d.vocab))
    assert [column for block in every for column in schedule.inner(block)] == list(range(d.inter))
    shares = [share for block in every if (share := schedule.outputs(block))]
    assert [output for head, outputs in shares if head == 0 for output in outputs] == list(range(d.hidden))
    assert {head for head, _ in shares} == set(range(d.q_heads))
    assert [word for block in every for word in schedule.owned(block)] == list(range(schedule.hidden_words))
    if name == "Llama-3.2-1B":
        assert schedule.balance() >= 0.97


@pytest.mark.parametrize("position", [7, 30])
def test_late_and_repeated_words_change_nothing_and_lost_ones_are_found(position: int) -> None:
    weights = weights_of(tiny("llama", BF16, **(SIZES | {"num_hidden_layers": 2})))
    schedule = Schedule(weights.dims, 9, SMALL)

    def run(faults: Faults, order: int | None = 1) -> list[int]:
        machine = Machine(weights, schedule, 5, position, tuple(torch.zeros(2, 2, 64, 16, dtype=BF16) for _ in range(2)), order=order, faults=faults)
        machine.run(3)
        return machine.tokens

    expected = run(Faults(), None)
    for order in range(3):
        assert run(Faults(late=0.4, twice=0.3), order) == expected
    for lost in ("layers.0.qkv", "layers.1.out.1", "layers.0.down.0", "best"):
        with pytest.raises(Deadlock, match=f"of 9 blocks wait for .*{lost}"):
            run(Faults(lost=lost))
    with pytest.raises(Corrupt, match=r"layers\.1\.out\.1 has 5 terms of 4"):
        run(Faults(doubled="layers.1.out.1"))


def test_the_machine_finds_a_key_that_another_block_wrote(small, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(small[1], Schedule(small[1].dims, 9, SMALL), 5, 9, tuple(torch.zeros(1, 2, 64, 16, dtype=BF16) for _ in range(2)))
    machine._appended[0, 0, 4] = {99}
    with pytest.raises(RuntimeError, match="reads a key of layer 0 that only other blocks have written"):
        machine.run()


@pytest.mark.parametrize("position", [70, 1000])
def test_the_machine_runs_the_schedule_of_48_multiprocessors(position: int) -> None:
    """Llama-3.2-1B's sizes but for layers and vocabulary."""
    d = replace(LLAMA_1B, layers=1, vocab=4096)
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        part = torch.randn(64, columns, generator=generator, dtype=torch.float32) * columns**-0.5
        return part.to(BF16).repeat(-(-rows // 64), 1)[:rows]

    angles = torch.randn(position + 2, d.head_dim // 2, generator=generator)
    matrices = ((draw(3072, 2048),), (draw(2048, 2048),), (draw(16384, 2048),), (draw(2048, 8192),))
    embedding = draw(d.vocab, d.hidden)
    weights = Weights(d, embedding, torch.ones(3, d.hidden, dtype=BF16), *matrices, embedding, angles.cos(), angles.sin(), 1e-5, 0.125)
    machine = scheduled(weights, Device.named("GB10"), position, 2)
    assert len(machine.tokens) == 2
    assert all(len(blocks) == d.group * machine.schedule.split.out_parts for blocks in machine._appended.values())


INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);|^(\.L_\w+):", re.MULTILINE)


def loops_of_waits(sass: str, most: int = 300) -> list[list[str]]:
    """The smallest loop around each instruction that reads what other blocks write, of those within
    `most` instructions: a larger one is no wait.
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
            spans |= {min(around)} if around and min(around)[0] < most else set()
    return [code[start : end + 1] for _, start, end in sorted(spans)]


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(find_tool("nvdisasm")), "-c", file.name], capture_output=True, text=True, check=True).stdout


def assert_blocks_leave_waits_together(sass: str, waits: int) -> None:
    """A loop with a barrier must decide by what came through shared memory: of what they loaded
    themselves warps see different states, leave at different looks, and are at different barriers
    from then on.
    """
    loops = loops_of_waits(sass)
    assert len(loops) >= waits
    for loop in loops:
        if any("FFMA" in line for line in loop):
            continue  # attends to the cache's tiles: no wait
        looked = next(i for i, line in enumerate(loop) if re.search(r"\bLDG|\bATOMG", line))
        assert not any("BAR.SYNC" in line for line in loop) or any(re.search(r"\bLDS", line) for line in loop[looked:]), "\n".join(loop)


def job_of(name: str, device: Device, *, small: bool = False) -> Job:
    return Job.of(launch_of(MODELS[name], device, small=small)[1], device.arch)


@pytest.mark.parametrize(
    ("name", "gpu", "sms", "small"),
    [("Qwen3-0.6B", "H200", 132, False), ("Llama-3.2-1B", "B300", 160, False), ("Llama-3.1-8B", "H200", 132, True)],
)
def test_it_compiles_without_spills(name: str, gpu: str, sms: int, small: bool) -> None:
    found = binaries.made(job_of(name, replace(Device.named(gpu), sms=sms), small=small)).resources
    assert not found.spills
    assert found.shared_bytes >= 5 * (32 << 10)  # buffers of weights
    assert not small or found.count("HFMA2") >= 50  # products of e4m3 codes, two at once


def test_compile_mega_says_what_each_model_takes(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(resources, "CONFIGS", {name: CONFIGS[name] for name in ("Llama-3.2-1B", "Qwen2-7B")})
    assert resources.compile_mega_command(arch="sm_121", json_file=tmp_path / "found.json") == 0
    said = capsys.readouterr().out
    assert "Qwen2-7B on GB10: not run (the model must be without biases" in said
    assert re.search(r"mega +sm_121 +mega_kernel +\d+ +0 .* 4\d of 48 blocks, .* balance 0.9[6-9]\d, predicted 9\d % .* Llama-3.2-1B on GB10", said)
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["compiled"]["resources"]["shared_bytes"] >= 2 * (32 << 10)
    assert row["verdict"] == "ok"


def test_the_binary_holds_what_the_design_relies_on() -> None:
    cubin = job_of("Llama-3.2-1B", Device.named("H200")).build()
    found = usage(cubin)
    assert not found.spills  # a value that is spilled comes back behind the weights that are under way
    assert found.shared_bytes >= 5 * (32 << 10)  # weights under way, beside tiles of 128 keys: six and tiles of 64 take 11 us more
    sass = disassembled(cubin)
    assert_blocks_leave_waits_together(sass, 5)
    # The loop over the cache reads two tiles of 128 keys and their values, 16 bytes a thread.
    assert max(sum("LDG.E.128.STRONG" in line for line in loop) for loop in loops_of_waits(sass, 1000)) == 16
    assert not re.search(r"\bCCTL\.IVALL", sass)  # an acquire would wait for all loads
    assert not re.search(r"MEMBAR\S*\.GPU", sass)  # a release would hold the producer up
    assert sass.count("UTMALDG") <= 4  # the loop is there once
    assert len(re.findall(r"PHASECHK\.TRANS64\.TRYWAIT", sass)) == 8  # four waits, each with a slow path: no peeled copies of the loop
    # Only the first look at a sum, a word that all threads wait for, and what is to be cleared come
    # back.
    assert sass.count("ATOMG") <= 3
    assert sass.count("REDG") >= 7
    lines = sass.splitlines()
    loop = next(i for i, line in enumerate(lines) if "PHASECHK" in line)
    end = next(i for i in range(loop, len(lines)) if "ARRIVE" in lines[i]) + 150
    assert sum("FFMA" in line for line in lines[loop:end]) <= 70  # 64 products of a thread, once
    producer = sass[sass.rindex("USETMAXREG.DEALLOC", 0, sass.index("UTMALDG")) : sass.rindex("UTMALDG")]
    assert "STRONG" not in producer  # it waits for nobody's words
    assert not re.search(r"\bLDG", producer)
