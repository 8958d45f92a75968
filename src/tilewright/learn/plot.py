"""The scaling curve of a ladder: rate over sequence length, a line for each step."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure as Drawing

from ..bench.figures import INK, STYLE, colours, log_axis, png
from ..bench.published import figures
from ..bench.report import Row
from .ladder import Step

# The last of each published curve.
ALSO = (("DGX Spark", "FMHA causal, TileGym", "-."), ("B200", "Flash Attention, autotuned", "--"), ("B300", "FMHA tutorial, final", ":"))


def draw(rows: Sequence[Row], steps: Sequence[Step], path: Path) -> None:
    """Writes a PNG. rows: of the attention ladder, one for each step and length that was timed."""
    with rc_context(STYLE):
        drawing = Drawing(figsize=(9.5, 5.4), layout="constrained")
        ax = drawing.subplots()
        for name, (colour, marker) in colours(step.name for step in steps).items():
            mine = sorted((row.problem["seq_len"], row.tflops) for row in rows if row.case.endswith(f"step={name}"))
            if mine:
                ax.plot(*zip(*mine, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.6, label=name)
        lengths = sorted({row.problem["seq_len"] for row in rows})
        first = rows[0]
        same = {name: first.problem[name] for name in ("batch", "q_heads", "head_dim", "causal")}
        for hardware, kernel, dashes in ALSO:
            named = [f for f in figures() if (f.hardware, f.kernel) == (hardware, kernel)]
            theirs = {f.problem["q_len"]: f.value for f in named if all(f.problem[name] == value for name, value in same.items())}
            shown = [(n, theirs[n]) for n in lengths if n in theirs]
            if shown:
                ax.plot(*zip(*shown, strict=True), color=INK, linestyle=dashes, linewidth=1, label=f"{hardware}, published")
        log_axis(ax, lengths)
        ax.set(xlabel="sequence length", ylabel="TFLOP/s", ylim=(0, None))
        kind = "causal" if same["causal"] else "non-causal"
        title = (
            f"{kind} attention, batch {same['batch']}, {same['q_heads']} heads, head_dim {same['head_dim']}, fp16; "
            f"steps measured on {first.gpu}, {first.date}"
        )
        drawing.suptitle(title, x=0.01, ha="left", fontsize=11)
        drawing.legend(*ax.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(drawing))
