"""`tilewright <verb>`: a verb reads its options, then imports and calls one function."""

import functools
import gc
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from . import cli_models  # noqa: F401 adds its verbs
from .cli_app import SUITES, DeviceName, Gpu, Jobs, Json, Ops, app, option, verb
from .command_line import check_name, refuse as _refuse, terminal


@verb
def bench(  # noqa: PLR0913 an option each
    ops: Ops = None,
    json_file: Json = None,
    case: Annotated[str, option("--case", "Only cases whose name contains this text.")] = "",
    suite: Annotated[
        str, option("--suite", "Instead: playbook, llm, seeds (problems with a published figure) or decode (whole models).", metavar="NAME")
    ] = "",
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time PyTorch, cuBLAS, cuDNN and other libraries beside ours.")] = True,
    defaults: Annotated[bool, typer.Option("--defaults", help="Use untuned configs, even if tuned ones are stored.")] = False,
    seconds: Annotated[float, option("--seconds", "Begin no case after this many seconds; finished cases are kept.", min=0)] = float("inf"),
    draw: Annotated[int, option("--draw", "Draw N problems with each --seed, instead of the listed ones.", metavar="N", min=0)] = 0,
    seed: Annotated[list[int] | None, option("--seed", "Seed of --draw, not 1000 to 2999. May be repeated.", metavar="S")] = None,
    jobs: Annotated[int, option("--jobs", "Check all cases and compile for them in N processes, before any is timed.", metavar="N", min=1)] = 1,
    device: Gpu = "cuda",
) -> int:
    """Time ops on a GPU, one line per case; --json appends JSON lines."""
    if suite:
        check_name("--suite", SUITES, suite)
    _refuse(
        {
            "--draw and --seed must come together, and without --suite": bool(suite and (draw or seed)),
            "--jobs must come without --suite decode": jobs > 1 and suite == "decode",
        }
    )
    how: Any = {"json_file": json_file, "case": case, "peers": peers, "seconds": seconds, "device": device}
    if suite == "decode":
        from .engine.suite import decode_command

        return decode_command(**how)
    from .bench.command import bench_command

    if suite == "llm":
        from .engine.problems import of_all

        return bench_command(ops, problems=of_all, defaults=defaults, jobs=jobs, **how)
    return bench_command(ops, suite=suite, draw=draw, draw_seeds=seed or (), defaults=defaults, jobs=jobs, **how)


@verb
def profile(
    what: Annotated[str, typer.Argument(metavar="OP|generate", help="An op, for the counters of ncu; or generate, for its kernels by nsys.")],
    case: Annotated[str, option("--case", "For an op: the first benchmark case whose name contains this text.")] = "",
    lines: Annotated[int, option("--lines", "For an op: also the N instructions where warps wait most.", metavar="N", min=0)] = 0,
    options: Annotated[str, option("--options", "For generate: its options, as one text.", metavar="TEXT")] = "",
    json_file: Json = None,
) -> int:
    """Profile on a GPU: registers, occupancy, shares of the peaks, stalls and the roof."""
    as_in = "profile generate --options '--model NAME --prompt TEXT'"
    _refuse({f"--options must be given with generate, and only there, as in {as_in}": (what == "generate") != bool(options)})
    from .bench.profile import profile_command

    return profile_command(what, case=case, lines=lines, generate=shlex.split(options), json_file=json_file)


@verb
def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Files of JSON lines, as `bench --json` writes them.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where index.html and the drawings go.")] = Path("report"),
    against: Annotated[list[Path] | None, option("--against", "Older results to compare with; may be repeated.", metavar="FILE")] = None,
) -> int:
    """Draw results as one HTML page, with roofline, peers, scaling, platforms and changes; also as
    PNG files.
    """
    from .bench.page import report_command

    return report_command(results, out=out, against=against or ())


@verb
def tune(  # noqa: PLR0913 an option each
    ops: Ops = None,
    model: Annotated[str, option("--model", "The problems of the engine with this model, e.g. Llama-3.1-8B.", metavar="NAME")] = "",
    shapes: Annotated[Path | None, option("--shapes", "The problems in a file of JSON lines, each with op and problem.", metavar="FILE")] = None,
    from_log: Annotated[bool, typer.Option("--from-log", help="The problems of programs that ran with TILEWRIGHT_SHOW_PLANS=log.")] = False,
    case: Annotated[str, option("--case", "Only problems whose name contains this text.")] = "",
    configs: Annotated[
        str, option("--configs", "Only configs with these values, e.g. tile_m=128,latency=4; stores nothing.", metavar="F=V,...")
    ] = "",
    top: Annotated[int, typer.Option("--top", min=0, metavar="N", help="Print the N fastest configs of each problem.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Measure problems again that are already tuned.")] = False,
    seconds: Annotated[float, option("--seconds", "Begin no problem after this many seconds; finished problems are kept.", min=0)] = float("inf"),
    jobs: Jobs = None,
    device: Gpu = "cuda",
    show: Annotated[bool, typer.Option("--show", help="Print the stored rows (with --case, some of them); tune nothing.")] = False,
    json_file: Json = None,
    export: Annotated[Path | None, option("--export", "Write the valid rows to FILE.", metavar="FILE")] = None,
    import_file: Annotated[Path | None, option("--import", "Add the rows of FILE.", metavar="FILE")] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove rows whose kernel or compiler has changed.")] = False,
    survey: Annotated[
        bool, typer.Option("--survey", help="Keep the times of many configs of drawn problems, or of those of --shapes; resumes. No row is stored.")
    ] = False,
    raw: Annotated[Path | None, option("--raw", "Folder of the raw times, for --survey, --pack and --fit.", metavar="FOLDER")] = None,
    seed: Annotated[int, option("--seed", "The first seed of a survey, 1000 to 2999.", metavar="FIRST")] = 1000,
    processes: Annotated[int | None, typer.Option("--processes", min=1, metavar="N", help="Processes of a survey, which share the GPU.")] = None,
    pack: Annotated[Path | None, option("--pack", "Pack the raw times into FOLDER, to hand in.", metavar="FOLDER")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the cost model to raw times, by default those that ship; needs no GPU.")] = False,
) -> int:
    """Find the fastest config of each problem on this GPU and store it for all later calls."""
    from .tune import command

    modes = {"--show": show, "--export": export, "--import": import_file, "--prune": prune, "--survey": survey, "--pack": pack, "--fit": fit}
    chosen = [name for name, given in modes.items() if given]
    tuning = {"--model": model, "--shapes": shapes and not survey, "--from-log": from_log, "--configs": configs, "--top": top, "--again": again}
    _refuse(
        {
            "at most one of --show, --export, --import, --prune, --survey, --pack and --fit must be given": len(chosen) > 1,
            "--json must come with --show": bool(json_file) and not show,
            "--processes must come with --survey": bool(processes) and not survey,
            "--raw must come with --survey, --pack or --fit": bool(raw) and not (survey or pack or fit),
            **{f"{name} must come without {' and '.join(chosen)}": bool(chosen and given) for name, given in tuning.items()},
        }
    )
    if survey:
        return command.survey_command(ops, folder=raw, seconds=seconds, jobs=jobs, device=device, seed=seed, shapes=shapes, processes=processes)
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
        float | None, typer.Option("--fuzz", metavar="SECONDS", min=0, help="Instead, draw random calls for this long.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --fuzz: the same seed draws the same calls.")] = 0,
    case: Annotated[str, typer.Option("--case", metavar="FAMILY.CASE", help="With --fuzz: only this call.", show_default=False)] = "",
    jobs: Annotated[int | None, option("--jobs", "Processes of --fuzz. Default: one; on a GPU up to 16.", min=1)] = None,
) -> int:
    """Check the accuracy of ops on this machine, one line per op; exit with 1 if any is wrong."""
    _refuse({"--quick must come without --fuzz": quick and fuzz is not None})
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
        list[str] | None,
        typer.Argument(metavar="OP | FILE.py:KERNEL | mega", help="Ops, your own kernels, or the megakernel. Default: all ops.", show_default=False),
    ] = None,
    arch: Annotated[str, option("--arch", "Targets, e.g. sm_90,sm_121. Default: all; for your own kernels sm_90,sm_121.", metavar="ARCH,...")] = "",
    json_file: Json = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Default configs only, not every config of the space.")] = False,
    jobs: Jobs = None,
) -> int:
    """Compile ops for any GPU, without having one: registers, spills, shared memory, instructions;
    exits with 1 if a default config spills.
    """
    own = [name for name in ops or () if ".py" in name]
    _refuse(
        {
            f"ops and kernels of files must be compiled apart, got {', '.join(ops or ())}": 0 < len(own) < len(ops or ()),
            "--defaults must come with ops: others have one config": defaults and bool(own or ops == ["mega"]),
            "--jobs must come with ops or mega": bool(own and jobs),
        }
    )
    if own:
        from .compile.own_command import compile_own_command

        return compile_own_command(own, archs=arch.split(",") if arch else ("sm_90", "sm_121"), json_file=json_file)
    if ops == ["mega"]:
        from .engine.mega.resources import compile_mega_command

        return compile_mega_command(arch=arch, json_file=json_file, jobs=jobs)
    from .compile.command import compile_command

    return compile_command(ops, arch=arch, json_file=json_file, defaults=defaults, jobs=jobs)


@verb
def interpret(
    kernel: Annotated[
        str, typer.Argument(metavar="FILE.py:KERNEL", help="A kernel; example_KERNEL() in the same file returns its grid and arguments.")
    ],
    races: Annotated[bool, typer.Option("--races/--no-races", help="Report races: accesses of different blocks with no order between them.")] = True,
    block_order: Annotated[
        str, typer.Option("--block-order", metavar="ORDER", help="forward, reverse, or a seed that shuffles the blocks.")
    ] = "forward",
    unwritten: Annotated[bool, typer.Option("--unwritten", help="Report outputs with unwritten elements.")] = False,
    strict_bounds: Annotated[
        bool, typer.Option("--strict-bounds", help="Report gathers and scatters outside their array, which padding would hide.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Run the kernel's own lines, for python -m pdb -m tilewright interpret ...")] = False,
    trace: Annotated[Path | None, option("--trace", "Draw what each block loaded, stored and multiplied, as HTML.", metavar="FILE")] = None,
    json_file: Json = None,
) -> int:
    """Run your own kernel without a GPU; exits with 1 if it does something undefined."""
    named = block_order in ("forward", "reverse")
    _refuse({f"--block-order must be forward, reverse or a seed, got {block_order!r}": not named and not block_order.isdecimal()})
    from .compile.own_command import interpret_command

    order: Any = block_order if named else int(block_order)
    looked = {"races": races, "unwritten": unwritten, "strict_bounds": strict_bounds, "debug": debug}
    return interpret_command(kernel, json_file=json_file, trace=trace, block_order=order, **looked)


@verb
def learn(  # noqa: PLR0913 an option each
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="What to learn about: attention, gemm or decode.")],
    seq: Annotated[str, option("--seq", "Sequence lengths of attention. Default: 2048, with --plot 1024 to 16384.", metavar="N,N,...")] = "",
    batch: Annotated[int | None, option("--batch", "Batch of attention. Default: 4, as published.", metavar="N", min=1)] = None,
    heads: Annotated[int | None, option("--heads", "Heads of attention. Default: 32.", metavar="N", min=1)] = None,
    head_dim: Annotated[
        int | None, option("--head-dim", "Head dimension of attention: 16, 32, 64, 128 or 256. Default: 128.", metavar="N", min=1)
    ] = None,
    non_causal: Annotated[bool, typer.Option("--non-causal", help="Attention without a causal mask: every query sees all keys.")] = False,
    iterations: Annotated[
        int | None, option("--iterations", "Rounds of timing, of which the median counts. Default: 15.", metavar="N", min=1)
    ] = None,
    arch: Annotated[str, option("--arch", "Time nothing; show the resources for this target.", metavar="ARCH")] = "",
    plot: Annotated[Path | None, option("--plot", "Draw rates over sequence lengths, as PNG.", metavar="FILE")] = None,
    json_file: Json = None,
) -> int:
    """Climb a ladder of kernels, each with one more idea than the last: timed on a GPU, interpreted
    and compiled without one.
    """
    from .learn.command import learn_command

    words = [word.strip() for word in seq.split(",")] if seq else []
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--seq must be lengths like 1024,2048, got {seq!r}")
    sizes = {"batch": batch, "heads": heads, "head_dim": head_dim, "causal": not non_causal}
    how: Any = {"sizes": sizes, "seq_lens": [int(word) for word in words]}
    return learn_command(subject, **how, iterations=iterations, arch=arch, json_file=json_file, plot=plot)


@verb
def doctor(json_file: Json = None) -> int:
    """Show what works on this machine and how to fix the rest: GPU, driver, compiler, caches."""
    from .doctor import doctor_command

    return doctor_command(json_file=json_file)


def main() -> None:
    # Imports and typed kernels make a million objects that stay: a tenth of a short run's time.
    gc.set_threshold(1_000_000, 20, 100)
    with terminal():
        app()


if __name__ == "__main__":
    main()
