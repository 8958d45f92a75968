"""Writes the tables of measured numbers in README.md and docs from benchmarks/results/*.jsonl. Numbers there are never typed.

python tools/readme_numbers.py           rewrite
python tools/readme_numbers.py --check   exit 1 if a file is not what the results say (a test runs this)
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- numbers: made by tools/readme_numbers.py -->", "<!-- /numbers -->"
# label, op, what of its rows, peer
LINES = (
    ("rms_norm", "rms_norm", lambda r: True, "torch.compile"),
    ("layer_norm", "layer_norm", lambda r: True, "torch.compile"),
    ("rope", "rope", lambda r: True, "torch.compile"),
    ("silu_mul", "silu_mul", lambda r: True, "torch.compile"),
    ("softmax", "softmax", lambda r: True, "torch.compile"),
    ("dropout", "dropout", lambda r: True, "torch.eager"),
    ("quantize_fp8", "quantize_fp8", lambda r: True, "torch.compile"),
    ("rms_norm_quant", "rms_norm_quant", lambda r: True, "torch.compile"),
    ("silu_mul_quant", "silu_mul_quant", lambda r: True, "torch.compile"),
    ("embedding", "embedding", lambda r: True, "torch.eager"),
    ("argmax", "argmax", lambda r: True, "torch.eager"),
    ("sample", "sample", lambda r: True, "torch.eager"),
    ("matmul", "matmul", lambda r: "cublas" in r["peers"], "cublas"),
    ("matmul, fp8, scale per tensor or row", "matmul", lambda r: r["problem"].get("scaling") in (1, 2), "scaled_mm"),
    ("matmul, fp8, scale per block", "matmul", lambda r: r["problem"].get("scaling") == 3, "scaled_mm"),
    ("bmm", "bmm", lambda r: "cublas" in r["peers"], "cublas"),
    ("grouped_gemm", "grouped_gemm", lambda r: "grouped_mm" in r["peers"], "grouped_mm"),
    ("moe", "moe", lambda r: True, "grouped_mm"),
    ("attention", "attention", lambda r: True, "cudnn"),
    ("attention_decode", "attention_decode", lambda r: True, "sdpa"),
)
PEER_WORDS = {
    "cublas": "cuBLAS", "cudnn": "cuDNN SDPA", "sdpa": "flash SDPA", "scaled_mm": "torch._scaled_mm", "grouped_mm": "torch._grouped_mm",
}  # fmt: skip


def results() -> list[dict]:
    """The newest row of each (op, case, gpu): files are read in name order, rows in file order."""
    newest: dict[tuple, dict] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            newest[row["op"], row["case"], row["gpu"]] = row
    return list(newest.values())


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(rows: list[dict]) -> str:
    lines = [
        "| op | cases | best rate | share of the roof, median | against | geomean | worst | best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, op, belongs, peer in LINES:
        mine = [r for r in rows if r["op"] == op and belongs(r)]
        ratios = [r["peers"][peer] for r in mine if peer in r["peers"]]
        if not ratios:
            continue
        compute = [r["tflops"] for r in mine if r["bound"] == "compute"]
        memory = [r["gbs"] for r in mine if r["bound"] == "memory"]
        rate = " / ".join(([f"{max(compute):.0f} TFLOP/s"] if compute else []) + ([f"{max(memory) / 1000:.2f} TB/s"] if memory else []))
        roof = sorted(r["roof_pct"] for r in mine)[len(mine) // 2]
        lines.append(
            f"| {label} | {len(mine)} | {rate} | {roof:.0f} % | {PEER_WORDS.get(peer, peer)} | "
            f"**{geomean(ratios):.2f}x** | {min(ratios):.2f}x | {max(ratios):.2f}x |"
        )
    gpus = sorted({r["gpu"] for r in rows})
    dates = sorted({r["date"] for r in rows})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines += ["", f"{', '.join(gpus)}, bf16 unless a case says otherwise, {span}, `tilewright bench`; all rows, losses included: benchmarks/results."]
    return "\n".join(lines)


def rewritten(text: str, body: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{body}\n{END}{tail}"


def main() -> int:
    rows = results()
    stale = []
    for path in [ROOT / "README.md"]:
        text = path.read_text()
        if BEGIN not in text:
            print(f"{path.name} must hold {BEGIN!r}, got none", file=sys.stderr)
            return 1
        new = rewritten(text, table(rows))
        if new != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new)
    if stale and "--check" in sys.argv:
        print(f"not what benchmarks/results say: {', '.join(stale)}. Run python tools/readme_numbers.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
