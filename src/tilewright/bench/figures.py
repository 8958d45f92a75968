"""The drawings of the report: each a matplotlib figure in two inks.

The page turns the inks into its own colours.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Drawing

from .published import Figure, best_row, figures
from .results import Against, Change, Row

INK, LINE = "#0a0b0c", "#0a0b0d"  # placeholders that the page's style replaces, in light and in dark
PALETTE = ("#3b7dd8", "#d9793a", "#2f9e6e", "#c2476f", "#8a63c9", "#b0902a", "#2a9fb0", "#9c5f3f", "#6b8f2e", "#c05fc0")
MARKERS = "osD^vPX"
MOST = 25  # a ratio: a longer bar ends at the edge, with its number in the label
SMALLEST = 0.05  # TFLOP/s or GB/s
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.edgecolor": LINE, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "grid.color": LINE, "grid.linewidth": 0.4, "grid.alpha": 0.35, "axes.grid": True, "axes.axisbelow": True, "svg.hashsalt": "tilewright",
}  # fmt: skip


def svg(drawing: Drawing, name: str) -> str:
    """The drawing as inline SVG that scales to its place and takes the page's colours."""
    with rc_context(STYLE | {"svg.hashsalt": name}):  # ids must differ between drawings of one page
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing.set_layout_engine("none")  # it is laid out now, so the PNG need not do it again
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)


def png(drawing: Drawing) -> bytes:
    """The drawing on white, for a slide or a README."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        drawing.savefig(buffer, format="png", dpi=150, facecolor="white")
    return buffer.getvalue()


def _drawing(height: float, columns: int = 1, **options: Any) -> tuple[Drawing, Any]:
    drawing = Drawing(figsize=(9.5, height), layout="constrained")
    return drawing, drawing.subplots(1, columns, **options)


def _legend_beside(drawing: Drawing, ax: Any, fontsize: int) -> None:
    """A legend right of the axes. The drawing becomes as tall as it needs to be."""
    handles, labels = ax.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside right upper", fontsize=fontsize)
    drawing.set_figheight(max(drawing.get_figheight(), 0.3 + len(labels) * fontsize / 44))


def colours(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each name; the first ten differ by colour, more by marker too."""
    return {name: (PALETTE[i % len(PALETTE)], MARKERS[i // len(PALETTE) % len(MARKERS)]) for i, name in enumerate(names)}


def log_axis(ax: Any, ticks: Sequence[int]) -> None:
    """Powers of two along x, in thousands from 1024 on."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in ticks])
    ax.minorticks_off()


def roofline(rows: Sequence[Row], height: float = 5.4) -> Drawing:
    """Every kernel: rate over intensity, under the roofs measured in its own run.

    Rows round rates to 0.01, so the very smallest are left out.
    """
    with rc_context(STYLE):
        drawing, ax = _drawing(height)
        shown = [row for row in rows if row["gbs"] >= SMALLEST and row["tflops"] >= SMALLEST]
        for op, (colour, marker) in colours(dict.fromkeys(row["op"] for row in shown)).items():
            mine = [row for row in shown if row["op"] == op]
            xs = [1e3 * row["tflops"] / row["gbs"] for row in mine]
            ax.scatter(xs, [row["tflops"] for row in mine], s=14, color=colour, marker=marker, alpha=0.75, linewidths=0, label=op)
        if shown:
            top = {name: max(row["ceilings"][name] for row in shown) for name in ("copy_gbs", "read_gbs", "tflops")}
            low, high = (f(1e3 * row["tflops"] / row["gbs"] for row in shown) for f in (min, max))
            xs = [low / 1.5 * (1.5 * 1.5 * high / low) ** (i / 200) for i in range(201)]
            eight_bits = any("float8" in row.get("dtype", "") for row in shown)
            for factor, word in ((1, "16-bit"), *(((2, "8-bit"),) if eight_bits else ())):
                ys = [min(top["read_gbs"] * x / 1e3, factor * top["tflops"]) for x in xs]
                label = f"{word} roof, {factor * top['tflops']:.0f} TFLOP/s"
                ax.plot(xs, ys, color=INK, linewidth=1.2, linestyle="-" if factor == 1 else "--", label=label)
            ax.set_title(f"roofs measured in the same runs: read {top['read_gbs']:.0f} GB/s, cuBLAS bf16 {top['tflops']:.0f} TFLOP/s", loc="left")
        ax.set(xscale="log", yscale="log", xlabel="intensity, FLOP / byte moved once", ylabel="TFLOP/s")
        _legend_beside(drawing, ax, 9)
    return drawing


def peer_bars(against: Sequence[Against]) -> Drawing:
    """Each op against each peer: geometric mean as a bar from 1, worst to best as a line."""
    with rc_context(STYLE):
        drawing, ax = _drawing(1.1 + 0.24 * max(1, len(against)))
        looks = colours(dict.fromkeys(a.peer for a in against))
        labels = []
        for i, a in enumerate(reversed(against)):
            colour = looks[a.peer][0]
            ax.barh(i, a.mean - 1, left=1, height=0.62, color=colour, alpha=0.85)
            ax.plot([a.worst, a.best], [i, i], color=INK, linewidth=0.8, marker="|", markersize=5)
            labels.append(f"{a.op} / {a.peer} ({a.cases})  {a.mean:.2f}x")
        ax.axvline(1, color=INK, linewidth=1)
        ax.set_yticks(range(len(labels)), labels, fontsize=8.5)
        ax.set(xscale="log", xlabel="their time / ours: right of 1 we are faster; bar geometric mean, line worst to best case")
        ticks = [0.1, 0.25, 0.5, 1, 2, 4, 10, 20]
        low, high = min((a.worst for a in against), default=0.5), min(MOST, max((a.best for a in against), default=2))
        ax.set_xlim(low / 1.1, high * 1.1)
        ax.set_xticks([t for t in ticks if low / 1.3 <= t <= high * 1.3], [f"{t:g}x" for t in ticks if low / 1.3 <= t <= high * 1.3])
        ax.minorticks_off()
        ax.margins(y=0.01)
    return drawing


def ladder_bars(rows: Sequence[Row]) -> Drawing:
    """The steps of one ladder from the first down: rate, and as a line the best peer's."""
    with rc_context(STYLE):
        drawing, ax = _drawing(0.9 + 0.24 * len(rows))
        names = [row["case"].partition(" step=")[2] for row in rows][::-1]
        rates = [row["tflops"] for row in rows][::-1]
        ax.barh(range(len(rows)), rates, height=0.62, color=PALETTE[0], alpha=0.85)
        for i, rate in enumerate(rates):
            ax.text(rate, i, f" {rate:.0f}", va="center", fontsize=8.5)
        ax.set_yticks(range(len(rows)), names, fontsize=8.5)
        # A ratio is ours over theirs. The row of the fastest step gives it with the most digits.
        fastest = max(rows, key=lambda row: row["tflops"])
        theirs = {peer: fastest["tflops"] / ratio for peer, ratio in fastest["peers"].items() if not peer.startswith("ops.")}
        if theirs:
            peer = max(theirs, key=theirs.__getitem__)
            ax.axvline(theirs[peer], color=PALETTE[1], linewidth=1.4, label=f"{peer}, {theirs[peer]:.0f}")
            ax.legend(loc="lower right", fontsize=9)
        ax.set(xlabel=f"TFLOP/s on {rows[0]['gpu']}, {rows[0]['date']}")
        ax.grid(visible=False, axis="y")
    return drawing


def _curves(ax: Any, rows: Sequence[Row], x: str, y: str, series: dict[str, tuple[Any, ...]], peer: str) -> None:
    """One curve a series, ours solid and the peer dashed.

    series: label -> values of the problem fields that mark it.
    """
    looks = colours(series)
    for label, marks in series.items():
        mine = sorted((row for row in rows if marks == _marks(row, x)), key=lambda row: row["problem"][x])
        if len(mine) < 2:
            continue
        colour, marker = looks[label]
        xs = [row["problem"][x] for row in mine]
        ax.plot(xs, [row[y] for row in mine], color=colour, marker=marker, markersize=3.5, linewidth=1.6, label=label)
        theirs = [(row["problem"][x], row[y] / row["peers"][peer]) for row in mine if peer in row.get("peers", {})]
        if theirs:
            ax.plot(*zip(*theirs, strict=True), color=colour, linestyle="--", linewidth=1)
    log_axis(ax, sorted(t for t in {row["problem"][x] for row in rows} if t & (t - 1) == 0))  # more labels would overlap


def _marks(row: Row, x: str) -> tuple[Any, ...]:
    problem = row["problem"]
    varies = {x, "batch", "kv_len"} if x == "q_len" else {x}  # tokens are kept while sequences grow
    return tuple((name, str(value)) for name, value in sorted(problem.items()) if name not in varies)


def _named(rows: Sequence[Row], x: str, label: Any) -> dict[str, tuple[Any, ...]]:
    named: dict[str, tuple[Any, ...]] = {}
    for row in rows:
        named.setdefault(label(row["problem"]), _marks(row, x))
    return named


def attention_curves(rows: Sequence[Row]) -> Drawing | None:
    """Prefill attention over the sequence length, causal and not, beside cuDNN."""
    plain = [r for r in rows if r["op"] == "attention" and r["problem"]["q_len"] == r["problem"]["kv_len"] and not r["problem"].get("window")]
    sides = [(word, [r for r in plain if r["problem"]["causal"] is causal]) for word, causal in (("causal", True), ("not causal", False))]
    sides = [(word, mine) for word, mine in sides if len({r["problem"]["q_len"] for r in mine}) > 1]
    if not sides:
        return None
    with rc_context(STYLE):
        drawing, axes = _drawing(4.2, len(sides), sharey=True, squeeze=False)
        for ax, (word, mine) in zip(axes[0], sides, strict=True):
            series = _named(mine, "q_len", lambda p: f"{p['q_heads']}/{p['kv_heads']} heads, dim {p['head_dim']}, {p['dtype']}")
            _curves(ax, mine, "q_len", "tflops", series, "cudnn")
            ax.set(title=word, xlabel="sequence length")
            ax.legend(fontsize=8)
        axes[0][0].set_ylabel("TFLOP/s (solid ours, dashed cuDNN)")
    return drawing


def decode_curves(rows: Sequence[Row]) -> Drawing | None:
    """Decode attention over the context length: bandwidth, beside the roof."""
    plain = [r for r in rows if r["op"] == "attention_decode" and not r["problem"].get("page_size") and not r["problem"].get("window")]
    if len({r["problem"].get("max_len") for r in plain}) < 2:
        return None
    with rc_context(STYLE):
        drawing, ax = _drawing(4.4)
        series = _named(plain, "max_len", lambda p: f"batch {p['batch']}, {p['q_heads']}/{p['kv_heads']} heads, dim {p['head_dim']}")
        _curves(ax, plain, "max_len", "gbs", series, "sdpa")
        ax.axhline(max(r["ceilings"]["read_gbs"] for r in plain), color=INK, linewidth=1, label="measured read roof")
        ax.set(xlabel="keys in the cache", ylabel="GB/s (solid ours, dashed flash SDPA)")
        _legend_beside(drawing, ax, 8)
    return drawing


def size_curves(rows: Sequence[Row]) -> Drawing | None:
    """Memory-bound ops from the cache to device memory: share of the roof over the bytes moved."""
    bound = [r for r in rows if r["bound"] == "memory" and r["gbs"] > 0 and r["time_us"] > 0]
    ops = [op for op in dict.fromkeys(r["op"] for r in bound) if sum(r["op"] == op for r in bound) >= 8]
    if not ops:
        return None
    with rc_context(STYLE):
        drawing, ax = _drawing(4.6)
        for op, (colour, marker) in colours(ops).items():
            mine = [r for r in bound if r["op"] == op]
            ax.scatter([r["gbs"] * r["time_us"] / 1e3 for r in mine], [r["roof_pct"] for r in mine], s=13, color=colour, marker=marker,
                       alpha=0.75, linewidths=0, label=op)  # fmt: skip
        ax.axhline(100, color=INK, linewidth=1)
        ax.set(xscale="log", xlabel="MB moved", ylabel="% of the measured roof")
        _legend_beside(drawing, ax, 9)
    return drawing


def platforms(rows: Sequence[Row]) -> Drawing:
    """Causal attention of the documents (fp16, batch 4, 32 heads, dim 128) and our rows of it.

    Each has its rate and its share of its machine's roof.
    """
    groups: dict[str, list[Figure]] = {}
    for figure in figures():
        final = figure.kernel in ("FMHA causal, TileGym", "FMHA tutorial, final", "Flash Attention, autotuned")
        if final and figure.op == "attention" and figure.metric == "TFLOP/s" and figure.problem.get("causal"):
            groups.setdefault(f"{figure.hardware}: {figure.kernel} (published)", []).append(figure)
    with rc_context(STYLE):
        drawing, axes = _drawing(4.4, 2)
        looks = colours([*groups, "ours"])
        for label, found in groups.items():
            xs = [figure.problem["q_len"] for figure in found]
            for ax, ys in zip(axes, ([f.value for f in found], [f.roof_pct() or math.nan for f in found]), strict=True):
                ax.plot(xs, ys, color=looks[label][0], linestyle=":", marker="s", markersize=3.5, label=label)
        one = next(iter(groups.values()))
        for gpu in dict.fromkeys(row["gpu"] for row in rows):
            here = [row for f in one if (row := best_row(f, [r for r in rows if r["gpu"] == gpu])) is not None]
            xs = [row["problem"]["q_len"] for row in here]
            for ax, y in zip(axes, ("tflops", "roof_pct"), strict=True):
                ys = [row[y] for row in here]
                ax.plot(xs, ys, color=looks["ours"][0], marker="o", markersize=4, linewidth=1.8, label=f"{gpu}: ours (measured)")
        for ax, title, unit in zip(axes, ("rate", "share of the machine's roof"), ("TFLOP/s", "%"), strict=True):
            log_axis(ax, [f.problem["q_len"] for f in one])
            ax.set(title=title, xlabel="sequence length", ylabel=unit, ylim=(0, None))
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8.5, ncols=2)
    return drawing


def regression(found: Sequence[Change]) -> Drawing:
    """Every case that was measured twice, sorted by its change; the three zones by colour."""
    shades = {"slower": "#d1495b", "same": "#8a8f98", "faster": "#2f9e6e"}
    with rc_context(STYLE):
        drawing, ax = _drawing(3.6)
        for zone, shade in shades.items():
            mine = [(i, c.ratio) for i, c in enumerate(found) if c.zone == zone]
            if mine:
                ax.scatter(*zip(*mine, strict=True), s=10, color=shade, linewidths=0, label=f"{zone} ({len(mine)})")
        ax.axhline(1, color=INK, linewidth=1)
        limit = max((abs(math.log(c.ratio)) for c in found), default=0.1) + 0.02
        ax.set(yscale="log", ylim=(math.exp(-limit), math.exp(limit)), xlabel="cases, slowest first", ylabel="old time / new time")
        ticks = [t for t in (0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2) if math.exp(-limit) <= t <= math.exp(limit)]
        ax.set_yticks(ticks, [f"{t:g}x" for t in ticks])
        ax.minorticks_off()
        ax.legend(fontsize=9, loc="upper left")
    return drawing
