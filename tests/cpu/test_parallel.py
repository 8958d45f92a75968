"""Engines of two processes (gloo): the results of one process; no process is left after a
failure.
"""

import ctypes
import datetime
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from engine_models import FAMILIES
from tiny_models import TINY, state_of
from tiny_server import wait_until

from tilewright.command_line import command
from tilewright.engine import Engine, Group, Sampling
from tilewright.engine.ranks import RankLostError, run_ranks
from tilewright.models import CONFIGS, Shard, cut, patch, random_model, shard_of
from tilewright.models.quantized import QuantizedLinear, quantize
from tilewright.ops.common.weight_formats import FORMATS, QuantizedWeight
from tilewright.testing import assert_accurate

# Imported once, in a server that each rank is then forked from.
families = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "deepseek_v3", "qwen2")]
multiprocessing.set_forkserver_preload(["torch", *families, "tilewright.engine", "tilewright.models"])
PROMPTS = [[5, 50, 7], [9] * 11]
GIVEN = [[7, 91]] * 2
CASES = {"llama-tied-bias": torch.float32, "deepseek_v3": torch.bfloat16}  # grouped heads and columns; latent attention and experts
SMALL = {"gpt_oss": "mxfp4"}  # with the format of its weights: rows, columns and experts


def on_two(function: Any, *args: Any) -> Any:
    return run_ranks(function, *args, ranks=2, device="cpu", start="forkserver")


def config(name: str) -> dict[str, Any]:
    return {**TINY, **FAMILIES[name]}


def found(group: Group | None, name: str) -> tuple[list[list[int]], list[list[int]], torch.Tensor, int]:
    """Greedy tokens, drawn tokens, logits after given tokens, and the bytes of a step."""
    model = random_model(config(name), dtype=CASES[name], shard=None if group is None else group.shard)
    with Engine(model, max_batch=2, max_len=64, group=group) as engine:
        greedy = engine.generate(PROMPTS, 3).tokens
        drawn = engine.generate(PROMPTS, 2, sampling=Sampling(temperature=2.0, seed=1)).tokens if name in FAMILIES and "llama" in name else []
        return greedy, drawn, engine.logits(PROMPTS, GIVEN), engine.step_bytes(2, 16)


def found_small(group: Group | None, name: str) -> tuple[list[list[int]], torch.Tensor, int]:
    """Greedy tokens, logits after the prompt, and the bytes of a step."""
    sizes = {**config(name), "intermediate_size": 64, "num_hidden_layers": 1}
    if group is None:
        model = random_model(sizes, dtype=torch.bfloat16)
        quantize(model, SMALL[name])
    else:
        model = random_model(sizes, dtype=torch.bfloat16, shard=group.shard, weights=SMALL[name])
    with Engine(model, max_len=64, group=group) as engine:
        return engine.generate(PROMPTS[:1], 2).tokens, engine.logits(PROMPTS[:1]), engine.step_bytes(1, 16)


def patched_beside_stock() -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], bool]:
    """Logits of a tensor-parallel model of transformers, stock and patched; the report; whether
    undo restored it.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor
    from transformers.distributed import DistributedConfig

    model = random_model(config("qwen2"))
    values = {path: parameter.detach().clone() for path, parameter in model.named_parameters(remove_duplicate=False)}
    plan, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=2))
    model = type(model).maybe_distribute_model(model, plan, mesh)
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(parameter, DTensor):
            own = distribute_tensor(values[path], parameter.device_mesh, parameter.placements, src_data_rank=None)
            owner, _, name = path.rpartition(".")
            model.get_submodule(owner).register_parameter(name, torch.nn.Parameter(own, requires_grad=False))
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        stock = model(ids).logits
        with patch(model) as report:
            ours = model(ids).logits
        return stock, ours, report.as_dict(), torch.equal(model(ids).logits, stock)


def found_by_all(group: Group, device: torch.device) -> list[dict[str, Any]]:
    gathered: list[Any] = [None] * group.shard.ranks
    mine: dict[str, Any] = {name: found(group, name) for name in CASES}
    mine |= {name: found_small(group, name) for name in SMALL}
    mine["patched"] = patched_beside_stock()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def one_and_two() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process finds, then two that are forked from it: they have its kernels. It has those
    of the process that runs the tests.
    """
    torch.set_num_threads(1)  # threads would not be there in a fork
    one: dict[str, Any] = {name: found(None, name) for name in CASES} | {name: found_small(None, name) for name in SMALL}
    return one, run_ranks(found_by_all, ranks=2, device="cpu", start="fork")


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(one_and_two).result()


@pytest.fixture(scope="module")
def ranks(both: tuple[dict[str, Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return both[1]


@pytest.fixture(scope="module")
def alone(both: tuple[dict[str, Any], list[dict[str, Any]]]) -> dict[str, Any]:
    return both[0]


def test_two_ranks_choose_the_tokens_of_one(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    one = alone["llama-tied-bias"]
    for rank in ranks:
        greedy, drawn, logits, step_bytes = rank["llama-tied-bias"]
        assert greedy == one[0]
        assert drawn == one[1]
        torch.testing.assert_close(logits, one[2])
        assert 0.5 <= step_bytes / one[3] < 0.51  # a bias is whole, on rank 0


def test_experts_and_latent_heads_obey_the_accuracy_rule(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["deepseek_v3"][0] == ranks[1]["deepseek_v3"][0]
    model = random_model(config("deepseek_v3"), dtype=torch.bfloat16)
    stock = logits_of(model)
    model.set_experts_implementation("eager")
    truth = logits_of(model.to(torch.float64))
    for rank in ranks:
        assert_accurate(rank["deepseek_v3"][2], stock, truth)


@pytest.mark.parametrize("name", SMALL)
def test_ranks_of_small_weights_choose_the_tokens_of_one(ranks: list[dict[str, Any]], alone: dict[str, Any], name: str) -> None:
    tokens, logits, step_bytes = alone[name]
    for rank in ranks:
        assert rank[name][0] == tokens
        assert (rank[name][1] - logits).norm() < 0.02 * logits.norm()  # terms are rounded to bf16 before they are added
        assert rank[name][2] < step_bytes  # panels of a tiny model are filled up


def test_patch_works_inside_the_tensor_parallelism_of_transformers(ranks: list[dict[str, Any]]) -> None:
    with torch.inference_mode():
        whole = random_model(config("qwen2"))(torch.tensor([PROMPTS[0]])).logits
    for rank in ranks:
        stock, ours, report, restored = rank["patched"]
        torch.testing.assert_close(stock, whole)
        torch.testing.assert_close(ours, whole)
        assert restored
        assert [r["count"] for r in report["replaced"] if r["op"] == "matmul"] == [15]
        assert not any("on this instance" in kept["reason"] for kept in report["kept"])


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        each = [model(torch.tensor([p + c])).logits[0, len(p) - 1 :] for p, c in zip(PROMPTS, GIVEN, strict=True)]
    return torch.stack(each)


def failing(group: Group, device: torch.device) -> None:
    if group.shard.rank == 1:
        raise ValueError("rank 1 cannot")
    torch.distributed.all_reduce(torch.ones(1), group=group.process_group)


def joining(group: Group, device: torch.device, folder: str) -> None:
    """As a decode step does, over and over."""
    while True:
        torch.distributed.all_reduce(torch.ones(1), group=group.process_group)
        Path(folder, f"{group.shard.rank}-{os.getpid()}").touch()


def sleeping(group: Group, device: torch.device, folder: str) -> None:
    Path(folder, f"{group.shard.rank}-{os.getpid()}").touch()
    threading.Event().wait()


def test_a_rank_that_fails_takes_the_others_with_it() -> None:
    with pytest.raises(ValueError, match="rank 1 cannot"):
        on_two(failing)


@pytest.mark.parametrize(("function", "which"), [(joining, 0), (sleeping, 1)])
def test_a_rank_that_is_killed_ends_the_others_at_once(function: Any, which: int, tmp_path: Path) -> None:
    """By kill -9. One that joins sums notices by itself, and its error would tell of a lost
    connection.
    """
    at = []

    def kill() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        at.append(time.monotonic())
        os.kill(pids(tmp_path)[which], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RuntimeError, match=f"rank {which} was ended by SIGKILL, and so all ranks were: the system does that when its memory is full"):
        on_two(function, str(tmp_path))
    assert time.monotonic() - at[0] < 10
    assert not any(map(alive, pids(tmp_path)))


def impatient(group: Group, device: torch.device, folder: str) -> None:
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group.process_group)
    joining(group, device, folder)


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    """By kill -STOP: the others' errors told of a socket, and nobody of the rank."""

    def stop() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(pids(tmp_path)[1], signal.SIGSTOP)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(RankLostError, match="rank 1 was stopped by a signal until the others gave it up, and so all ranks were ended"):
        on_two(impatient, str(tmp_path))
    assert not any(map(alive, pids(tmp_path)))


def unsignalled(group: Group, device: torch.device, folder: str) -> None:
    ctypes.CDLL(None).prctl(1, 0)  # PyTorch asks Linux for a signal: too late where the parent is killed during imports
    sleeping(group, device, folder)


def parent_of_two(folder: str) -> None:
    run_ranks(unsignalled, folder, ranks=2, device="cpu", start="fork")


def test_ranks_end_with_their_parent_however_it_is_killed(tmp_path: Path) -> None:
    parent = multiprocessing.get_context("forkserver").Process(target=parent_of_two, args=(str(tmp_path),))
    parent.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    parent.kill()
    parent.join()
    try:
        wait_until(lambda: not any(map(alive, pids(tmp_path))), 10)
    finally:
        for pid in filter(alive, pids(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_a_lost_rank_is_one_line_of_a_command(capsys: pytest.CaptureFixture) -> None:
    def ended() -> int:
        raise RankLostError("rank 1 was ended by SIGKILL")

    with pytest.raises(typer.Exit) as stopped:
        command(ended)()
    assert stopped.value.exit_code == 2
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGKILL\n"


def pids(folder: Path) -> list[int]:
    """By rank."""
    return [int(path.name.partition("-")[2]) for path in sorted(folder.iterdir())]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job that a shell runs in the background ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        on_two(sleeping, str(tmp_path))
    assert not any(map(alive, pids(tmp_path)))


def test_ranks_ignore_an_interrupt_while_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parent hears of it too, and ends them."""
    seen = []

    def started(*_: Any, **__: Any) -> Any:
        seen.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.engine.ranks.start_processes", started)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        on_two(sleeping)
    assert seen == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("name", ["llama-tied-bias", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v2-groups"])
def test_shards_are_parts_of_the_same_weights(name: str) -> None:
    sizes = {**TINY, **FAMILIES[name], "num_attention_heads": 4, "num_key_value_heads": 4 if "deepseek" in name else 2}
    whole = random_model(sizes)
    for ranks in (2, 4):  # four ranks share two key heads
        parts = [random_model(sizes, shard=Shard(rank, ranks)) for rank in range(ranks)]
        cuts = [random_model(sizes) for _ in range(ranks)]
        for rank, model in enumerate(cuts):
            cut(model, Shard(rank, ranks), device="cpu")
        for path, values in whole.state_dict().items():
            mine = [model.state_dict().get(path) for model in parts]
            for one, other in zip(mine, cuts, strict=True):
                assert one is None or torch.equal(one, other.state_dict()[path])
            if any(part is None for part in mine):
                assert "bias" in path
                assert torch.equal(mine[0], values)
            elif mine[0].shape == values.shape:
                assert all(torch.equal(part, values) for part in mine)
            elif "qkv_proj" not in path and "gate_up_proj" not in path[:-1].split("experts")[0]:
                axis = next(i for i, (a, b) in enumerate(zip(mine[0].shape, values.shape, strict=True)) if a != b)
                distinct = mine[:: ranks // 2] if ranks * mine[0].shape[axis] > values.shape[axis] else mine
                assert torch.equal(torch.cat(distinct, axis), values)
    with pytest.raises(RuntimeError, match="only an Engine of all ranks"):
        parts[0](torch.tensor([[1]]))


@pytest.mark.parametrize("name", FORMATS)
def test_small_weights_are_divided_between_groups(name: str) -> None:
    torch.manual_seed(0)
    weight = QuantizedWeight.of(torch.randn(200, 512), name)
    wide = weight.dequantize()
    rows = weight.cut(0, [(8, 40), (130, 70)])
    assert torch.equal(rows.dequantize(), torch.cat((wide[8:48], wide[130:200])))
    for rank in range(2):
        assert torch.equal(weight.cut(1, [(256 * rank, 256)]).dequantize(), wide[:, 256 * rank :][:, :256])


@pytest.mark.parametrize(("name", "weights"), [("qwen2", "int8,head=e4m3"), ("gpt_oss", "mxfp4")])
def test_shards_of_small_weights_are_parts_of_those_quantised_whole(name: str, weights: str) -> None:
    """Made from random weights, and cut from a model that is quantised already."""
    sizes = {**config(name), "intermediate_size": 64, "num_hidden_layers": 1}
    for rank in range(2):
        whole = random_model(sizes, dtype=torch.bfloat16)
        quantize(whole, weights)
        full = [module.wide for module in whole.modules() if isinstance(module, QuantizedLinear)]
        cut(whole, Shard(rank, 2), device="cpu")
        made = random_model(sizes, dtype=torch.bfloat16, shard=Shard(rank, 2), weights=weights)
        assert made.state_dict().keys() == whole.state_dict().keys()
        assert all(torch.equal(x, whole.state_dict()[path]) for path, x in made.state_dict().items())
        parts = [module.wide for module in made.modules() if isinstance(module, QuantizedLinear)]
        for part, values in zip(parts, full, strict=True):
            (axis,) = (i for i in range(2) if part.shape[i] != values.shape[i])
            assert torch.equal(part, values.chunk(2, axis)[rank])


def test_what_cannot_be_dealt_is_refused_before_anything_changes() -> None:
    model = random_model({**TINY, **FAMILIES["llama-tied-bias"]})
    with pytest.raises(ValueError, match=r"number of ranks must be a divisor of 4: config\.num_attention_heads, got 3"):
        cut(model, Shard(0, 3), device="cpu")
    assert shard_of(model) == Shard()
    with pytest.raises(ValueError, match="rank must be 0 to 1, got 2"):
        Shard(2, 2)
    sizes = {**config("qwen2"), "intermediate_size": 64}
    message = r"model.layers.0.self_attn.o_proj with a multiple of 32 columns each, as int4-32 needs, got 4, which leaves 16"
    with pytest.raises(ValueError, match=message):
        random_model(sizes, dtype=torch.bfloat16, shard=Shard(0, 4), weights="int4-32")
    small = random_model(sizes, dtype=torch.bfloat16)
    quantize(small, "int4-32")
    before = state_of(small)
    with pytest.raises(ValueError, match=message):
        cut(small, Shard(0, 4), device="cpu")
    small.model.layers[0].self_attn.o_proj.order = torch.arange(64)
    with pytest.raises(ValueError, match=r"number of ranks must be 1 for model.layers.0.self_attn.o_proj, whose groups lie in act-order, got 2"):
        cut(small, Shard(0, 2), device="cpu")
    small.model.layers[0].self_attn.o_proj.order = None
    assert state_of(small) == before
    with pytest.raises(ValueError, match=r"torch\.distributed must be initialised"):
        Group.of()
    cut(model, Shard(1, 2), device="cpu")
    with pytest.raises(ValueError, match=r"loaded with Shard\(rank=0, ranks=1\), as this engine's group is, got Shard\(rank=1, ranks=2\)"):
        Engine(model)


@pytest.mark.skipif(torch.cuda.device_count() >= 64, reason="needs fewer GPUs")
def test_fewer_gpus_than_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match=f"ranks must be at most {torch.cuda.device_count()}, the GPUs of this machine, got 64"):
        run_ranks(failing, ranks=64)


def test_qwen2_7b_fits_two_and_four_ranks() -> None:
    """On the meta device: the shapes alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for ranks in (2, 4):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["Qwen2-7B"]))
        cut(model, Shard(ranks - 1, ranks), device="meta")
        attention = model.model.layers[0].self_attn
        assert attention.q_proj.weight.shape == (3584 // ranks, 3584)
        assert attention.k_proj.bias.shape == (512 // ranks,)
        assert attention.o_proj.weight.shape == (3584, 3584 // ranks)
