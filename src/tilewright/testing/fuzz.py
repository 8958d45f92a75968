"""`tilewright verify --fuzz`: drawn calls of every op against definitions of their own.

A family is what a kernel is compiled for: dtypes, options, a config, how the arguments lie in
memory. Its cases differ in sizes and values, and so share compiled kernels. The accuracy rule
judges each result; arguments and results lie in poisoned memory.
"""

import functools
import inspect
import itertools
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from .. import ops
from ..launch import Device, chosen_device
from ..launch.console import plain_console
from ..launch.parent import spawned_pool
from ..ops.grouped_gemm import grouped_gemm_list
from .accuracy import accuracy
from .check import op_name, outputs, run_op
from .definitions import DEFINITIONS, FP8, Results, attention, mx_values, normed, scores_of, wide
from .fuzz_draws import DRAWS
from .poison import MARGIN_BYTES, poisoned_empty
from .sizes import Sizes

CASES = {"cpu": 6, "cuda": 120}  # of a family: a kernel compiles for a second, a case takes milliseconds
SIZES = 12  # of a family: each may compile kernels of its own
SHOWN, LONGEST = 5, 1000  # wrong cases of an op in the output, and characters that say what is wrong with one
FEW, MOST_DRAWS = 64, 64  # elements that make a result's RMS; draws of values that judge a case of luck together
ROUNDINGS = 4  # of a definition that draws what is rounded: of few numbers, one draw is a matter of luck
ATTENTION = {"attention", "attention_decode", "cascade_decode", "mla", "mla_decode", "sparse_decode"}
LUCK = 2.0  # times its bound: what one result of many elements may owe to luck; of few, torch's error may be 0
Compared = list[tuple[Tensor, Tensor, Tensor]]  # of each output: ours, theirs, the truth


@dataclass
class Layout:
    """How arguments lie in memory.

    pad: elements between the rows of a matrix. shift: elements in front. expand: arguments of three
    and more axes are one matrix, seen again and again.
    """

    pad: int = 0
    shift: int = 0
    expand: bool = False

    def placed(self, tensor: Tensor, name: str) -> Tensor:
        """The same values so laid out, with NaN (in codes and integers: extremes) around them."""
        if tensor.numel() == 0 or tensor.dim() == 0:
            return tensor
        if self.expand and tensor.dim() >= 3 and tensor.is_floating_point() and tensor.dtype not in FP8 and name in EXPANDABLE:
            return self.placed(tensor[0], "").expand_as(tensor)
        floating = tensor.is_floating_point()
        pad = self.pad if floating and tensor.dim() > 1 and tensor.stride(-1) == 1 else 0
        axes = sorted(range(tensor.dim()), key=lambda axis: (tensor.stride(axis), -axis))
        strides, step = [0] * tensor.dim(), 1
        for i, axis in enumerate(axes):
            strides[axis] = step
            step = step * tensor.shape[axis] + (pad if i == 0 else 0)
        margin = MARGIN_BYTES // tensor.element_size()
        start = margin + (self.shift if floating else 0)
        flat = torch.empty(start + step + margin, dtype=tensor.dtype, device=tensor.device)
        if floating:
            flat.copy_(torch.full((), torch.nan, device=tensor.device))
        else:
            flat.fill_(tensor.dtype is torch.bool or torch.iinfo(tensor.dtype).min or 255)  # 255: a NaN, as code and as scale
        inside = flat.as_strided(tensor.shape, strides, start)
        inside.copy_(tensor)
        return inside


EXPANDABLE = ("a", "b", "k_nope", "v")


class Refused(Exception):
    """The op says that it does not take such a call."""


@dataclass
class Tally:
    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def plus(self, other: "Tally") -> "Tally":
        return Tally(self.cases + other.cases, self.wrong + other.wrong, self.refused + other.refused)


class Family:
    """Cases of one op that share what is compiled."""

    def __init__(self, op: ModuleType, seed: int, number: int, where: torch.device):
        self.op, self.name, self.where, self.id = op, op_name(op), where, f"{seed}-{op_name(op)}-{number}"
        self.seed, self.number = seed, number
        self.device = Device.of(torch.empty(0, device=where))
        s = Sizes(self.id)
        self.fixed = DRAWS[self.name][0](s)
        self.layout = Layout(s.choice((0, 0, 1, 8, 16)), s.choice((0, 0, 3, 8)), s.odds(0.1))
        self.forced, self.pick = s.odds(0.6), s.random()
        self.as_list = self.name == "grouped_gemm" and self.fixed["masked"] and s.odds(0.4)
        self.known: list[Any] = []  # configs that cases had
        self.configs: list[Any] = []  # of each of its sizes, as far as they were asked for

    def case(self, number: int) -> None:
        """Raises AssertionError if the result is wrong, Refused if the op refuses the call.

        The bound is twice torch's error. Where few values make that error (few elements, or one
        scale of many), it is a matter of luck: a result near it is judged together with others of
        the same case, four times as many until they are right or enough.
        """
        what, first = self._case(number)
        draws, wrong = [first], beyond([first])
        while wrong:
            if len(draws) >= MOST_DRAWS or not may_be_luck(self.name, first):
                raise AssertionError(f"{what} {wrong}")
            draws += [self._case(number, again)[1] for again in range(len(draws), 4 * len(draws))]
            wrong = beyond(draws)

    def _case(self, number: int, again: int = 0) -> tuple[str, Compared]:
        """What was called, and what comes of it."""
        problem, config, s = self._problem(number), self._config(number), Sizes(f"{self.id}-{number}")
        torch.manual_seed(zlib.crc32(f"{self.id}-{number}".encode()) + again)
        inputs = vary(problem.inputs(self.where), s)
        given: dict[str, Any] = {name: self.layout.placed(x, name) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}  # an op may write its arguments
        try:
            with poisoned_empty():
                result = [listed(**given)] if self.as_list else outputs(run_op(self.op, given, config))
        except (ValueError, TypeError) as error:
            raise Refused(str(error)) from error
        what = f"{self.name} {problem} {config or 'default config'} {self.layout}"
        return what, compared(self.name, result, inputs, what)

    def _problem(self, number: int) -> Any:
        return self.op.Problem(**self.fixed, **DRAWS[self.name][1](Sizes(f"{self.id}-sizes-{number % SIZES}"), self.fixed))

    def _config(self, number: int) -> Any:
        """The first config of earlier sizes that is legal for this one, so that cases share
        kernels; else None, for the one of a user's call. The same if no other case runs.
        """
        for size in range(len(self.configs), number % SIZES + 1):
            found = self.op.space(self._problem(size), self.device)
            if found and self.forced and not self.known:
                self.known.append(found[int(self.pick * len(found))])
            config = next((known for known in self.known if known in found), None)
            if found and config is None and self.where.type == "cpu":  # where kernels compile for longer than they run
                self.known.append(found[0])
            self.configs.append(config)
        return self.configs[number % SIZES]


def listed(a: Tensor, b: Tensor, counts: Tensor, *, trans_b: bool, out_dtype: torch.dtype, **scales: Any) -> Tensor:
    """`grouped_gemm` of rooms, each product by itself in one call of `grouped_gemm_list`."""
    rooms = [(i, room[:n]) for i, (room, n) in enumerate(zip(a, counts.tolist(), strict=True))]
    given = {name: scales[name] for name in ("scale_a", "scale_b") if scales.get(name) is not None}
    each = {
        name: [(x if x.dim() == 0 else x[i, : len(room)] if name == "scale_a" and x.dim() > 1 else x[i]) for i, room in rooms]
        for name, x in given.items()
    }
    found = grouped_gemm_list([room for _, room in rooms], list(b), trans_b=trans_b, out_dtype=out_dtype, **each)
    return torch.stack([torch.cat((x, x.new_zeros(a.shape[1] - len(x), x.shape[1]))) for x in found])


def vary(inputs: dict[str, Any], s: Sizes) -> dict[str, Any]:
    """Shorter lengths, ids out of range, equal values, other softmax scales: what a Problem's own
    inputs leave out.
    """
    if "window" in inputs and s.odds(0.2):
        inputs["scale"] = s.choice((0.0625, 0.1147))  # Gemma 3 and DeepSeek-V2
    for name in ("kv_len", "topk_length", "counts"):
        if inputs.get(name) is not None and s.odds(0.5):
            inputs[name] = (inputs[name] * s.random()).to(inputs[name].dtype)
    if "ids" in inputs and "vocab" not in inputs and inputs["ids"].dim() == 1 and s.odds(0.3):
        inputs["ids"][0] = s.choice((-1, 1 << 30))
    if s.odds(0.1) and "x" in inputs and inputs["x"].is_floating_point():
        inputs["x"] = inputs["x"].round()
    return inputs


def compared(name: str, result: Results, inputs: dict[str, Any], what: str) -> Compared:
    """The outputs that an error judges. Raises AssertionError if one of the others is wrong."""
    if name == "sample":
        judge_sample(result[0], inputs, what)
        return []
    truth = defined(name, {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in inputs.items()}, result, inputs)
    theirs = defined(name, inputs, result, inputs)
    ours = comparable(name, result, inputs, theirs)
    if name == "attention_decode" and not inputs["normalize"]:
        ours, theirs, truth = (state_of(*each, dtype=inputs["q"].dtype) for each in (ours, theirs, truth))
    if drawn_roundings(name):
        others = [defined(name, inputs, result, inputs, rounding) for rounding in range(1, ROUNDINGS)]
        theirs = [torch.stack(each) for each in zip(theirs, *others, strict=True)]
    if not len(ours) == len(theirs) == len(truth):
        raise AssertionError(f"{what}: {len(ours)} results, the definition has {len(truth)}")
    found = []
    for i, (o, t, w) in enumerate(zip(ours, theirs, truth, strict=True)):
        if o.is_floating_point():
            expected = w.isnan()  # a NaN must be where the definition has one, and nowhere else
            o, t, w = (torch.where(expected & x.isnan(), 0.0, x) for x in (o, t.to(o.dtype), w))
            found.append((o, t, w))
        elif not torch.equal(o.long(), w.long()):
            raise AssertionError(f"{what} output {i}: indices differ")
    return found


def beyond(draws: Sequence[Compared]) -> str:
    """What breaks the accuracy rule in all draws together, if anything does."""
    for i, each in enumerate(zip(*draws, strict=True)):
        ours, theirs, truth = zip(*each, strict=True)
        roundings = theirs[0].dim() - truth[0].dim()  # 1 where theirs are several
        found = accuracy(torch.stack(ours), torch.stack(theirs, roundings), torch.stack(truth))
        if not found.ok:
            return f"output {i} (draws: {len(draws)}): {found}"
    return ""


def may_be_luck(name: str, draw: Compared) -> bool:
    """Whether what breaks the rule in one draw has few elements, or is near its bound."""
    for i, (o, t, w) in enumerate(draw):
        found, few = accuracy(o, t, w), carrying(w, rows=i == 0 and name in ATTENTION) < FEW
        if not found.ok and not max(found.rms_ratio, found.worst_ratio) < (torch.inf if few else LUCK):  # also for NaN
            return False
    return True


def carrying(truth: Tensor, *, rows: bool) -> float:
    """How many elements make its RMS: all if they are alike, one if one is much larger, as in a
    softmax.

    rows: the elements of a row count as one, because they share the weights of a softmax.
    """
    squares = torch.where(truth.isfinite(), truth, 0.0).double().square()
    squares = squares.sum(-1) if rows else squares
    return float(squares.sum() ** 2 / squares.square().sum().clamp(min=torch.finfo(torch.float64).tiny))


def drawn_roundings(name: str) -> bool:
    return name in DEFINITIONS and "rounding" in inspect.signature(DEFINITIONS[name]).parameters


def defined(name: str, inputs: dict[str, Any], result: Results, real: dict[str, Any], rounding: int = 0) -> Results:
    function = DEFINITIONS["moe_route" if name == "rms_norm_route" else name]
    if name == "rms_norm_route":
        total = inputs["x"] if inputs["residual"] is None else inputs["x"] + inputs["residual"]
        y = normed(total, inputs["weight"], inputs["eps"], 0.0, inputs["round_before_weight"]).to(total.dtype)
        found = function(**{**route(inputs), "logits": logits_of(y, inputs)})
        return [*found, y, *([] if inputs["residual"] is None else [total])]
    extra: dict[str, Any] = {}
    if "exact" in inspect.signature(function).parameters:
        first = inputs["a"] if "a" in inputs else inputs["k"]
        extra = {"exact": first.dtype is torch.float64}
        if "stored" in inspect.signature(function).parameters:
            extra["stored"] = result[0].dtype
            inputs = {key: x for key, x in inputs.items() if key not in ("out_dtype", "expected_rows")}
    return function(**inputs, **extra, **({"rounding": rounding} if drawn_roundings(name) else {}))


def logits_of(y: Tensor, inputs: dict[str, Any]) -> Tensor:
    logits = wide(y) @ wide(inputs["router"]).mT
    return logits if inputs["router_bias"] is None else logits + wide(inputs["router_bias"])


def route(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: inputs[key] for key in ("top_k", "sigmoid", "bias", "normalize", "scale", "groups", "top_groups")}


def comparable(name: str, result: Results, inputs: dict[str, Any], theirs: Results) -> Results:
    """Results as their definition has them."""
    if name in ("quantize_fp8", "rms_norm_quant", "silu_mul_quant"):
        codes, scale, *rest = result
        high, across = inputs["block"][0] or codes.shape[0], inputs["block"][1] or codes.shape[1]
        scale = scale.reshape(theirs[1].shape)
        each = scale.repeat_interleave(high, 0)[: codes.shape[0]].repeat_interleave(across, 1)[:, : codes.shape[1]]
        x = inputs.get("x", inputs.get("gate"))
        assert x is not None
        theirs[1] = theirs[1].to(x.dtype) if name != "quantize_fp8" else theirs[1]  # a row's scale: the last bits of one sum
        return [codes.float() * each, scale.to(theirs[1].dtype), *rest]
    if name == "quantize_mx":
        return [mx_values(result[0], result[1], torch.float32), result[1].float()]
    if name in ("moe_route", "rms_norm_route"):
        weights, ids, *rest = result
        logits = inputs["logits"] if name == "moe_route" else logits_of(rest[0].double(), {**inputs, "router": inputs["router"].double()})
        by = scores_of(logits.double(), inputs["sigmoid"], inputs["bias"])[1]
        return [weights, by.gather(-1, ids.long() + inputs["first_expert"]).to(weights.dtype), *rest]
    if name == "sparse_index":
        return [attention.scores_of_lists(result[0], inputs)]
    if name == "grouped_gemm":
        row = torch.arange(result[0].shape[-2], device=result[0].device)
        end = inputs["offsets"][-1] if inputs["counts"] is None else inputs["counts"][:, None]
        return [torch.where((row < end)[..., None], result[0], 0)]
    return result


def state_of(total: Tensor, maximum: Tensor, denominator: Tensor, *, dtype: torch.dtype) -> Results:
    """What a state of the softmax stands for, which a factor of total and denominator leaves: the
    result, the lse, and the maximum as far as it need be one.

    dtype: of the values, to which weights are rounded for the total and not for the denominator.
    """
    exact, seen = total.dtype is torch.float64, torch.where(denominator == 0, 1.0, denominator)
    return [
        total / seen[..., None] if exact else (total / seen[..., None]).to(dtype),
        torch.where(denominator == 0, -torch.inf, maximum + seen.log()),
        maximum if exact else maximum.bfloat16(),
    ]


def judge_sample(drawn: Tensor, inputs: dict[str, Any], what: str) -> None:
    """Each draw must be a column that temperature, top_k, top_p and min_p leave; a greedy one the
    first of the largest.
    """
    logits = inputs["logits"].double()
    count, columns = logits.shape

    def each(name: str, default: float) -> Tensor:
        value = inputs.get(name)
        return torch.full((count, 1), default, device=logits.device).double() if value is None else value.double().expand(count)[:, None]

    temperature, top_k, top_p, min_p = each("temperature", 1.0), each("top_k", 0.0), each("top_p", 1.0), each("min_p", 0.0)
    ordered, _ = logits.sort(-1, descending=True)
    last = torch.where(top_k > 0, top_k, columns).clamp(max=columns).long() - 1
    kept = logits >= ordered.gather(-1, last)
    scaled = (logits / temperature.clamp(min=1e-30)).masked_fill(~kept, -torch.inf)
    ordered, order = scaled.sort(-1, descending=True)
    share, first = ordered.softmax(-1), torch.searchsorted(-ordered, -ordered)  # first: of the columns that are as likely
    before = torch.empty_like(share).scatter_(-1, order, (share.cumsum(-1) - share).gather(-1, first))
    kept &= (before < top_p + 1e-5) | (logits == ordered[:, :1])
    kept &= share.gather(-1, order.argsort(-1)) >= min_p * share[:, :1] * (1 - 1e-4)
    first = DEFINITIONS["argmax"](logits)[0]
    right = torch.where(temperature[:, 0] <= 0, drawn == first, kept.gather(-1, drawn[:, None])[:, 0])
    if not right.all():
        row = int((~right).nonzero()[0])
        raise AssertionError(f"{what}: row {row} drew column {int(drawn[row])}, which is not among those kept")


def fuzz_command(
    names: list[str] | None,
    *,
    seconds: float,
    seed: int = 0,
    case: str = "",
    device: str = "",
    jobs: int | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Draws cases for so many seconds, or runs one. Returns the exit code: 1 if any is wrong.

    case: "FAMILY.CASE", with one op. jobs: processes, which draw other families each; by default
    one, on a GPU up to 16, since a case waits for compilers and for the host. tell: takes a row of
    what ran.
    """
    console = plain_console()
    where, chosen = chosen_device(device), ops.named(names)
    if case:
        if len(chosen) != 1:
            raise ValueError("--case must come with one op")
        family, dot, number = case.partition(".")
        if not (dot and family.isdecimal() and number.isdecimal()):
            raise ValueError(f"--case must be FAMILY.CASE, as in 12.0, got {case!r}")
        try:
            with torch.inference_mode():
                Family(chosen[0], seed, int(family), where).case(int(number))
        except AssertionError as error:
            console.print(f"wrong: {error}", style="red")
            return 1
        console.print("right")
        return 0
    jobs = jobs or (1 if where.type == "cpu" else min(16, os.cpu_count() or 1))
    start = time.time()
    console.print(f"fuzz on {where} for {seconds:g} s, --seed {seed}")
    shares = (tuple(map(op_name, chosen)), where, seed, start + seconds)
    if jobs == 1:
        found = [run(*shares)]
    else:
        with spawned_pool(jobs) as pool:
            found = list(pool.map(functools.partial(run, *shares, jobs=jobs), range(jobs)))
    tallies = {name: functools.reduce(Tally.plus, (tally[name] for tally in found)) for name in found[0]}
    for name, tally in tallies.items():
        refused = f", {sum(tally.refused.values())} refused: {tally.refused.most_common(1)[0][0]}" if tally.refused else ""
        console.print(f"{name:<18} {tally.cases:6d} cases, {len(tally.wrong)} wrong{refused}")
    cases, took, wrong = sum(t.cases for t in tallies.values()), time.time() - start, [x for t in tallies.values() for x in t.wrong]
    console.print(f"{cases} cases in {took:.0f} s, {cases / took:.1f} a second, {len(wrong)} wrong")
    if tell is not None:
        here = Device.of(torch.empty(0, device=where))
        row = {"op": "fuzz", "case": f"seed={seed} seconds={seconds:g}", "gpu": here.name, "cases": cases, "took_s": round(took, 1), "jobs": jobs}
        tell(
            row | {"wrong": wrong, "refused": sum(t.refused.total() for t in tallies.values()), "cases_of": {n: t.cases for n, t in tallies.items()}}
        )
    for name, tally in tallies.items():  # again: where output is cut, its end is kept
        for line in tally.wrong[:SHOWN]:
            console.print(f"wrong: {line}", style="red")
        if len(tally.wrong) > SHOWN:
            console.print(f"{name}: {len(tally.wrong) - SHOWN} more are wrong; --json FILE stores all", style="red")
    return 1 if wrong else 0


def run(names: Sequence[str], where: torch.device, seed: int, end: float, job: int = 0, jobs: int = 1) -> dict[str, Tally]:
    """Every jobs-th family from number `job` on, until the time is over; each round of families has
    one of each op, in another order.
    """
    chosen, tallies, console = ops.named(list(names)), {name: Tally() for name in names}, plain_console()
    for index in itertools.count(job, jobs):
        number, place = divmod(index, len(chosen))
        op = chosen[(place + number) % len(chosen)]
        if time.time() >= end:
            return tallies
        with torch.inference_mode():
            run_family(Family(op, seed, number, where), tallies[op_name(op)], end, console)
    raise AssertionError("unreachable")


def run_family(family: Family, tally: Tally, end: float, console: Console) -> None:
    for case in range(CASES[family.where.type]):
        if time.time() >= end:
            return
        try:
            family.case(case)
        except Refused as error:
            tally.refused[str(error).split(", got")[0]] += 1
            continue
        except Exception as error:  # whatever else it is, the case is wrong
            again = f"tilewright verify {family.name} --fuzz 0 --seed {family.seed} --case {family.number}.{case} --device {family.where.type}"
            tally.wrong.append(f"{again}\n    {type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}")
            if len(tally.wrong) <= SHOWN:
                console.print(f"wrong: {tally.wrong[-1]}", style="red")
        tally.cases += 1
