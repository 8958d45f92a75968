"""Writes the tables in README.md and docs from benchmarks/results/*.jsonl, and the list of ops.

These numbers are never typed by hand.

python tools/readme_numbers.py           rewrite
python tools/readme_numbers.py --check   exit 1 if a file is stale (a test runs this)
"""

import statistics
import sys
import textwrap
from functools import partial
from pathlib import Path

import torch

from tilewright import ops
from tilewright.bench.drawn import newest_seeds
from tilewright.bench.published import SHEETS, Figure, best_row, figures
from tilewright.bench.results import Judged, against_peers, judge, kernels, newest, read
from tilewright.launch import Device
from tilewright.launch.table import read_rows
from tilewright.learn import ladders
from tilewright.testing import op_name
from tilewright.testing.cases import cases
from tilewright.tune.command import gains_by_op

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ("", lambda r: True)
LEAST_DRAWN = 10  # drawn problems of an op, from as few of its newest seeds as have so many
# Of ops whose rows are unlike kinds: what each is called, and which rows it has.
KINDS = {
    "matmul": (
        ("", lambda r: r["problem"].get("scaling", "NONE") in ("NONE", 0)),
        (", fp8, scale per tensor or row", lambda r: r["problem"].get("scaling") in (1, 2, "TENSOR", "ROW")),
        (", fp8, scale per block", lambda r: r["problem"].get("scaling") in (3, "BLOCK")),
    ),
    "attention_decode": (("", lambda r: r["problem"]["head_dim"] <= 256), (", one key head of 512", lambda r: r["problem"]["head_dim"] > 256)),
}
HEADLINE = (  # a row or two of each kind of op, losses among them
    "rms_norm", "softmax", "quantize_fp8", "matmul", "matmul, fp8, scale per block", "bmm", "moe", "attention", "attention_decode", "mla_decode",
)  # fmt: skip


def prose(text: str, indent: str = "") -> str:
    """Lines of at most 100 columns, those behind the first indented."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def judged_ops(rows: list[dict]) -> list[tuple[Judged, list[dict]]]:
    """Every op that has rows, in the order of `ops.ALL`, with its rows."""
    found = []
    for name in map(op_name, ops.ALL):
        for kind, belongs in KINDS.get(name, (WHOLE,)):
            mine = [r for r in kernels(rows) if r["op"] == name and belongs(r)]
            if mine:
                found.append((judge(name + kind, mine), mine))
    return found


def speed(of: Judged) -> str:
    """Cells: geometric mean, worst and best, of how many cases."""
    numbers = f"**{of.mean:.2f}x** | {of.ratios[0]:.2f}x | {of.ratios[-1]:.2f}x" if of.ratios else "- | - | -"
    return f"{numbers} | {len(of.ratios)} of {of.cases}"


def measured_on(rows: list[dict]) -> str:
    gpus, dates = (sorted({r[name] for r in kernels(rows)}) for name in ("gpu", "date"))
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Measured on: {', '.join(gpus)}, {span}, `tilewright bench`, bf16 unless a case says otherwise. Kernels for other GPUs are only "
        "compiled. Each case is compared with the peer that was fastest in it; cases that no peer runs are left out."
    )


def table(rows: list[dict]) -> str:
    """Every op against the fastest peer of each case."""
    lines = [
        "| op | best rate | share of the roof, median | fastest peer over ours, geomean | worst | best | cases compared | the fastest was |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for of, mine in judged_ops(rows):
        compute = [r["tflops"] for r in mine if r["bound"] == "compute"]
        memory = [r["gbs"] for r in mine if r["bound"] == "memory"]
        rate = " / ".join(([f"{max(compute):.0f} TFLOP/s"] if compute else []) + ([f"{max(memory) / 1000:.2f} TB/s"] if memory else []))
        roof = statistics.median(r["roof_pct"] for r in mine)
        peers = ", ".join(f"{peer} {count}" for peer, count in of.peers.items())
        lines.append(f"| {of.name} | {rate} | {roof:.0f} % | {speed(of)} | {peers or '-'} |")
    return "\n".join([*lines, "", prose(f"{measured_on(rows)} benchmarks/results has every row, losses included.")])


def headline(rows: list[dict]) -> str:
    """The README's ten rows: the same numbers as in `table`, fewer columns."""
    lines = [
        "| op | fastest peer over ours, geomean | worst case | best case | cases compared | of the roof, median |",
        "|---|---|---|---|---|---|",
    ]
    for of, mine in judged_ops(rows):
        if of.name in HEADLINE:
            lines.append(f"| {of.name} | {speed(of)} | {statistics.median(r['roof_pct'] for r in mine):.0f} % |")
    return "\n".join([*lines, "", prose(measured_on(rows))])


def models(rows: list[dict]) -> str:
    """The engine on whole models: decode, a long prompt, the start."""
    lines = [
        "| model | engine | tokens/s | first token | step, median | of the floor | transformers, same run |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {"transformers": "eager", "torch.compile": "compiled"}
    for r in rows:
        if r["op"] == "generate":
            case, _, mode = r["case"].rpartition(" mode=")
            stock = ", ".join(f"{names.get(name, name)} {value:.0f}: **{r['peers'][name]:.2f}x**" for name, value in r["peer_tokens_per_s"].items())
            times = f"{r['tokens_per_s']:.0f} | {r['ttft_ms']:.1f} ms | {r['tpot_ms']:.2f} ms"
            floor = "-" if r["floor_pct"] is None else f"{r['floor_pct']:.0f} %"  # a patched model has no plan of its bytes
            lines.append(f"| {case} | {mode} | {times} | {floor} | {stock} |")
    note = (
        "Random weights of the real configs, bf16, greedy. The floor is the time to read all weights and keys once at the copy rate "
        "measured in the same run."
    )
    more = []
    for r in rows:
        if r["op"] == "prefill":
            against = ", ".join(f"{names[name]} {us / 1e3:.0f} ms: **{r['peers'][name]:.2f}x**" for name, us in r["peer_time_us"].items())
            more.append(f"- Time to read a prompt, {r['case']}: {r['time_us'] / 1e3:.0f} ms; transformers {against}.")
    for r in rows:
        if r["op"] == "start":
            more.append(f"- Time from loaded weights to the second token, {r['case']}: {r['start_s']:.1f} s.")
    for r in rows:
        if r["op"] == "parallel":
            step = {name: f"{us / 1e3:.2f} ms" for name, us in r["step_us"].items()}
            times = f"{step['direct']} where ranks write to each other: **{r['speedup']['direct']:.2f}x**; {step['nccl']} with NCCL alone"
            more.append(f"- A step on several GPUs, {r['case']}: {times}; {step['one']} on one.")
    for r in rows:
        if r["op"] == "agreement":
            ties = sum(found["tie"] for found in r["parted"])
            same = f"equal to transformers' for {r['equal']} of {r['prompts']} prompts; {ties} differ after a tie in bf16"
            more.append(f"- Greedy tokens, {r['case']}: {same}.")
    return "\n".join([*lines, "", prose(note), *([""] if more else []), *(prose(line, "  ") for line in more)])


def modes(rows: list[dict]) -> str:
    """A step of one sequence in each mode of the engine: rows of the suite "decode"."""
    steps: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        if r["op"] == "decode":
            steps.setdefault((r["gpu"], r["case"].rpartition(" mode=")[0].replace(" batch=1", "")), {})[r["mode"]] = r
    shown = ("eager", "graph", "mega")
    lines = ["| model | keys | eager | graph | mega | of the floor, the fastest |", "|---|---|---|---|---|---|"]
    for (_, case), found in steps.items():
        best = min(found.values(), key=lambda r: r["time_us"])
        times = [f"{found[mode]['time_us']:.0f} us" if mode in found else "-" for mode in shown]
        cells = [f"**{cell}**" if mode == best["mode"] else cell for mode, cell in zip(shown, times, strict=True)]
        lines.append(f"| {case} | {best['keys']} | {' | '.join(cells)} | {best['floor_pct']:.0f} % |")
    gpus, dates = (sorted({r[name] for found in steps.values() for r in found.values()}) for name in ("gpu", "date"))
    note = f"{', '.join(gpus)}, {', '.join(dates)}, `tilewright bench --suite decode`. keys: in the cache, on average. In bold: the fastest."
    return "\n".join([*lines, "", prose(note)])


def cascade(rows: list[dict]) -> str:
    """Keys that a batch shares, read once, beside `attention_decode` over all keys of each user."""
    lines = []
    for r in rows:
        if r["op"] == "cascade_decode":
            ours, plain = r["us"]["cascade_decode"], r["us"]["attention_decode"]
            what = f"{r['case']}: {ours:.0f} us, `attention_decode` over all keys {plain:.0f} us: **{r['ratio']:.2f}x**"
            lines.append(prose(f"- {r['gpu']}, {r['date']}, {what} (`{r['command']}`).", "  "))
    return "\n".join(lines)


def load_test(rows: list[dict]) -> str:
    """The last load test of each kind."""
    lines = []
    for r in rows:
        if r["op"] == "serve_load":
            told = f"{r['told']['answered']:,} answers, {r['wrong']} wrong, {r['lost']} lost"
            first, whole = (f"p50 {r[f'{what}_p50_s']:.2f} s, p99 {r[f'{what}_p99_s']:.2f} s" for what in ("first", "whole"))
            times = f"first token {first}; whole answer {whole}"
            lines.append(prose(f"- {r['gpu']}, {r['date']}, {r['case']}: {told}; {times} (`{r['command']}`).", "  "))
    return "\n".join(lines)


def megakernel(rows: list[dict]) -> str:
    """A step of the megakernels, and the time to read the weights alone."""
    lines = ["| step | time of a token | time to read weights and keys once, same run | GPU, date |", "|---|---|---|---|"]
    for r in rows:
        if r["op"] == "megakernel":
            share = 100 * r["floor_us"] / r["time_us"]
            lines.append(f"| {r['case']} | {r['time_us']:.0f} us | {r['floor_us']:.0f} us: {share:.0f} % | {r['gpu']}, {r['date']} |")
    return "\n".join(lines)


def quality(rows: list[dict]) -> str:
    """What rounding to each format does to a model's logits, beside a reference of the format."""
    found = [r for r in rows if r["op"] == "quality" and not r["format"].startswith("gguf")]
    lines = ["| format | bits | of the weights | KL, ours | KL, reference | ours over it | the reference |", "|---|---|---|---|---|---|---|"]
    for r in found:
        kls = f"{r['kl']:.4f} | {r['reference_kl']:.4f} | {r['ratio']:.2f}"
        of = f"{100 * r['share']:.0f} %" if r["share"] else ""
        if "head=" in r["format"]:
            of += " and the head" if of else "the head"
        lines.append(f"| `{r['format']}` | {r['bits']:g} | {of} | {kls} | {r['reference']} |")
    return "\n".join([*lines, "", prose(f"{found[0]['date']}, on a CPU in fp32: `{found[0]['command']}`.")])


def kept(rows: list[dict]) -> str:
    """The kinds of GGUF that stay small."""
    lines = ["| kind | kept as | bits | difference from the file's values | KL, ours | KL, the file's values |", "|---|---|---|---|---|---|"]
    found = [r for r in rows if r["op"] == "quality" and r["format"].startswith("gguf")]
    for r in found:
        off = f"{100 * r['difference']:.2g} %" if r["difference"] else "none"
        what = f"{r['format'].removeprefix('gguf ')} | `{r['kept_as']}`, fp16 scales | {r['bits']:g}"
        lines.append(f"| {what} | {off} | {r['kl']:.5f} | {r['reference_kl']:.5f} |")
    return "\n".join([*lines, "", prose(f"{found[0]['date']}, on a CPU in fp32: `{found[0]['command']}`.")])


def small_steps(rows: list[dict]) -> str:
    """A decode step of one sequence with small weights, in a graph as shipped and by the
    megakernel.
    """
    lines, ways = ["| model | weights | by | a step | tokens/s | date |", "|---|---|---|---|---|---|"], {"shares": "graph", "mega": "megakernel"}
    found = [(r, *r["case"].split()) for r in rows if r["op"] == "small_weights"]
    for r, model, weights, form in sorted(found, key=lambda each: each[1:3]):
        if way := ways.get(form.removeprefix("form=")):
            told = f"{statistics.median(r['step_us']):.0f} us | **{r['tokens_per_s']:.0f}** | {r['date']}"
            lines.append(f"| {model} | `{weights.removeprefix('weights=')}` | {way} | {told} |")
    commands = prose(f"{found[0][0]['gpu']}, `python benchmarks/small_weights.py MODEL WEIGHTS`: 32 tokens read, 64 written, seeded random weights.")
    return "\n".join([*lines, "", commands])


def peers(rows: list[dict]) -> str:
    """Every op against every peer, losses included."""
    lines = ["| op | peer | cases | geomean | worst | best |", "|---|---|---|---|---|---|"]
    found = sorted(against_peers(kernels(rows)), key=lambda a: (a.op, a.peer))
    return "\n".join(lines + [f"| {a.op} | {a.peer} | {a.cases} | **{a.mean:.2f}x** | {a.worst:.2f}x | {a.best:.2f}x |" for a in found])


def drawn(rows: list[dict]) -> str:
    """Each op on its newest drawn problems: the fastest peer of each case over ours."""
    lines = ["| op | seeds | cases | with a peer | fastest peer over ours, geomean | worst |", "|---|---|---|---|---|---|"]
    found = newest_seeds((row for row in rows if row.get("draw_seed") is not None), LEAST_DRAWN)
    for kind, mine in found.items():
        of, seeds = judge(kind, mine), sorted({row["draw_seed"] for row in mine})
        ratios = f"**{of.mean:.2f}x** | {of.ratios[0]:.2f}x" if of.ratios else "- | -"
        lines.append(f"| {kind} | {', '.join(map(str, seeds))} | {of.cases} | {len(of.ratios)} | {ratios} |")
    gpus, dates = (sorted({str(row[name]) for mine in found.values() for row in mine}) for name in ("gpu", "date"))
    return "\n".join([*lines, "", prose(f"{', '.join(gpus)}, {', '.join(dates)}.")])


def platforms(rows: list[dict]) -> str:
    """Attention over the sequence length: published figures, and ours on the same problem."""
    shown = [f for f in figures() if f.op == "attention" and f.metric == "TFLOP/s" and f.problem.get("causal")]
    lengths = sorted({f.problem["q_len"] for f in shown})

    def cell(value: float, share: float | None) -> str:
        return f"{value:.4g} ({share:.0f} %)" if share is not None else f"{value:.4g}"

    def line(name: str, machine: str, kind: str, cells: dict[int, str]) -> str:
        return f"| {name} | {machine} | {kind} | {' | '.join(cells.get(n, '') for n in lengths)} |"

    lines = [f"| causal attention, TFLOP/s | machine | source | {' | '.join(f'{n // 1024}k' for n in lengths)} |", "|---" * (3 + len(lengths)) + "|"]
    groups: dict[tuple, list[Figure]] = {}
    for figure in shown:
        groups.setdefault((figure.kernel, figure.hardware, figure.document), []).append(figure)
    for (kernel, hardware, document), group in groups.items():
        cells = {f.problem["q_len"]: cell(f.value, f.roof_pct()) for f in group}
        lines.append(line(kernel, hardware, document.removesuffix(".md"), cells))
    for gpu in sorted({row["gpu"] for row in kernels(rows)}):
        here = [row for row in rows if row["gpu"] == gpu]
        ours = {f.problem["q_len"]: row for f in shown if (row := best_row(f, here))}
        types = ", ".join(sorted({row["dtype"] for row in ours.values()}))
        lines.append(line(f"`attention`, {types}", gpu, "**ours**", {n: cell(row["tflops"], row["roof_pct"]) for n, row in ours.items()}))
    sheets = "; ".join(f"{name}: {sheet.source}" for name, sheet in SHEETS.items() if name in {f.device for f in shown})
    note = f"Batch 4, 32 heads, head_dim 128, fp16. Data sheets: {sheets}."
    return "\n".join([*lines, "", prose(note)])


def ladder(rows: list[dict]) -> str:
    """The attention ladder over the measured lengths."""
    steps: dict[str, dict[int, dict]] = {}
    for row in rows:
        if row["op"] == "learn attention":
            steps.setdefault(row["case"].rpartition("step=")[2], {})[row["problem"]["seq_len"]] = row
    lengths = sorted({n for step in steps.values() for n in step})
    lines = [f"| TFLOP/s | {' | '.join(f'{n // 1024}k' for n in lengths)} |", "|---" * (1 + len(lengths)) + "|"]

    def line(name: str, step: dict[int, dict], peer: str = "") -> str:
        rates = [step[n]["tflops"] / (step[n]["peers"][peer] if peer else 1) for n in lengths]
        return f"| {name} | {' | '.join(f'{rate:.0f}' for rate in rates)} |"

    lines += [line(name, step) for name, step in steps.items()]
    last = list(steps.values())[-1]
    lines += [line("`ops.attention` in the same run", last, "ops.attention"), line("cuDNN in the same run", last, "cudnn")]
    gpus, dates = ({row[name] for step in steps.values() for row in step.values()} for name in ("gpu", "date"))
    return "\n".join([*lines, "", prose(f"{', '.join(sorted(gpus))}, {', '.join(sorted(dates))}, `{last[lengths[0]]['command']}`.")])


def tuned(rows: list[dict]) -> str:
    """What the shipped tables hold, and how much slower calls without them are."""
    lines = ["| GPU | op | problems | default over tuned, geomean | worst | default won |", "|---|---|---|---|---|---|"]
    for path in sorted((ROOT / "src" / "tilewright" / "tune" / "tables").glob("*.json")):
        held = read_rows(path)
        for op, gains in gains_by_op(held).items():
            level = sum(gain <= 1.0 for gain in gains)
            lines.append(f"| {held[0].gpu} | {op} | {len(gains)} | {statistics.geometric_mean(gains):.3f}x | {max(gains):.2f}x | {level} |")
    return "\n".join(lines)


DTYPE_WORDS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip


def supported(rows: list[dict]) -> str:
    """Every op: the dtypes of its test cases, which of these an A100 runs, and its definition.

    Every other architecture runs all of them.
    """
    lines = ["| op | dtypes of inputs and outputs | of these on sm_80 |", "|---|---|---|"]
    definitions = []
    for op in ops.ALL:
        problems = [*cases(op, "small"), *cases(op, "real")]
        takes = {id(p): _dtypes(p) for p in problems}
        older = set().union(*(takes[id(p)] for p in problems if op.space(p, Device.named("A100"))))
        every = set().union(*takes.values())
        there = "all" if older == every else _words(older) or "none"
        lines.append(f"| `{op_name(op)}` | {_words(every)} | {there} |")
        first = op.__doc__.strip().partition("\n\n")[0]
        definition = " ".join(first.split()).rstrip(".:").replace("*", "\\*")
        definitions.append(prose(f"- `{op_name(op)}`: {definition}", "  "))
    return "\n".join([*lines, "", *definitions])


def _dtypes(problem: object) -> set[torch.dtype]:
    """The dtypes that the problem names, and those of 8-bit inputs that it does not name."""
    inputs = problem.inputs(torch.device("meta")).values()
    narrow = {t.dtype for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype.itemsize == 1}
    return narrow | {value for name in type(problem).__dataclass_fields__ if isinstance(value := getattr(problem, name), torch.dtype)}


def _words(dtypes: set[torch.dtype]) -> str:
    return " ".join(word for dtype, word in DTYPE_WORDS.items() if dtype in dtypes)


def explained(subject: str, rows: list[dict]) -> str:
    """Each step of a subject's ladders, as `tilewright learn` explains it."""
    found, chosen = [], ladders(subject)
    for ladder in chosen:
        found += [f"### {ladder.name}", ""] if len(chosen) > 1 else []
        for step in ladder.steps:
            found += [prose(f"**{step.name}**: {step.idea}. {step.why}".rstrip()), ""]
            found += [f"```text\n{step.picture}```", ""] if step.picture else []
    return "\n".join(found[:-1])


BLOCKS = {
    "docs/ops.md": {"ops": supported, "quality": quality},
    "README.md": {"headline": headline},
    "docs/bench.md": {"numbers": table, "drawn": drawn, "peers": peers, "platforms": platforms},
    "docs/tune.md": {"tuned": tuned},
    "docs/learn.md": {"ladder": ladder, **{f"{name} steps": partial(explained, name) for name in ("attention", "gemm", "decode")}},
    "docs/decode.md": {"cascade": cascade},
    "docs/engine.md": {"modes": modes, "models": models},
    "docs/serving.md": {"load test": load_test},
    "docs/models.md": {"kept": kept, "small steps": small_steps},
    "docs/megakernel.md": {"megakernel": megakernel},
}


def rewritten(text: str, name: str, body: str) -> str:
    begin, end = f"<!-- {name}: made by tools/readme_numbers.py -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"the page must hold {begin!r} and {end!r}, got none")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


def main() -> int:
    rows = newest(read(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))))
    stale = []
    for page, blocks in BLOCKS.items():
        path = ROOT / page
        old = new = path.read_text()
        for name, make in blocks.items():
            new = rewritten(new, name, make(rows))
        if new != old:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(new)
    if stale and "--check" in sys.argv:
        print(f"not what benchmarks/results say: {', '.join(stale)}. Run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
