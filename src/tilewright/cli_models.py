"""Verbs about models: each reads its options, then imports and calls one function."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_app import ENGINES, DeviceName, Dtype, Json, Trust, Weights, option, verb
from .command_line import full_gpu_explained, prompts_of
from .command_line import refuse as _refuse


@verb
def demo(
    question: Annotated[str, typer.Option("--question", help="What to ask.")] = "What is the capital of France?",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest answer, in tokens.")] = 16,
    device: DeviceName = "",
    dtype: Dtype = "",
    json_file: Json = None,
) -> int:
    """Ask SmolLM2-135M-Instruct a question, with every kernel ours, and compare the tokens with
    stock transformers.

    Exits with 1 if the two differ.
    """
    from .models import demo_gguf
    from .models.command import Question, answer_command, device_and_dtype

    return answer_command(demo_gguf(), *device_and_dtype(device, dtype), Question(question, max_new_tokens), json_file=json_file)


@verb
def generate(  # noqa: PLR0913 an option each
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="A Hugging Face folder, org/name of its hub, a .gguf file, or a config's name (random weights)."
        ),
    ],
    prompt: Annotated[str, option("--prompt", "The prompt itself.")] = "",
    prompt_file: Annotated[
        Path | None, option("--prompt-file", "A file with the prompt, or with --batch one prompt a line; - reads stdin.", metavar="FILE")
    ] = None,
    prompt_tokens: Annotated[int, option("--prompt-tokens", "Random prompts of N tokens instead, timed.", metavar="N")] = 0,
    batch: Annotated[
        int | None, option("--batch", "Prompts at once: lines of --prompt-file, or random ones of --prompt-tokens.", metavar="N", min=1)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to write at most, for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="Draw tokens of a text; 0 takes the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --temperature: the same seed writes the same text.")] = 0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from the K likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1, help="Draw from the fewest tokens that are likely in sum.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", min=0, max=1, help="Draw from tokens so likely as a share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", help="Of tokens in prompt or answer; 1 for none.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="A text that ends the answer; may come again.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="auto, mega, graph, eager (our engine), or transformers (the model patched).")
    ] = "transformers",
    device: DeviceName = "",
    dtype: Dtype = "",
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, help="graph and eager: share the model between N GPUs, a process each.")] = 1,
    nccl: Annotated[bool, typer.Option("--nccl", help="With --tp: all sums through NCCL, none by reading the other GPUs' memory.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run unpatched transformers too (with --tp one GPU); exit with 1 if a text's tokens differ.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="With --compare: transformers' compiled static-cache mode too.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the prompt as it is, without the model's chat template.")] = False,
    trust_remote_code: Trust = False,
    weights: Weights = None,
    json_file: Json = None,
) -> int:
    """Write text, as it comes; or, with --prompt-tokens, measure how fast: times, kernels,
    share of the bandwidth floor.
    """
    _refuse(
        {
            "exactly one of --prompt, --prompt-file and --prompt-tokens must be given": bool(prompt) + bool(prompt_file) + (prompt_tokens > 0) != 1,
            f"--engine must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, got {engine!r}": engine not in ENGINES,
            f"--batch must be 1 with --engine mega, got {batch}": engine == "mega" and batch not in (None, 1),
            "--compiled must come with --compare and --prompt-tokens": compiled and not (compare and prompt_tokens),
            "--batch must come with --prompt-file, one prompt a line, or with --prompt-tokens": batch is not None and bool(prompt),
            f"--engine must be graph or eager with --tp, got {engine!r}": tp > 1 and engine not in ("graph", "eager"),
            "--compare must come with --prompt-tokens and without --compiled where --tp is given": tp > 1
            and (compiled or (compare and not prompt_tokens)),
            f"--device must be cuda or cpu with --tp, which takes the first GPUs, got {device!r}": tp > 1 and ":" in device,
            "--nccl must come with --tp 2 or more": nccl and tp == 1,
            "--weights must come without --tp, --compare and --engine mega": weights is not None and (tp > 1 or compare or engine == "mega"),
            "--temperature must be 0 with --compare and --prompt-tokens": temperature > 0 and (compare or prompt_tokens > 0),
        }
    )
    texts = prompts_of(prompt_file, lines=batch is not None) if prompt_file else [prompt]
    from .engine.mega.pack import refuse_outline
    from .models import Draw
    from .models.batch import Questions, answers_command, answers_of_rank
    from .models.command import Question, answer_command, answer_of_rank, device_and_dtype, load_and_say

    where, number_type = device_and_dtype(device, dtype, weights)
    if engine == "graph" and where.type == "cpu":
        raise ValueError("--engine must be eager or transformers on a CPU: a CUDA graph needs an NVIDIA GPU, got 'graph'")
    if engine == "mega":
        refuse_outline(model, where, number_type, trust_remote_code=trust_remote_code)
    how: Any = {"raw": raw, "engine": engine, "stock": compare}
    draw = Draw(temperature, seed, top_k, top_p, min_p, repetition_penalty, tuple(stop or ()))
    one: tuple[Any, Any, Any] = Question(texts[0], max_new_tokens, draw, **how), answer_command, answer_of_rank
    many: tuple[Any, Any, Any] = Questions(tuple(texts), batch or 1, max_new_tokens, draw, **how), answers_command, answers_of_rank
    asked, answer, of_rank = one if batch is None else many
    with full_gpu_explained():
        if not prompt_tokens and tp == 1:
            return int(answer(model, where, number_type, asked, json_file=json_file, trust_remote_code=trust_remote_code, weights=weights))
        from .engine.command import Sizes, measure_command, measure_rank, tell
        from .engine.ranks import run_ranks

        ranks: Any = {"ranks": tp, "device": where.type, "direct": False if nccl else None}
        if not prompt_tokens:
            return int(run_ranks(of_rank, model, number_type, asked, json_file, trust_remote_code, **ranks))
        sizes = Sizes(batch or 1, prompt_tokens, max_new_tokens)
        if tp > 1:
            return tell(run_ranks(measure_rank, model, number_type, sizes, engine, compare, trust_remote_code, **ranks), json_file=json_file)
        loaded = load_and_say(model, where, number_type, trust_remote_code=trust_remote_code, weights=weights)
        baselines = ("eager", "compiled") if compiled else ("eager",) if compare else ()
        return measure_command(loaded, sizes, engine=engine, baselines=baselines, json_file=json_file)


@verb
def serve(  # noqa: PLR0913 an option each
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a .gguf file, with its tokenizer.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, option("--api-key", "The key that clients must send. Default: none.", metavar="KEY", envvar="TILEWRIGHT_API_KEY")
    ] = None,
    max_requests: Annotated[int, typer.Option("--max-requests", metavar="N", help="Requests that may wait and run at once; more get 429.")] = 256,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", metavar="N", help="Longest body of a request; a longer one gets 413.")] = 2**21,
    max_batch_tokens: Annotated[
        int | None, option("--max-batch-tokens", "Most tokens of a step, over all requests. Default: 8192; 128 on a CPU.", metavar="N")
    ] = None,
    cache_pages: Annotated[
        int | None, option("--cache-pages", "Pages of 256 tokens. Default: a tenth of the available memory; on a GPU, what is free.", metavar="N")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", metavar="S", min=0, help="How long running requests may go on after SIGTERM or Ctrl-C.")
    ] = 30.0,
    device: DeviceName = "",
    dtype: Dtype = "",
    trust_remote_code: Trust = False,
    weights: Weights = None,
) -> int:
    """Serve a model to many OpenAI clients: transformers' scheduler and pages, our kernels."""
    from .models.command import device_and_dtype, load_and_say
    from .models.serve import serve_command

    loaded = load_and_say(model, *device_and_dtype(device, dtype, weights), trust_remote_code=trust_remote_code, weights=weights)
    limits = {"max_requests": max_requests, "max_body_bytes": max_body_bytes, "max_batch_tokens": max_batch_tokens, "cache_pages": cache_pages}
    return serve_command(loaded, drain_seconds=drain_seconds, host=host, port=port, api_key=api_key, **limits)


@verb
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a .gguf file.")],
    weight_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="E.g. int4-128, e4m3 or mxfp4; a wrong one lists all.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the model goes: new or empty.")],
    device: DeviceName = "",
    trust_remote_code: Trust = False,
) -> int:
    """Write a model with weights of 4 or 8 bits, rounded to nearest, for `generate` and `serve`."""
    from .models.command import device_and_dtype, quantize_command

    return quantize_command(model, device_and_dtype(device, "bfloat16")[0], weight_format, out, trust_remote_code=trust_remote_code)


@verb
def difftest(  # noqa: PLR0913 an option each
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="As of generate; a config's name takes random weights.")] = "Llama-3.2-1B",
    layers: Annotated[int, option("--layers", "Only the first N layers. Default: all.", metavar="N")] = 0,
    position: Annotated[int, typer.Option("--position", help="Position of the token: as many keys are in the cache.")] = 100,
    blocks: Annotated[int, option("--blocks", "Blocks of the kernel. Default: one for each multiprocessor.")] = 0,
    schedule: Annotated[str, option("--schedule", "Run the reference machine alone, with this GPU's schedule, e.g. GB10.", metavar="GPU")] = "",
    device: DeviceName = "",
    dtype: Dtype = "",
    trust_remote_code: Trust = False,
    json_file: Json = None,
) -> int:
    """Run one token through the megakernel and its reference machine and compare every intermediate
    value; exit with 1 if one breaks the rule.
    """
    from .engine.mega.difftest import decided, difftest_command
    from .models import outline_of
    from .models.command import device_and_dtype, load_and_say

    where, number_type = device_and_dtype(device, dtype or "bfloat16")
    whole = decided(outline_of(model, dtype=number_type, trust_remote_code=trust_remote_code), where, layers=layers)
    loaded = load_and_say(model, where, number_type, layers=layers, trust_remote_code=trust_remote_code)
    return difftest_command(loaded.model, whole=whole, position=position, blocks=blocks, gpu=schedule, json_file=json_file)
