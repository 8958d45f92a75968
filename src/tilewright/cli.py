"""`tilewright <verb>`: a verb reads its options, then imports and calls one function."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .command_line import command, state

app = typer.Typer(
    help="Kernels for language models in cuTile Python: compiled on a GPU, interpreted on a CPU.",
    epilog="Exit codes: 0 fine; 1 something is wrong; 2 it cannot run; 130 stopped by Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def option(name: str, told: str, **more: Any) -> Any:
    """An option whose help says its default, if it has one."""
    return typer.Option(name, help=told, show_default=False, **more)


Ops = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Names of ops; all of them if none is given.", show_default=False)]
Json = Annotated[Path | None, option("--json", "Write the results as JSON too; - is stdout, with the text on stderr.", metavar="FILE")]
DeviceName = Annotated[str, option("--device", "cpu, cuda or cuda:N. Default: a GPU if there is one.", metavar="DEVICE")]
Gpu = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cuda or cuda:N.")]
Jobs = Annotated[int | None, option("--jobs", "Compilers to run at once. Default: one a core.", min=1)]
Dtype = Annotated[str, option("--dtype", "float32, bfloat16 or float16. Default: float32 on a CPU, else bfloat16.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's folder run its own Python, which can do all that you can. Read it first.")
]

SUITES = ("playbook", "llm", "seeds", "decode")
ENGINES = ("mega", "graph", "eager", "transformers")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        from . import __version__

        typer.echo(f"tilewright {__version__}, cuda-tile {version('cuda-tile')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="On an error show the whole Python traceback.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions.")] = False,
) -> None:
    state["traceback"] = traceback


def verb(function: Callable[..., int]) -> Callable[..., None]:
    return app.command(name=function.__name__)(command(function))


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
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="A Hugging Face folder, a .gguf file, or a config's name (random weights).")],
    prompt: Annotated[str, option("--prompt", "The prompt itself.")] = "",
    prompt_file: Annotated[Path | None, option("--prompt-file", "A file with the prompt; - reads stdin.")] = None,
    prompt_tokens: Annotated[int, option("--prompt-tokens", "Random prompts of N tokens instead, timed.", metavar="N")] = 0,
    batch: Annotated[int, typer.Option("--batch", help="Prompts at once, with --prompt-tokens.")] = 1,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="Draw tokens of a text; 0 takes the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of --temperature: the same seed, the same text.")] = 0,
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="mega, graph, eager (our engine), or transformers (the model patched).")
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
    json_file: Json = None,
) -> int:
    """Write text, as it comes; or, with --prompt-tokens, measure how fast: times, kernels,
    share of the bandwidth floor.
    """
    _refuse(
        {
            "exactly one of --prompt, --prompt-file and --prompt-tokens must be given": bool(prompt) + bool(prompt_file) + (prompt_tokens > 0) != 1,
            f"--engine must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, got {engine!r}": engine not in ENGINES,
            f"--batch must be 1 with --engine mega, got {batch}": engine == "mega" and batch != 1,
            "--compiled must come with --compare and --prompt-tokens": compiled and not (compare and prompt_tokens),
            f"--batch must be 1 with a text, got {batch}": batch != 1 and not prompt_tokens,
            f"--engine must be graph or eager with --tp, got {engine!r}": tp > 1 and engine not in ("graph", "eager"),
            "--compare must come with --prompt-tokens and without --compiled where --tp is given": tp > 1
            and (compiled or (compare and not prompt_tokens)),
            f"--device must be cuda or cpu with --tp, which takes the first GPUs, got {device!r}": tp > 1 and ":" in device,
            "--nccl must come with --tp 2 or more": nccl and tp == 1,
            "--temperature must be 0 with --compare, --prompt-tokens and --engine mega": temperature > 0
            and (compare or prompt_tokens > 0 or engine == "mega"),
        }
    )
    if prompt_file:
        prompt = sys.stdin.read() if str(prompt_file) == "-" else prompt_file.read_text()
    from .models import Draw
    from .models.command import Question, answer_command, answer_of_rank, device_and_dtype, load_and_say

    where, number_type = device_and_dtype(device, dtype)
    if engine == "graph" and where.type == "cpu":
        raise ValueError("--engine must be eager or transformers on a CPU: a CUDA graph needs an NVIDIA GPU, got 'graph'")
    question = Question(prompt, max_new_tokens, Draw(temperature, seed), raw=raw, engine=engine, stock=compare)
    with _full_gpu_explained():
        if not prompt_tokens and tp == 1:
            return answer_command(model, where, number_type, question, json_file=json_file, trust_remote_code=trust_remote_code)
        from .engine.command import Sizes, measure_command, measure_rank, tell
        from .engine.ranks import run_ranks

        ranks: Any = {"ranks": tp, "device": where.type, "direct": False if nccl else None}
        if not prompt_tokens:
            return int(run_ranks(answer_of_rank, model, number_type, question, json_file, trust_remote_code, **ranks))
        sizes = Sizes(batch, prompt_tokens, max_new_tokens)
        if tp > 1:
            return tell(run_ranks(measure_rank, model, number_type, sizes, engine, compare, trust_remote_code, **ranks), json_file=json_file)
        loaded = load_and_say(model, where, number_type, trust_remote_code=trust_remote_code)
        baselines = ("eager", "compiled") if compiled else ("eager",) if compare else ()
        return measure_command(loaded, sizes, engine=engine, baselines=baselines, json_file=json_file)


@verb
def serve(  # noqa: PLR0913 an option each
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a .gguf file, with its tokenizer.")],
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = "localhost",
    port: Annotated[int, typer.Option("--port", help="Where to listen; 0 takes a free port.")] = 8000,
    api_key: Annotated[
        str | None, option("--api-key", "What clients have to send. Default: nothing.", metavar="KEY", envvar="TILEWRIGHT_API_KEY")
    ] = None,
    max_requests: Annotated[int, typer.Option("--max-requests", metavar="N", help="That wait and run at once; others get 429.")] = 256,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", metavar="N", help="Of a request; longer ones get 413.")] = 2**21,
    max_batch_tokens: Annotated[
        int | None, option("--max-batch-tokens", "Tokens of a step, over all requests. Default: 8192; 128 on a CPU.", metavar="N")
    ] = None,
    cache_pages: Annotated[
        int | None, option("--cache-pages", "Pages of 256 tokens. Default: a tenth of the available memory; on a GPU, what is free.", metavar="N")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", metavar="S", min=0, help="In which running requests may finish after SIGTERM or Ctrl-C.")
    ] = 30.0,
    device: DeviceName = "",
    dtype: Dtype = "",
    trust_remote_code: Trust = False,
) -> int:
    """Serve a model to many OpenAI clients: transformers' scheduler and pages, our kernels."""
    from .models.command import device_and_dtype, load_and_say
    from .models.serve import serve_command

    loaded = load_and_say(model, *device_and_dtype(device, dtype), trust_remote_code=trust_remote_code)
    limits = {"max_requests": max_requests, "max_body_bytes": max_body_bytes, "max_batch_tokens": max_batch_tokens, "cache_pages": cache_pages}
    return serve_command(loaded, drain_seconds=drain_seconds, host=host, port=port, api_key=api_key, **limits)


@verb
def bench(  # noqa: PLR0913 an option each
    ops: Ops = None,
    json_file: Json = None,
    case: Annotated[str, option("--case", "Only cases whose name contains this text.")] = "",
    suite: Annotated[
        str, option("--suite", "playbook, llm, seeds (what has a published figure) or decode (whole models) instead.", metavar="NAME")
    ] = "",
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time PyTorch, cuBLAS, cuDNN and other libraries beside ours.")] = True,
    defaults: Annotated[bool, typer.Option("--defaults", help="Untuned configs, whatever is tuned.")] = False,
    seconds: Annotated[float, option("--seconds", "Begin no case after as many; what is done is kept.", min=0)] = float("inf"),
    draw: Annotated[int, option("--draw", "N problems drawn with each --seed instead of the listed ones.", metavar="N", min=0)] = 0,
    seed: Annotated[list[int] | None, option("--seed", "Of --draw, not 1000 to 1999; may be repeated.", metavar="S")] = None,
    device: Gpu = "cuda",
) -> int:
    """Time ops on a GPU: one line a case; --json appends JSON lines."""
    _refuse(
        {
            f"--suite must be one of {', '.join(SUITES)}, got {suite!r}": suite not in ("", *SUITES),
            "--draw and --seed must come together, and without --suite": bool(suite and (draw or seed)),
        }
    )
    how: Any = {"json_file": json_file, "case": case, "peers": peers, "seconds": seconds, "device": device}
    if suite == "decode":
        from .engine.suite import decode_command

        return decode_command(**how)
    from .bench.command import bench_command

    if suite == "llm":
        from .engine.problems import of_all

        return bench_command(ops, problems=of_all, defaults=defaults, **how)
    return bench_command(ops, suite=suite, draw=draw, draw_seeds=seed or (), defaults=defaults, **how)


@verb
def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Files of JSON lines, as `bench --json` writes them.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where index.html and the drawings go.")] = Path("report"),
    against: Annotated[list[Path] | None, option("--against", "Older results to compare with; may be repeated.", metavar="FILE")] = None,
) -> int:
    """Draw results: one HTML page with roofline, peers, scaling, platforms and what changed, and
    its drawings as PNG files.
    """
    from .bench.page import report_command

    return report_command(results, out=out, against=against or ())


@verb
def tune(  # noqa: PLR0913 an option each
    ops: Ops = None,
    model: Annotated[str, option("--model", "What the engine asks to run this model, e.g. Llama-3.1-8B.", metavar="NAME")] = "",
    shapes: Annotated[Path | None, option("--shapes", "Problems of a file of JSON lines with op and problem.", metavar="FILE")] = None,
    from_log: Annotated[bool, typer.Option("--from-log", help="Problems that programs met which ran with TILEWRIGHT_SHOW_PLANS=log.")] = False,
    case: Annotated[str, option("--case", "Only problems whose name contains this text.")] = "",
    configs: Annotated[
        str, option("--configs", "Only configs with these values, e.g. tile_m=128,latency=4; stores nothing.", metavar="F=V,...")
    ] = "",
    top: Annotated[int, typer.Option("--top", min=0, help="Print as many of the fastest configs of each problem.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Measure what is tuned already, too.")] = False,
    seconds: Annotated[float, option("--seconds", "Begin no problem after as many; what is done is kept.", min=0)] = float("inf"),
    jobs: Jobs = None,
    device: Gpu = "cuda",
    show: Annotated[bool, typer.Option("--show", help="Print what is stored, with --case what contains a text; tune nothing.")] = False,
    json_file: Json = None,
    export: Annotated[Path | None, option("--export", "Write the rows that still hold to FILE.", metavar="FILE")] = None,
    import_file: Annotated[Path | None, option("--import", "Add the rows of FILE.", metavar="FILE")] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove rows whose kernel or compiler has changed.")] = False,
    survey: Annotated[
        bool, typer.Option("--survey", help="Time many configs of drawn problems and keep every time; resumes. No row is stored.")
    ] = False,
    raw: Annotated[Path | None, option("--raw", "Where raw times are, with --survey, --pack and --fit.", metavar="FOLDER")] = None,
    seed: Annotated[int, option("--seed", "The seed that a survey begins with, 1000 to 1999.", metavar="FIRST")] = 1000,
    pack: Annotated[Path | None, option("--pack", "Pack the raw times into FOLDER, to hand in.", metavar="FOLDER")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the cost model to raw times, those that ship by default; needs no GPU.")] = False,
) -> int:
    """Find the fastest config of each problem on this GPU and store it, for every later call."""
    from .tune import command

    if sum(map(bool, (show, export, import_file, prune, survey, pack, fit))) > 1:
        raise ValueError("at most one of --show, --export, --import, --prune, --survey, --pack and --fit must be given")
    _refuse({"--json must come with --show": bool(json_file) and not show})
    if raw and not (survey or pack or fit):
        raise ValueError("--raw must come with --survey, --pack or --fit")
    if survey:
        return command.survey_command(ops, folder=raw, seconds=seconds, jobs=jobs, device=device, seed=seed)
    if pack:
        return command.pack_command(pack, folder=raw)
    if fit:
        from .tune.fit import fit_command

        return fit_command(ops, folder=raw)
    if show:
        return command.show_command(ops, case=case, json_file=json_file)
    if export:
        return command.export_command(export, ops)
    if import_file:
        return command.import_command(import_file)
    if prune:
        return command.prune_command()
    problems = None
    if model:
        from .engine.problems import of_engine  # the engine and transformers: only here

        problems = functools.partial(of_engine, model)
    which: Any = {"problems": problems, "shapes": shapes, "from_log": from_log, "case": case, "configs": configs}
    return command.tune_command(ops, **which, top=top, again=again, seconds=seconds, jobs=jobs, device=device)


@verb
def verify(
    ops: Ops = None,
    quick: Annotated[bool, typer.Option("--quick", help="Default configs only, not every config of the space.")] = False,
    json_file: Json = None,
    device: DeviceName = "",
    fuzz: Annotated[
        float | None, typer.Option("--fuzz", metavar="SECONDS", min=0, help="Draw calls for so long instead, any shapes.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of --fuzz: one seed, one sequence of calls.")] = 0,
    case: Annotated[str, typer.Option("--case", metavar="FAMILY.CASE", help="With --fuzz: this call alone.", show_default=False)] = "",
    jobs: Annotated[int | None, option("--jobs", "Of --fuzz: processes. Default: one, on a GPU up to 8.", min=1)] = None,
) -> int:
    """Check the accuracy of ops on this machine: one line each; exits with 1 if any is off."""
    if fuzz is not None:
        from .bench.report import tell
        from .testing.fuzz import fuzz_command

        row = functools.partial(tell, file=json_file) if json_file else None
        return fuzz_command(ops, seconds=fuzz, seed=seed, case=case, device=device, jobs=jobs, tell=row)
    _refuse({"--case must come with --fuzz": bool(case)})
    from .testing.command import verify_command

    return verify_command(ops, quick=quick, json_file=json_file, device=device)


@verb
def compile(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP | FILE.py:KERNEL]...", help="Ops, or kernels of yours. Default: all ops.", show_default=False)
    ] = None,
    arch: Annotated[str, option("--arch", "Targets, e.g. sm_90,sm_121. Default: all; sm_90,sm_121 for yours.", metavar="ARCH,...")] = "",
    json_file: Json = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Default configs only, not every config of the space.")] = False,
    jobs: Jobs = None,
) -> int:
    """Compile ops for any GPU, with none present: registers, spills, shared memory, instructions;
    exits with 1 if a default config spills.
    """
    own = [name for name in ops or () if ".py" in name]
    _refuse({f"ops and kernels of files must be compiled apart, got {', '.join(ops or ())}": 0 < len(own) < len(ops or ())})
    if own:
        from .compile.own_command import compile_own_command

        return compile_own_command(own, archs=arch.split(",") if arch else ("sm_90", "sm_121"), json_file=json_file)
    from .compile.command import compile_command

    return compile_command(ops, arch=arch, json_file=json_file, defaults=defaults, jobs=jobs)


@verb
def interpret(
    kernel: Annotated[str, typer.Argument(metavar="FILE.py:KERNEL", help="A kernel; example_KERNEL() of the file makes its grid and arguments.")],
    races: Annotated[bool, typer.Option("--races/--no-races", help="Report accesses of different blocks that nothing orders.")] = True,
    block_order: Annotated[str, typer.Option("--block-order", metavar="ORDER", help="forward, reverse, or a seed that shuffles them.")] = "forward",
    unwritten: Annotated[bool, typer.Option("--unwritten", help="Report outputs with elements that nobody wrote.")] = False,
    strict_bounds: Annotated[bool, typer.Option("--strict-bounds", help="Report gathers and scatters outside that padding would hide.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Run the kernel's own lines: python -m pdb -m tilewright interpret ...")] = False,
    trace: Annotated[Path | None, option("--trace", "Draw what each block loaded, stored and multiplied, as HTML.", metavar="FILE")] = None,
    json_file: Json = None,
) -> int:
    """Run a kernel of yours without a GPU; exits with 1 if it did something undefined."""
    named = block_order in ("forward", "reverse")
    _refuse({f"--block-order must be forward, reverse or a seed, got {block_order!r}": not named and not block_order.isdigit()})
    from .compile.own_command import interpret_command

    order: Any = block_order if named else int(block_order)
    looked = {"races": races, "unwritten": unwritten, "strict_bounds": strict_bounds, "debug": debug}
    return interpret_command(kernel, json_file=json_file, trace=trace, block_order=order, **looked)


@verb
def learn(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="What to learn about: attention or gemm.")],
    seq: Annotated[str, option("--seq", "Sequence lengths of attention. Default: 2048, with --plot 1024 to 16384.", metavar="N,N,...")] = "",
    arch: Annotated[str, option("--arch", "Time nothing; show the resources on this target.", metavar="ARCH")] = "",
    plot: Annotated[Path | None, option("--plot", "Draw rates over sequence lengths, as PNG.", metavar="FILE")] = None,
    json_file: Json = None,
) -> int:
    """Walk up a ladder of kernels, each one idea faster than the last: timed on a GPU, interpreted
    and compiled without one.
    """
    from .learn.command import learn_command

    words = [word.strip() for word in seq.split(",")] if seq else []
    if not all(word.isdigit() for word in words):
        raise ValueError(f"--seq must be lengths like 1024,2048, got {seq!r}")
    return learn_command(subject, seq_lens=[int(word) for word in words], arch=arch, json_file=json_file, plot=plot)


@verb
def difftest(  # noqa: PLR0913 an option each
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="As of generate; a config's name takes random weights.")] = "Llama-3.2-1B",
    layers: Annotated[int, option("--layers", "Only the first N layers. Default: all.", metavar="N")] = 0,
    position: Annotated[int, typer.Option("--position", help="Where the token stands: as many keys lie in the cache.")] = 100,
    blocks: Annotated[int, option("--blocks", "Blocks of the kernel. Default: one a multiprocessor.")] = 0,
    schedule: Annotated[str, option("--schedule", "This GPU's schedule, e.g. GB10, in the machine alone.", metavar="GPU")] = "",
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


@verb
def doctor(json_file: Json = None) -> int:
    """Say what works on this machine and how to fix the rest: GPU, driver, compiler, caches."""
    from .doctor import doctor_command

    return doctor_command(json_file=json_file)


def _refuse(rules: dict[str, bool]) -> None:
    """Raises ValueError with the first message that holds."""
    for message, broken in rules.items():
        if broken:
            raise ValueError(message)


@contextlib.contextmanager
def _full_gpu_explained() -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        lower = "lower --batch, --prompt-tokens or --max-new-tokens, or take a smaller model"
        raise MemoryError(f"{str(error).splitlines()[0]} {lower}") from error


def main() -> None:
    app()


if __name__ == "__main__":
    main()
