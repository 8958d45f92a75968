"""Named sets of problems: those of the playbook's benchmarks, and those with published figures."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .. import ops
from ..launch.table import rebuilt
from ..testing import op_name
from .published import figures

SUITES = ("playbook", "seeds")
Lines = tuple[tuple[int, dict[str, Any]], ...]  # (value of x, problem as JSON types)
POWERS = (1024, 2048, 4096, 8192, 16_384)


@dataclass(frozen=True)
class Table:
    """One table of the playbook's benchmarks.

    title, script: as it prints them. metric: TFLOPS or GBps.
    x: name of the column that varies. lines: each of its values with a problem.
    """

    title: str
    script: str
    op: str
    x: str
    metric: str
    lines: Lines = field(repr=False)

    def problems(self) -> list[tuple[int, ModuleType, Any]]:
        """Each x with its op and Problem.

        Raises: LookupError for an unknown op, ValueError or TypeError for an impossible problem.
        """
        known = {op_name(op): op for op in ops.ALL}
        if self.op not in known:
            raise LookupError(f"no op {self.op}")
        op = known[self.op]
        return [(x, op, rebuilt(op.Problem, plain)) for x, plain in self.lines]


def playbook() -> list[Table]:
    """Every kernel of the playbook on the shapes of TileGym's benchmarks."""
    return [*_attention_tables(), *_matmul_tables(), *_row_tables()]


def _attention_tables() -> Iterator[Table]:
    def attention(length: int, dtype: str, causal: bool) -> dict[str, Any]:
        sizes = {"batch": 4, "q_heads": 32, "kv_heads": 32, "q_len": length, "kv_len": length, "head_dim": 128}
        return sizes | {"dtype": dtype, "causal": causal}

    for dtype in ("float16", "float8_e4m3fn"):
        for causal in (True, False):
            title = f"fused-attention-batch4-head32-d128-fwd-causal={causal}-{dtype}-TFLOPS"
            lines = tuple((n, attention(n, dtype, causal)) for n in POWERS)
            yield Table(title, "bench_fused_attention.py", "attention", "N_CTX", "TFLOPS", lines)
    for dtype in ("bfloat16", "float8_e4m3fn"):
        lines = tuple((n, {"batch": 4, "heads": 16, "q_len": n, "kv_len": n, "dtype": dtype}) for n in POWERS[:4])
        yield Table(f"mla-performance-{dtype}-causal-TFLOPS", "bench_mla.py", "mla", "seq_len", "TFLOPS", lines)
    for latent in (128, 512):
        token = {"batch": 1, "heads": 16, "dtype": "float16", "latent": latent, "rope": 64, "has_len": False}
        lines = tuple((n, token | {"max_len": n}) for n in (256, 512, *POWERS, 11_043))
        title = f"mla-decoding-performance-float16-head_dim={latent}-split_kv=True-GBps"
        yield Table(title, "bench_mla_decoding.py", "mla_decode", "kv_seq_len", "GBps", lines)


def _matmul_tables() -> Iterator[Table]:
    lines: Lines
    for dtype, options in (("float16", {"trans_b": False}), ("float8_e5m2", {"scaling": "TENSOR"})):
        lines = tuple((n, {"m": n, "n": n, "k": n, "dtype": dtype, **options}) for n in (*POWERS, 32_768))
        yield Table(f"matmul-performance-{dtype}-TFLOPS", "bench_matrix_multiplication.py", "matmul", "M=N=K", "TFLOPS", lines)
    for batch in (2, 8):
        lines = tuple((n, {"batch": batch, "m": n, "n": n, "k": n, "dtype": "float16", "out_dtype": "float16"}) for n in POWERS[:3])
        yield Table(f"bmm-batch{batch}-float16-TFLOPS", "bench_bmm.py", "bmm", "M=N=K", "TFLOPS", lines)
    for groups in (4, 16):
        for dtype, options in (("float16", {"out_dtype": "float16"}), ("float8_e5m2", {"scaling": "TENSOR"})):
            shared = {"groups": groups, "dtype": dtype, **options}
            lines = tuple((n, shared | {"rows": groups * n, "n": n, "k": n}) for n in POWERS[:3])
            yield Table(f"group-gemm-group{groups}-{dtype}-TFLOPS", "bench_group_gemm.py", "grouped_gemm", "M=N=K", "TFLOPS", lines)


def _row_tables() -> Iterator[Table]:
    lines: Lines
    for dtype in ("float16", "bfloat16"):
        lines = tuple((n, {"rows": 4096, "cols": n, "dtype": dtype}) for n in POWERS)
        yield Table(f"rmsnorm-M4096-{dtype}-GBps", "bench_rmsnorm.py", "rms_norm", "N", "GBps", lines)
    heads = {"batch": 1, "q_heads": 16, "kv_heads": 16, "head_dim": 64, "dtype": "float16"}
    lines = tuple((n, heads | {"seq_len": n}) for n in (*POWERS[2:], 32_768))
    yield Table("rope-head16-d64-float16-GBps", "bench_rope.py", "rope", "N_CTX", "GBps", lines)
    for dtype in ("float16", "float32"):
        lines = tuple((n, {"rows": n, "cols": 2048, "dtype": dtype, "fused": True}) for n in POWERS)
        yield Table(f"silu-and-mul-hidden2048-{dtype}-GBps", "bench_silu_and_mul.py", "silu_mul", "M", "GBps", lines)
        lines = tuple((n, {"rows": 4096, "cols": n, "dtype": dtype}) for n in POWERS)
        yield Table(f"swiglu-batch1-M4096-{dtype}-GBps", "bench_swiglu.py", "silu_mul", "N", "GBps", lines)
        lines = tuple((1 << n, {"size": 1 << n, "dtype": dtype}) for n in range(20, 27))
        yield Table(f"dropout-{dtype}-GBps", "bench_dropout.py", "dropout", "N", "GBps", lines)
    for dtype in ("float16", "float32"):
        lines = tuple((n, {"rows": 4096, "cols": n, "dtype": dtype}) for n in POWERS)
        yield Table(f"softmax-M4096-{dtype}-GBps", "bench_softmax.py", "softmax", "N", "GBps", lines)


def seeds() -> list[tuple[ModuleType, Any]]:
    """Every problem with a published figure that an op can run, once.

    Figures of whole models are those of `tilewright generate`.
    """
    known = {op_name(op): op for op in ops.ALL}
    found = []
    for figure in figures():
        if figure.op in known:
            plain = dict(figure.problem)
            found.append((known[figure.op], rebuilt(known[figure.op].Problem, plain | _untold(figure.op, plain))))
    return list(dict.fromkeys(found))


def _untold(op: str, plain: dict[str, Any]) -> dict[str, Any]:
    """Fields that the documents do not give, as the playbook's benchmarks set them."""
    if op == "matmul":
        return {} if "scaling" in plain else {"trans_b": False}
    return {"out_dtype": plain["dtype"]} if op in ("bmm", "grouped_gemm") else {}


def formatted(table: Table, columns: dict[str, dict[int, float]]) -> str:
    """The table as the playbook's benchmarks print it: title, numbered lines, library columns."""
    names = [table.x, *columns]
    lines = [[f"{float(x):.1f}", *(f"{values[x]:.6f}" if x in values else "nan" for values in columns.values())] for x, _ in table.lines]
    widths = [max(len(row[i]) for row in (names, *lines)) for i in range(len(names))]
    numbered = len(str(len(lines) - 1))
    head = " " * numbered + "  " + "  ".join(name.rjust(w) for name, w in zip(names, widths, strict=True))
    body = [f"{i:<{numbered}}  " + "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for i, line in enumerate(lines)]
    return "\n".join([f"{table.title}:", head, *body])
