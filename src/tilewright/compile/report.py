"""Which kernels there are to compile, and a row for each: op x kernel x config x architecture."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..launch import Device, Traced, traced
from ..ops.common.weight_formats import step_weights
from ..testing import call_space, op_name, run_op
from ..testing.cases import cases
from .build import compile_launches
from .cache import ResultCache
from .job import Compiled, one_line

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
HANDFUL = 4  # problems of an op whose every config is compiled


def archs_of(text: str) -> list[str]:
    """Those of a list with commas, all for "". One of commas alone names an architecture that
    there is not, and not all.
    """
    return [name.strip() for name in text.split(",") if name.strip()] or ([text] if text else list(ARCHS))


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one config of an op, compiled for one architecture.

    problem, config: as text. `problems` problems need this binary with this config; `problem` is
        the first.
    default: `config` is the first of the space for what a call asks, which an untuned call uses.
    kernel: "" if the op's own code failed before a launch.
    threads: those of a block that compute. weights: small weights that a block decodes in a step.
    """

    op: str
    arch: str
    kernel: str
    config: str
    problem: str
    problems: int
    default: bool
    compiled: Compiled
    threads: int = 0
    weights: int = 0

    @property
    def per_weight(self) -> float | None:
        """Instructions of a thread for each small weight, in the loop that decodes them."""
        found = self.compiled.resources
        return round(found.loop * self.threads / self.weights, 2) if found and found.loop and self.weights else None

    @property
    def spills(self) -> bool:
        return self.compiled.resources is not None and self.compiled.resources.spills

    @property
    def failed(self) -> bool:
        return self.compiled.resources is None

    @property
    def verdict(self) -> str:
        return "FAILED" if self.failed else "SPILLS" if self.spills else "ok"


def compile_ops(
    ops: Sequence[ModuleType],
    archs: Sequence[str] = ARCHS,
    *,
    defaults_only: bool = False,
    jobs: int | None = None,
    problems: Callable[[ModuleType, Device], Sequence[Any]] | None = None,
    cache: ResultCache | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Compiles every kernel of every config of `ops` for `archs`, without a GPU.

    Args:
        ops: modules of `tilewright.ops`.
        archs: compiler targets; each needs a device in the table of `Device`.
        defaults_only: only the config that an untuned call would use, but for every real and
            benchmark case.
        jobs: processes; by default one per core.
        problems: chooses the problems of an op on a device; by default `representative`, and every
            case for defaults.
        cache: see ResultCache. on_done: called with (finished, distinct) as compilations finish.
    Raises: ValueError for an unknown architecture.
    """
    choose = problems or ((lambda op, _: every_case(op)) if defaults_only else representative)
    pending: list[tuple[Row, Traced | None]] = []
    for op in ops:
        for arch in archs:
            device = Device.for_arch(arch)
            for problem in choose(op, device):
                pending += _rows(op, problem, device, defaults_only)
    launches = [(launch, row.arch) for row, launch in pending if launch]
    results = iter(compile_launches(launches, jobs=jobs, cache=cache, on_done=on_done))
    return _merged(dataclasses.replace(row, compiled=next(results)) if launch else row for row, launch in pending)


def every_case(op: ModuleType) -> list[Any]:
    """Every problem of GPU tests and benchmark, once."""
    return list(dict.fromkeys(cases(op, "bench") + cases(op, "real")))


def representative(op: ModuleType, device: Device) -> list[Any]:
    """A few large problems that the device can run and that launch each kernel of an op for each
    dtype.
    """
    largest: dict[frozenset[tuple[str, ...]], Any] = {}
    for problem in sorted(every_case(op), key=_work, reverse=True):
        try:
            configs = call_space(op, problem, device)
            if not configs:
                continue
            kind = frozenset(_kind(launch) for launch in _launches(op, problem, device, configs[0]))
        except Exception:  # the same problem fails again, and is then reported, where its rows are made
            kind = frozenset({("error",)})
        largest.setdefault(kind, problem)
    chosen: list[Any] = []
    seen: set[tuple[str, ...]] = set()
    for kind, problem in largest.items():
        if len(chosen) < HANDFUL or not kind <= seen:
            chosen.append(problem)
            seen |= kind
    return chosen


def _rows(op: ModuleType, problem: Any, device: Device, defaults_only: bool) -> Iterator[tuple[Row, Traced | None]]:
    """A row for each launch, not yet compiled; or one row with the error of the op's own code."""
    try:
        configs = call_space(op, problem, device)[: 1 if defaults_only else None]
    except Exception as error:
        yield _row(op, problem, None, device, True, Compiled(error=one_line(error))), None
        return
    for i, config in enumerate(configs):
        try:
            launches = _launches(op, problem, device, config)
        except Exception as error:
            yield _row(op, problem, config, device, i == 0, Compiled(error=one_line(error))), None
            continue
        for launch in launches:
            row = _row(op, problem, config, device, i == 0, Compiled())
            threads, weights = 32 * (launch.launch.num_worker_warps or 4), step_weights(launch.launch.constants)
            yield dataclasses.replace(row, kernel=launch.launch.name, threads=threads, weights=weights), launch


def _row(op: ModuleType, problem: Any, config: Any, device: Device, default: bool, compiled: Compiled) -> Row:
    return Row(op_name(op), device.arch, "", fields_text(config), fields_text(problem), 1, default, compiled)


def _launches(op: ModuleType, problem: Any, device: Device, config: Any) -> list[Traced]:
    with traced(device) as launches, torch.inference_mode():
        run_op(op, problem.inputs(torch.device("meta")), config)
    return launches


def _kind(launch: Traced) -> tuple[str, ...]:
    return launch.launch.name, *(str(a.dtype) for a in launch.args.values() if isinstance(a, torch.Tensor))


def _work(problem: Any) -> float:
    cost = problem.cost()
    return float(cost.size_bytes + cost.flops / 100)


def _merged(rows: Iterable[Row]) -> list[Row]:
    """One row for all problems for which a config makes the same binary."""
    merged: dict[tuple[str, ...], Row] = {}
    for row in rows:
        made = row.compiled
        key = row.op, row.arch, row.kernel, row.config, repr((made.resources, made.cubin_bytes, made.error))
        first = merged.get(key)
        merged[key] = dataclasses.replace(first, problems=first.problems + 1, default=first.default or row.default) if first else row
    return list(merged.values())


def fields_text(value: Any) -> str:
    """`tile_m=128 dtype=bfloat16`: a dataclass without name and None fields; "" for None."""
    if value is None:
        return ""
    fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return " ".join(f"{name}={str(v).removeprefix('torch.')}" for name, v in fields if v is not None)
