"""Verbs about models: each reads its options, then imports and calls one function."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_app import ENGINES, DeviceName, Dtype, Json, Trust, Weights, option, verb
from .command_line import check_name, full_memory_explained, prompts_of, refuse as _refuse


@verb
def demo(
    question: Annotated[str, typer.Option("--question", help="What to ask.")] = "What is the capital of France?",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")] = 16,
    device: DeviceName = "",
    dtype: Dtype = "",
    json_file: Json = None,
) -> int:
    """Ask SmolLM2-135M-Instruct a question with our kernels, and compare the tokens with stock
    transformers.

    Exits with 1 if the two differ.
    """
    from .models import demo_gguf
    from .models.command import Question, answer_command, device_and_dtype

    where, number_type = device_and_dtype(device, dtype)
    return answer_command(None, where, demo_gguf(), number_type, Question(question, max_new_tokens), json_file=json_file)


@verb
def generate(  # noqa: PLR0913 an option each
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="A Hugging Face folder, org/name on the hub, a .gguf file, or the name of a config (random weights)."
        ),
    ],
    prompt: Annotated[str | None, option("--prompt", "The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, option("--prompt-file", "A file with the prompt, or with --batch one prompt per line; - reads stdin.", metavar="FILE")
    ] = None,
    prompt_tokens: Annotated[int, option("--prompt-tokens", "Instead, time random prompts of N tokens.", metavar="N", min=0)] = 0,
    batch: Annotated[
        int | None, option("--batch", "Number of prompts at once: lines of --prompt-file, or random prompts of --prompt-tokens.", metavar="N", min=1)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens to write for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="Draw tokens with this temperature; 0 takes the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --temperature: the same seed writes the same text.")] = 0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from the K likeliest tokens; 0 draws from all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0, max=1, help="Draw from the fewest tokens whose probabilities sum to at least P, above 0.")
    ] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", min=0, max=1, help="Draw from tokens at least P times as likely as the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Penalty for tokens of the prompt or the answer; 1 for none.")
    ] = 1.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="A text that ends the answer; may be repeated.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="auto, mega, graph, eager (our engine), or transformers (the model patched).")
    ] = "transformers",
    draft: Annotated[str, option("--draft", "A smaller model of the same vocabulary, which proposes tokens to --engine.", metavar="MODEL")] = "",
    speculate: Annotated[
        int, typer.Option("--speculate", metavar="K", min=0, max=15, help="Tokens that --draft, or else the text so far, proposes at a time.")
    ] = 0,
    device: DeviceName = "",
    dtype: Dtype = "",
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, help="graph and eager: split the model over N GPUs, one process each.")] = 1,
    nccl: Annotated[bool, typer.Option("--nccl", help="With --tp: use NCCL for all sums, and never read the other GPUs' memory.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run unpatched transformers (with --tp: one GPU); exit with 1 if the tokens of a text differ.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="With --compare: also run transformers' compiled static-cache mode.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the model's chat template.")] = False,
    trust_remote_code: Trust = False,
    weights: Weights = None,
    kv_dtype: Annotated[str | None, option("--kv-dtype", "fp8: the engine caches keys and values in 8 bits.", metavar="DTYPE")] = None,
    json_file: Json = None,
) -> int:
    """Generate text; or, with --prompt-tokens, measure the speed: times, kernels, share of the
    bandwidth floor.
    """
    check_name("--engine", ENGINES, engine)
    given = [
        name for name, one in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--prompt-tokens", prompt_tokens or None)) if one is not None
    ]
    _refuse(
        {
            f"exactly one of --prompt, --prompt-file and --prompt-tokens must be given, got {' and '.join(given) or 'none'}": len(given) != 1,
            "--prompt must be a text that is not empty, got '': give one, or a file by --prompt-file": prompt == "",
            f"--batch must be 1 with --engine mega, got {batch}": engine == "mega" and batch not in (None, 1),
            "--compiled must come with --compare and --prompt-tokens": compiled and not (compare and prompt_tokens),
            "--batch must come with --prompt-file, one prompt per line, or with --prompt-tokens": batch is not None and bool(prompt),
            f"--engine must be graph or eager with --tp, got {engine!r}": tp > 1 and engine not in ("graph", "eager"),
            "--compare must come with --prompt-tokens and without --compiled where --tp is given": tp > 1
            and (compiled or (compare and not prompt_tokens)),
            f"--device must be cuda or cpu with --tp, which takes the first GPUs, got {device!r}": tp > 1 and ":" in device,
            "--nccl must come with --tp 2 or more": nccl and tp == 1,
            f"--weights must come without --compare, got {weights!r}: stock transformers does not multiply quantised weights": compare
            and weights is not None,
            f"--weights must be e4m3 with --engine mega, got {weights!r}": engine == "mega" and weights not in (None, "e4m3"),
            "--draft must come with --speculate of at least 1, and without --tp": bool(draft) and (speculate == 0 or tp > 1),
            "--speculate must come with --engine auto, graph or eager, and without --prompt-tokens": speculate > 0
            and (prompt_tokens > 0 or engine in ("transformers", "mega")),
            "--kv-dtype must come with --engine graph, eager or auto, and without --compare but for times": kv_dtype is not None
            and (engine in ("transformers", "mega") or (compare and not prompt_tokens)),
            f"--top-p must be above 0 and at most 1, got {top_p}": top_p <= 0,
            f"--repetition-penalty must be positive, got {repetition_penalty}": not repetition_penalty > 0,
            "--temperature must be 0 with --compare and --prompt-tokens": temperature > 0 and (compare or prompt_tokens > 0),
        }
    )
    texts = prompts_of(prompt_file, lines=batch is not None) if prompt_file else [prompt or ""]
    from .engine.mega.pack import decided
    from .models import Draw, outline_of
    from .models.batch import Questions, answers_command
    from .models.command import Question, answer_command, device_and_dtype, load_and_say
    from .models.shard import check_ranks

    where, number_type = device_and_dtype(device, dtype, weights, kv_dtype)
    if engine == "graph" and where.type == "cpu":
        raise ValueError("--engine must be eager or transformers on a CPU: a CUDA graph needs an NVIDIA GPU, got 'graph'")
    if engine == "mega":
        decided(outline_of(model, dtype=number_type, trust_remote_code=trust_remote_code), where)
    if tp > 1:  # before there is a process for each part
        check_ranks(outline_of(model, dtype=number_type, trust_remote_code=trust_remote_code), tp, weights)
    how: Any = {"raw": raw, "engine": engine, "stock": compare, "drafter": draft, "speculate": speculate, "kv_dtype": kv_dtype}
    draw = Draw(temperature, seed, top_k, top_p, min_p, repetition_penalty, tuple(stop or ()))
    kept: Any = {"json_file": json_file, "trust_remote_code": trust_remote_code, "weights": weights}
    answer: Callable[..., int]
    if batch is None:
        answer = partial(answer_command, question=Question(texts[0], max_new_tokens, draw, **how), **kept)
    else:
        answer = partial(answers_command, questions=Questions(tuple(texts), batch, max_new_tokens, draw, **how), **kept)
    with full_memory_explained():
        if not prompt_tokens and tp == 1:
            return answer(None, where, model, number_type)
        from .engine.command import Sizes, measure_command, measure_rank, tell
        from .engine.ranks import run_ranks

        ranks: Any = {"ranks": tp, "device": where.type, "direct": False if nccl else None}
        if not prompt_tokens:
            return int(run_ranks(answer, model, number_type, **ranks))
        sizes = Sizes(batch or 1, prompt_tokens, max_new_tokens)
        if tp > 1:
            timed = (model, number_type, sizes, engine, compare, trust_remote_code, weights, kv_dtype)
            return tell(run_ranks(measure_rank, *timed, **ranks), json_file=json_file)
        loaded = load_and_say(model, where, number_type, trust_remote_code=trust_remote_code, weights=weights)
        baselines = ("eager", "compiled") if compiled else ("eager",) if compare else ()
        return measure_command(loaded, sizes, engine=engine, baselines=baselines, json_file=json_file, kv_dtype=kv_dtype)


@verb
def serve(  # noqa: PLR0913 an option each
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a .gguf file, with its tokenizer.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, option("--api-key", "The key that clients must send. Default: none.", metavar="KEY", envvar="TILEWRIGHT_API_KEY")
    ] = None,
    max_requests: Annotated[int, typer.Option("--max-requests", metavar="N", help="The most requests that wait or run at once; more get 429.")] = 256,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", metavar="N", help="Largest body of a request; a larger one gets 413.")] = 2**21,
    max_batch_tokens: Annotated[
        int | None, option("--max-batch-tokens", "The most tokens in a step, over all requests. Default: 8192; 128 on a CPU.", metavar="N")
    ] = None,
    cache_pages: Annotated[
        int | None, option("--cache-pages", "Pages of 256 tokens. Default: a tenth of the available memory; on a GPU, what is free.", metavar="N")
    ] = None,
    prefix_reuse: Annotated[
        bool, typer.Option("--prefix-reuse/--no-prefix-reuse", help="Share the pages of prompts that begin alike, in whole pages.")
    ] = True,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", metavar="S", min=0, help="How long running requests may continue after SIGTERM or Ctrl-C.")
    ] = 30.0,
    device: DeviceName = "",
    dtype: Dtype = "",
    trust_remote_code: Trust = False,
    weights: Weights = None,
    kv_dtype: Annotated[str | None, option("--kv-dtype", "fp8: cache keys and values in 8 bits.", metavar="DTYPE")] = None,
) -> int:
    """Serve a model to many OpenAI clients: transformers' scheduler and pages, our kernels."""
    from .models.command import device_and_dtype, load_and_say
    from .models.serve import check_options, serve_command

    limits = {"max_requests": max_requests, "max_body_bytes": max_body_bytes, "max_batch_tokens": max_batch_tokens, "cache_pages": cache_pages}
    check_options(host=host, port=port, api_key=api_key, **limits)  # before the model is loaded
    loaded = load_and_say(model, *device_and_dtype(device, dtype, weights, kv_dtype), trust_remote_code=trust_remote_code, weights=weights)
    how: Any = {"prefix_reuse": prefix_reuse, "kv_dtype": kv_dtype}
    return serve_command(loaded, drain_seconds=drain_seconds, host=host, port=port, api_key=api_key, **how, **limits)


@verb
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a .gguf file.")],
    weight_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="E.g. int4-128, e4m3 or mxfp4; a wrong name lists all formats.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder to write to, new or empty.")],
    device: DeviceName = "",
    trust_remote_code: Trust = False,
) -> int:
    """Round a model's weights to 4 or 8 bits and write it, for `generate` and `serve`."""
    from .models.command import device_and_dtype, quantize_command

    return quantize_command(model, device_and_dtype(device, "bfloat16")[0], weight_format, out, trust_remote_code=trust_remote_code)


@verb
def difftest(  # noqa: PLR0913 an option each
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="As for generate; the name of a config takes random weights.")
    ] = "Llama-3.2-1B",
    layers: Annotated[int | None, option("--layers", "Only the first N layers. Default: all.", metavar="N")] = None,
    position: Annotated[
        int, typer.Option("--position", min=0, max=(1 << 20) - 1, help="Position of the token, which is the number of keys in the cache.")
    ] = 100,
    blocks: Annotated[int, option("--blocks", "Blocks of the kernel. Default: one per SM.", min=0)] = 0,
    schedule: Annotated[str, option("--schedule", "Run the reference machine alone, with this GPU's schedule, e.g. GB10.", metavar="GPU")] = "",
    device: DeviceName = "",
    dtype: Annotated[str, option("--dtype", "bfloat16 or float16. Default: bfloat16.")] = "",
    trust_remote_code: Trust = False,
    json_file: Json = None,
) -> int:
    """Run one token through the megakernel and its reference machine and compare every intermediate
    value; exit with 1 if one breaks the rule.
    """
    from .engine.mega.difftest import difftest_command
    from .engine.mega.pack import decided
    from .launch.device import KNOWN
    from .models import outline_of
    from .models.command import device_and_dtype, load_and_say

    where, number_type = device_and_dtype(device, dtype or "bfloat16")
    if schedule:
        check_name("--schedule", sorted(KNOWN), schedule)  # before a model is built
    whole = decided(outline_of(model, dtype=number_type, trust_remote_code=trust_remote_code), where, layers=layers)
    loaded = load_and_say(model, where, number_type, layers=layers or 0, trust_remote_code=trust_remote_code)
    return difftest_command(loaded.model, whole=whole, position=position, blocks=blocks, gpu=schedule, json_file=json_file)
