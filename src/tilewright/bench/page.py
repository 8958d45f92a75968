"""`tilewright report`: one self-contained HTML page without JavaScript, and PNG files."""

import html
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..launch.console import plain_console
from . import results
from .published import SHEETS, Figure, amount, best_row, figures
from .results import Against, Change, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

STYLE = Path(__file__).with_name("page.css")
LENGTHS = ("q_len", "kv_len")
MEASURED, PUBLISHED = '<span class="tag measured">measured</span>', '<span class="tag">published</span>'


def report_command(paths: Sequence[Path], *, out: Path = Path("report"), against: Sequence[Path] = (), console: Console | None = None) -> int:
    """Writes `out`/index.html and a PNG of each drawing from result files.

    Those are JSON lines, as `tilewright bench --json` appends them.

    Args:
        paths: result files; the last row of each case counts.
        out: a folder, which is made if needed.
        against: older result files to compare with; by default the rows of `paths` that later rows
            replaced.
    Returns: 0. Raises: ValueError for a file that holds anything else, or no row.
    """
    console = console or plain_console()
    rows = results.read(paths)
    if not rows:
        raise ValueError(f"results must hold at least one row, got none in {', '.join(map(str, paths))}")
    new = results.newest(rows)
    found = results.changes(new, results.read(against) if against else results.replaced(rows))
    text, drawings = page(new, found, [str(path) for path in paths])
    from .figures import png

    out.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        (out / f"{name}.png").write_bytes(png(drawing))
    (out / "index.html").write_text(text)
    console.print(f"{len(new)} cases, {len(drawings)} drawings: {out / 'index.html'}")
    return 0


def page(rows: Sequence[Row], found: Sequence[Change], sources: Sequence[str]) -> tuple[str, dict[str, "Drawing"]]:
    """The page, and its drawings by name."""
    try:
        from . import figures as drawn
    except ImportError as error:
        raise ImportError(f"matplotlib must be installed (pip install 'tilewright[bench]'): {error}") from None
    kernels = results.kernels(rows)
    against = results.against_peers(kernels)
    drawings: dict[str, Drawing | None] = {
        "roofline": drawn.roofline(kernels),
        "peers": drawn.peer_bars(against) if against else None,
        "attention": drawn.attention_curves(kernels),
        "decode": drawn.decode_curves(kernels),
        "sizes": drawn.size_curves(kernels),
        "platforms": drawn.platforms(kernels),
        "regression": drawn.regression(found) if found else None,
    }
    shown = {name: drawing for name, drawing in drawings.items() if drawing is not None}

    def picture(name: str, words: str) -> str:
        if name not in shown:
            return ""
        return f'<figure role="img" aria-label="{_e(words)}"><div class="wide">{drawn.svg(shown[name], name)}</div></figure>'

    sections = [
        ("summary", "Summary", _summary(kernels, against)),
        ("roofline", "Roofline", picture("roofline", "Every kernel under the measured roofs") + _caption(
            "A dot is a case: its rate over its intensity, both from the least bytes and operations that the problem needs. "
            "Roofs are measured at the start of each run. Cases under 0.05 TFLOP/s, which are all launch, are left out.")),
        ("peers", "Against other libraries", picture("peers", "Ratios to every peer") + _caption(
            "Interleaved in the same run, same dtype and mathematics. Number of cases in brackets; losses included.") + _backends(kernels)),
        ("scaling", "Scaling", picture("attention", "Attention over sequence length") + picture("decode", "Decode attention over context length")
            + picture("sizes", "Share of the roof over bytes moved")),
        ("platforms", "Platforms", picture("platforms", "Attention on several machines") + _platforms(rows)),
        ("regression", "Against the run before", picture("regression", "Old over new time of every case") + _regression(found)),
        ("ladders", "How it got fast", _ladders([row for row in rows if results.is_step(row)])),
        ("models", "Whole models", _models([row for row in rows if "tokens_per_s" in row])),
        ("cases", "Every case", _cases(kernels)),
    ]  # fmt: skip
    sections = [(anchor, title, body) for anchor, title, body in sections if body]
    gpus, dates = sorted({row["gpu"] for row in rows if row["gpu"] != "cpu"}) or ["cpu"], sorted({row["date"] for row in rows if "date" in row})
    span = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
    links = "".join(f'<a href="#{anchor}">{_e(title)}</a>' for anchor, title, _ in sections)
    body = "".join(f'<h2 id="{anchor}">{_e(title)}</h2>{content}' for anchor, title, content in sections)
    title = f"Tilewright on {_e(', '.join(gpus))}"
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE.read_text()}</style></head><body><h1>{title}</h1>"
        f'<p class="soft">{len(rows)} cases, {_e(span)}. {_versions(rows)}</p><nav>{links}</nav>{body}'
        f'<p class="soft">Made by <code>tilewright report {_e(" ".join(sources))}</code>.</p></body></html>\n'
    )
    return text, shown


# -------------------------------------------------------------------------------------------- parts
def _e(value: Any) -> str:
    return html.escape(str(value))


def _caption(text: str) -> str:
    return f'<p class="soft">{_e(text)}</p>'


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """A table; cells are HTML. text: the columns of words."""

    def cells(line: Sequence[str], tag: str) -> str:
        return "".join(f'<{tag} class="text">{cell}</{tag}>' if i in text else f"<{tag}>{cell}</{tag}>" for i, cell in enumerate(line))

    body = "".join(f"<tr>{cells(line, 'td')}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{cells(heads, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _ratio(value: float) -> str:
    shade = "good" if value >= 1.03 else "bad" if value < 0.97 else ""
    return f'<span class="{shade}">{value:.2f}x</span>'


def _versions(rows: Sequence[Row]) -> str:
    newest: dict[str, str] = next((row["versions"] for row in reversed(rows) if row.get("versions")), {})
    return _e(", ".join(f"{name} {value}" for name, value in newest.items()))


def _summary(rows: Sequence[Row], against: Sequence[Against]) -> str:
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        compute = max((row["tflops"] for row in mine if row["bound"] == "compute"), default=None)
        memory = max((row["gbs"] for row in mine if row["bound"] == "memory"), default=None)
        rate = " / ".join(([f"{compute:.0f} TFLOP/s"] if compute else []) + ([f"{memory / 1000:.2f} TB/s"] if memory else []))
        roof = statistics.median(row["roof_pct"] for row in mine)
        tuned = sum("table" in row.get("source", "") for row in mine)
        peers = ", ".join(f"<span class=pair>{_e(a.peer)} {_ratio(a.mean)}</span>" for a in against if a.op == op)
        of = results.judge(op, mine)
        best = f"{_ratio(of.mean)} of {len(of.ratios)}, worst {of.ratios[0]:.2f}x" if of.ratios else "-"
        lines.append((_e(op), str(len(mine)), rate, f"{roof:.0f} %", str(tuned), best, peers or "-"))
    heads = ("op", "cases", "best rate", "of roof, median", "tuned", "fastest peer of each case", "geometric mean against each peer")
    return _table(heads, lines, text=(0, 6))


def _backends(rows: Sequence[Row]) -> str:
    known = sorted({f"{name}: {backend}" for row in rows for name, backend in row.get("backends", {}).items()})
    return _caption("; ".join(known) + ".") if known else ""


def _platforms(rows: Sequence[Row]) -> str:
    """Published tables with what we measured of the same problems.

    Each figure is given in its unit and as a share of its machine's roof.
    """
    sheets = "; ".join(f"{name}: {sheet.source}" for name, sheet in SHEETS.items())
    note = _caption(
        "Published figures are their documents' own and were not run again; their share of the roof takes the data sheet's dense 16-bit rate "
        "(8-bit: twice that) or bandwidth. Measured ones are held to the roofs measured in the same run, and stand only beside equal work and, where "
        "the figure is of PyTorch, PyTorch's own time. A bf16 row stands in where a document times fp16 and we did not. "
        f"Data sheets: {sheets}."
    )
    series: dict[tuple[Any, ...], list[Figure]] = {}
    single: dict[tuple[Any, ...], list[Figure]] = {}
    for figure in figures():
        fixed = tuple((name, value) for name, value in figure.problem.items() if name not in LENGTHS)
        if figure.metric == "TFLOP/s" and len(fixed) < len(figure.problem):
            series.setdefault((figure.op, fixed), []).append(figure)
        else:
            single.setdefault((figure.op, figure.key if figure.op else figure.kernel, figure.metric), []).append(figure)
    tables = "".join(_over_lengths(op, fixed, group, rows) for (op, fixed), group in series.items())
    lines = [line for group in single.values() for line in _figure_lines(group, rows)]
    others = _table(("kernel", "problem", "machine", "source", "figure", "of its roof"), lines, text=range(4))
    return f"{note}{tables}<h3>Other published figures</h3>{others}"


def _over_lengths(op: str, fixed: tuple[Any, ...], group: Sequence[Figure], rows: Sequence[Row]) -> str:
    """One problem at several sequence lengths: a line a kernel, a column a length."""
    lengths = sorted({figure.problem["q_len"] for figure in group})
    lines = []
    for kernel, hardware, document in dict.fromkeys((f.kernel, f.hardware, f.document) for f in group):
        found = {f.problem["q_len"]: f for f in group if (f.kernel, f.hardware, f.document) == (kernel, hardware, document)}
        cells = [_with_share(found[n]) if n in found else "" for n in lengths]
        lines.append((_e(kernel), f"{_e(hardware)} {PUBLISHED}", _e(document.removesuffix(".md")), *cells))
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        here = [row for row in rows if row["gpu"] == gpu]
        ours = {f.problem["q_len"]: best_row(f, here) for f in group}
        if any(ours.values()):
            cells = [f"<b>{amount(row['tflops'], '')}</b> <small>{row['roof_pct']:.0f} %</small>" if (row := ours[n]) else "-" for n in lengths]
            types = ", ".join(sorted({row["dtype"] for row in ours.values() if row}))
            lines.append((f"Tilewright {_e(op)}, {_e(types)}", f"{_e(gpu)} {MEASURED}", "", *cells))
    words = ", ".join(f"{name} {value}" for name, value in fixed)
    heads = ("kernel", "machine", "source", *(f"{n // 1024}k" for n in lengths))
    title = f"<h3>{_e(op)}: {_e(words)}</h3><p class=soft>TFLOP/s and share of the machine's roof, by sequence length</p>"
    return title + _table(heads, lines, text=range(3))


def _with_share(figure: Figure) -> str:
    share = figure.roof_pct()
    return amount(figure.value, "") + (f" <small>{share:.0f} %</small>" if share is not None else "")


def _figure_lines(group: Sequence[Figure], rows: Sequence[Row]) -> Iterable[tuple[str, ...]]:
    for figure in group:
        roof = figure.roof_pct()
        cells = (_e(figure.kernel), _e(_problem(figure)), f"{_e(figure.hardware)} {PUBLISHED}", _e(figure.document.removesuffix(".md")))
        yield (*cells, _e(figure.text), f"{roof:.0f} %" if roof is not None else "-")
    for figure in {f.by: f for f in group}.values():
        row, who = best_row(figure, rows), figure.by or "Tilewright"
        if row is not None:
            value, unit = _same_unit(figure, row)
            share = None if figure.by else row.get("roof_pct", row.get("floor_pct"))
            cells = (f"{_e(who)} {_e(row['op'])}", _e(row["case"]), f"{_e(row['gpu'])} {MEASURED}", _e(row.get("date", "")))
            yield (*cells, f"<b>{amount(value, unit)}</b>", f"<b>{share:.0f} %</b>" if share is not None else "-")
        elif figure.op:
            yield (_e(who), _e(_problem(figure)), f'<span class="soft">{figure.alone or "not measured yet"}</span>', "", "-", "-")


def _same_unit(figure: Figure, row: Mapping[str, Any]) -> tuple[float, str]:
    """What a row measured, in the unit of a published figure if it has that."""
    found = figure.of(row)
    if found is not None:
        return found, figure.metric
    return (row["tflops"], "TFLOP/s") if row["bound"] == "compute" else (row["gbs"], "GB/s")


def _problem(figure: Figure) -> str:
    return " ".join(f"{name}={value}" for name, value in figure.problem.items())


def _regression(found: Sequence[Change]) -> str:
    if not found:
        return _caption("No case was measured twice. Give older files with --against.")
    counts = {zone: sum(c.zone == zone for c in found) for zone in ("slower", "same", "faster")}
    words = _caption(
        ", ".join(f"{n} {zone}" for zone, n in counts.items()) + ". The same is within 3 %, or within the spread of the two runs if that is more."
    )
    moved = [c for c in found if c.zone != "same"]
    lines = [
        (_e(c.row["op"]), _e(c.row["case"]), _e(c.row["gpu"]), f"{c.old['time_us']:.1f}", f"{c.row['time_us']:.1f}", _ratio(c.ratio)) for c in moved
    ]
    table = _table(("op", "case", "GPU", "old us", "new us", "old / new"), lines, text=range(3))
    return words + (f"<details open><summary>{len(moved)} moved</summary>{table}</details>" if moved else "")


def _ladders(rows: Sequence[Row]) -> str:
    """The steps of `tilewright learn`, each beside the one before."""
    lines, last = [], ("", 0.0)
    for row in rows:
        problem, _, step = row["case"].rpartition(" step=")
        gain = _ratio(last[1] / row["time_us"]) if last[0] == problem else ""
        lines.append((_e(problem), _e(step), _e(row["gpu"]), f"{row['time_us']:,.1f}", f"{row['tflops']:,.0f}", gain, _e(row["config"])))
        last = problem, row["time_us"]
    return _table(("problem", "step", "GPU", "us", "TFLOP/s", "gain", "config"), lines, text=range(3)) if lines else ""


def _models(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    names = (
        ("tokens_per_s", "tokens/s"),
        ("ttft_ms", "first token, ms"),
        ("tpot_ms", "per token, ms"),
        ("floor_pct", "% of the weights' floor"),
        ("memory_gb", "GB"),
    )
    lines = []
    for row in rows:
        peers = ", ".join(f"{_e(name)} {_ratio(ratio)}" for name, ratio in row.get("peers", {}).items())
        numbers = [f"{row[key]:,.1f}" if row.get(key) is not None else "-" for key, _ in names]
        lines.append((_e(row["op"]), _e(row["case"]), _e(row["gpu"]), *numbers, peers or "-"))
    return _table(("op", "case", "GPU", *(head for _, head in names), "against"), lines, text=range(3))


def _cases(rows: Sequence[Row]) -> str:
    heads = ("case", "us", "warm L2 us", "GB/s", "TFLOP/s", "% of roof", "bound", "against", "config from", "clocks")
    parts = []
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        table = _table(heads, map(_case, mine), text=(0, 7))
        parts.append(f"<details><summary>{_e(op)} <span class=soft>{len(mine)}</span></summary>{table}</details>")
    return "".join(parts)


def _case(row: Row) -> tuple[str, ...]:
    peers = [f"{_e(peer)} {_ratio(ratio)}" for peer, ratio in row.get("peers", {}).items()]
    peers += [f"{_e(peer)} failed" for peer in row.get("absent", {})]
    numbers = (f"{row['gbs']:.0f}", f"{row['tflops']:.1f}", f"{row['roof_pct']:.0f}", row["bound"])
    times = f"{row['time_us']:.1f} ± {row['spread_us']:.1f}", f"{row['warm_us']:.1f}" if row.get("warm_us") else "-"
    return (_e(row["case"]), *times, *numbers, " ".join(peers), _e(row.get("source", "")), _e(row.get("clocks", "")))
