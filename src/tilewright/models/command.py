"""`tilewright demo` and `generate`: loads a model, lets it answer, prints.

`serve` and `difftest` use the loading too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging

from ..interpret.threads import choose_threads_once
from ..launch import argument_error, check_name, chosen_device, dtype_name
from ..launch.console import plain_console, write
from ..launch.files import write_json
from ..ops.common.weight_formats import FORMATS
from . import chat_template
from .generate import GREEDY, Comparison, Draw, compare, encode
from .load import AS_STORED, DTYPES, Loaded, load
from .quantized import HEAD_FORMAT, formats_of, is_quantized, parameters, quantize, weight_bytes, weight_formats
from .quantized_folder import check_output, save_quantized
from .shard import shard_of


def device_and_dtype(device: str, dtype: str, weights: str | None = None, kv_dtype: str | None = None) -> tuple[torch.device, torch.dtype]:
    """Parses --device and --dtype, and checks --weights and --kv-dtype, before a model is loaded.

    Default: a GPU if there is one, and the dtype that suits it, or --weights. Raises ValueError on
    anything else.
    """
    if weights is not None:
        formats_of(weights, "--weights", also=(AS_STORED,))
    where = chosen_device(device)
    dtype = dtype or ("float32" if where.type == "cpu" and weights is None else "bfloat16")
    check_name("--dtype", DTYPES, dtype)
    if kv_dtype is not None:
        check_name("--kv-dtype", ("fp8",), kv_dtype)
        if dtype == "float32":
            raise argument_error("--dtype", "bfloat16 or float16 with --kv-dtype fp8", dtype)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        choose_threads_once()  # before anything runs, stock transformers too
    return where, DTYPES[dtype]


def load_and_say(
    model: str | Path,
    where: torch.device,
    dtype: torch.dtype,
    *,
    quiet: bool = False,
    group: Any = None,
    layers: int = 0,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> Loaded:
    """Loads a model, with a progress bar on a terminal and one line on stdout. group: an engine's
    Group; loads this rank's part. layers, trust_remote_code, weights: as in `load`.
    """
    logging.disable_progress_bar()  # ours, on stderr and only on a terminal, is enough
    logging.set_verbosity_error()
    start = time.perf_counter()
    shard = None if group is None else group.shard
    how: dict[str, Any] = {"layers": layers, "trust_remote_code": trust_remote_code, "weights": weights}
    with _bar("loading", quiet=shard is not None and shard.rank > 0) as show:
        loaded = load(model, device=where, dtype=dtype, on_progress=show, shard=shard, **how)
    console_of(quiet).print(_headline(loaded, time.perf_counter() - start))
    return loaded


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask a model, and how.

    raw: without the model's chat template. engine: as in `compare`. stock: ask unpatched
        transformers too. draw: as in `generate`. drafter, speculate: a model that proposes so many
        tokens at a time; "" for the text so far.
    """

    prompt: str
    max_new_tokens: int
    draw: Draw = GREEDY
    raw: bool = False
    engine: str = "transformers"
    stock: bool = True
    drafter: str = ""
    speculate: int = 0
    kv_dtype: str | None = None


def answer_command(
    group: Any,
    where: torch.device,
    model: str | Path,
    dtype: torch.dtype,
    question: Question,
    *,
    json_file: Path | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> int:
    """Loads, generates, prints.

    Returns the exit code: 1 if a requested comparison found other tokens. group: of the processes
    of --tp, else None; only its first rank prints.
    """
    silent = group is not None and group.shard.rank > 0
    console = console_of(silent)
    loaded, options = opened(model, where, dtype, question, group=group, trust_remote_code=trust_remote_code, weights=weights)
    prompt_ids = encode(loaded, question.prompt, raw=question.raw)
    write(console, f"> {question.prompt}\n", bold=True)
    on_text = None if silent else partial(write, console)
    how: dict[str, Any] = {name: getattr(question, name) for name in ("max_new_tokens", "draw", "stock", "engine")}
    result = compare(loaded, prompt_ids, **how, on_text=on_text, options=options)
    console.print()
    if json_file and not silent:
        write_json(json_file, {"model": loaded.source, "device": str(where), "dtype": dtype_name(dtype), **result.as_dict()})
    if not silent:
        _summary(console, result)
    return 1 if result.equal is False else 0


def opened(
    model: str | Path, where: torch.device, dtype: torch.dtype, asked: Any, *, group: Any, trust_remote_code: bool, weights: str | None
) -> tuple[Loaded, dict[str, Any]]:
    """The model and the options of an Engine of it. asked: a Question or Questions.

    Raises ValueError if it asks for a comparison with stock transformers, which cannot run the
    model.
    """
    silent = group is not None and group.shard.rank > 0
    if not asked.raw and Path(model).exists():
        chat_template.begin()
    loaded = load_and_say(model, where, dtype, quiet=silent, group=group, trust_remote_code=trust_remote_code, weights=weights)
    if asked.stock:
        refuse_comparison(loaded)
    options: dict[str, Any] = {"group": group, "kv_dtype": asked.kv_dtype}
    if asked.speculate:
        drafter = load_and_say(asked.drafter, where, dtype, trust_remote_code=trust_remote_code).model if asked.drafter else None
        options |= {"draft": drafter, "speculate": asked.speculate}
    return loaded, options


def refuse_comparison(loaded: Loaded) -> None:
    """Raises ValueError for a model that stock transformers cannot run."""
    if is_quantized(loaded.model):
        raise argument_error("--compare", "left out with quantised weights, which stock transformers does not multiply", "given")


def quantize_command(model: str, where: torch.device, weight_format: str, out: Path, *, trust_remote_code: bool = False) -> int:
    """Loads, quantises, writes, and says how many bytes that saved."""
    if HEAD_FORMAT in weight_format:
        rounded = "a format alone: a folder's head keeps its 16 bits, and `--weights` of generate and serve rounds it too"
        raise argument_error("--format", rounded, repr(weight_format))
    check_name("--format", FORMATS, weight_format)
    check_output(out)
    loaded = load_and_say(model, torch.device("cpu"), torch.bfloat16, trust_remote_code=trust_remote_code)
    before = weight_bytes(loaded.model)
    with _bar("quantising") as show:
        quantize(loaded.model, weight_format, on_progress=show, device=where, undoable=False)
    after = save_quantized(loaded.model, loaded.tokenizer, weight_format, out)
    console = console_of(False)
    console.print(f"{out}: {weight_format}, rounded to nearest, nothing calibrated; the head and what is no Linear keep 16 bits")
    console.print(f"{after / 1e9:.3g} GB of weights, before {before / 1e9:.3g} GB")
    return 0


@contextmanager
def _bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal."""
    stderr = plain_console(stderr=True)
    columns = TextColumn(what), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=stderr, transient=True, disable=quiet or not stderr.is_terminal) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def console_of(quiet: bool) -> Console:
    return plain_console(quiet=quiet)


def _headline(loaded: Loaded, seconds: float) -> str:
    model, ranks = loaded.model, shard_of(loaded.model).ranks
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    how = "interpreted" if model.device.type == "cpu" else "compiled"
    name = Path(loaded.source).name
    kinds = ", ".join((*weight_formats(model), dtype_name(model.dtype)))
    size = f"{parameters(model) / 1e6:.0f} M parameters{each}, {kinds}, {weight_bytes(model) / 1e9:.3g} GB"
    return f"{name} | {size} | {model.device}, kernels {how} | loaded in {seconds:.1f} s"


def _summary(console: Console, result: Comparison) -> None:
    ours, stock = result.ours, result.stock
    console.print(
        f"\n{len(ours.tokens)} tokens in {ours.first_token_s + ours.decode_s:.1f} s: {ours.tokens_per_s:.2f} tokens/s "
        f"({ours.prompt_tokens} prompt tokens read in {ours.first_token_s:.1f} s, then {ours.decode_tokens_per_s:.2f} tokens/s)"
    )
    if ours.launches:
        console.print(f"kernel launches: {', '.join(f'{name} {count}' for name, count in sorted(ours.launches.items()))}")
    if stock is not None:
        console.print(f"stock transformers, same weights: {stock.tokens_per_s:.2f} tokens/s")
        if result.equal:
            console.print("tokens equal to stock transformers: yes", style="green")
        else:
            console.print(f"tokens equal to stock transformers: NO, {result.difference()}", style="bold red")
