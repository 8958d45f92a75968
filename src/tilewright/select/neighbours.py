"""What measured times say beyond the model: a regression on log(measured / modelled) over all
timings of an op.

Two launches err alike as far as their problems' sizes, options, kinds of launch and configs are
near, and where launches of near configs stand alike between their bounds (`regime`), whatever the
problem (`covariance`): a Gaussian process. `tune/fit.py` solves for the weight of each timing and
the data keeps these, so that a call only sums them up.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from .cost import Works
from .work import Work

Array = np.ndarray
Place = tuple[Any, Any, Works, str]  # problem, config, the work of both, their family

# Chosen by cross-validation over the problems of 8 ops (notes/LOG.md): the result is flat around
# them.
REACH = 1.5  # of problems: in the logarithm of each size, standard deviation
STEPS = 2.0  # of configs: a field that doubles is a step, as is a flag
OTHER_OPTIONS, OTHER_KIND = 0.9, 0.7  # how alike problems of other options, and launches of another kind, are
SAME_FAMILY = 0.3  # share of the likeness of configs that is being of one family
# Variances: that near problems share whatever the config (large, so that no config is praised for
# its problem), that launches of one kind share there, that a config has there, and everywhere.
OF_PROBLEM, OF_KIND, OF_BOTH, OF_CONFIG = 0.1, 0.02, 0.03, 0.01
OF_REGIME = 0.02  # variance that near configs share in one regime
# A standard deviation of the likeness of regimes, by number: the first four are logarithms.
WAVES, TAIL, DEPTH, INTENSITY, PARTS, OFF = 1.0, 0.2, 1.5, 1.0, 1.0, 1.0
FINE = 2  # numbers of a regime are rounded to so many in a standard deviation: many launches share one
NOISE = 0.002  # variance of a timing
ALIGNED = {128: 0, 64: 1, 32: 1}  # by the bytes that rows begin at multiples of; fewer: 2
ROWS = 16  # of the covariance that are summed up at once
MOST_REGIMES = 512  # whose sums are kept, of 20 KB each
MOST = 0.7  # a residual beyond says no more
HALF = 0.5  # how alike a timing must be to count as near
UNTIMED = 0.1  # doubt about a config that is far from all timed ones, in the logarithm; half of it for a near one of a far problem


@dataclass(frozen=True)
class Places:
    """Problems and configs as numbers. problem, kind, family, config, regime: of each place,
    positions in the tables behind them.

    where, option: of each problem the logarithms of its sizes, and the position of its options.
    regimes: numbers of each regime, none where they are not looked at.
    """

    problem: Array
    kind: Array
    family: Array
    config: Array
    regime: Array
    where: Array
    option: Array
    options: Sequence[str]
    kinds: Sequence[str]
    families: Sequence[str]
    names: Sequence[str]
    configs: Array
    regimes: Array

    @classmethod
    def of(cls, places: Sequence[Place], regimes_too: bool) -> "Places":
        tables: tuple[dict[Any, int], ...] = ({}, {}, {}, {}, {})
        found_at = ((problem, kind(work), family, config, regime(work) if regimes_too else ()) for problem, config, work, family in places)
        rows = [[table.setdefault(value, len(table)) for table, value in zip(tables, values, strict=True)] for values in found_at]
        problems, kinds, families, configs, regimes = tables
        options: dict[str, int] = {}
        option = np.array([options.setdefault(options_of(problem), len(options)) for problem in problems], int)
        found = [numbers(config) for config in configs]
        names = sorted({name for of in found for name in of})
        table = np.array([[of.get(name, 0.0) for name in names] for of in found], float)
        where = np.array([sizes(problem) for problem in problems])
        problem, of_kind, of_family, of_config, of_regime = np.array(rows, int).T
        tables_of = list(options), list(kinds), list(families), names, table, np.array(list(regimes), float)
        return cls(problem, of_kind, of_family, of_config, of_regime, where, option, *tables_of)


def covariance(problems: Array, kinds: Array, configs: Array, regimes: Array) -> Array:
    """Of the residuals of two launches that are so much alike."""
    return configs * (OF_CONFIG + OF_REGIME * regimes) + problems * (OF_PROBLEM + kinds * (OF_KIND + OF_BOTH * configs))


@dataclass(frozen=True)
class Neighbours:
    """The timings of an op, and the weight of each."""

    places: Places
    weights: Array

    @classmethod
    def solved(cls, places: Sequence[Place], residuals: Array, *, regimes_too: bool = False) -> "Neighbours":
        """residuals: log(measured / modelled). regimes_too: see `Choices`."""
        known = Places.of(places, regimes_too)
        blank = cls(known, np.zeros(len(places)))
        near = np.array([blank._near(problem) for problem in dict.fromkeys(problem for problem, *_ in places)])
        of_pair = dict(zip(blank._pair.tolist(), places, strict=True))
        alike = np.array([blank._alike(of_pair[i][1], of_pair[i][3]) for i in range(len(of_pair))])
        kinds, regimes = blank._kinds_alike(known.kinds), blank._regimes_alike(known.regimes)
        tables = (near, known.problem), (kinds, known.kind), (alike, blank._pair), (regimes, known.regime)
        own = np.empty((len(places), len(places)))
        for first in range(0, len(own), ROWS):  # parts of the tables that the caches hold: a third of the time
            rows = slice(first, first + ROWS)
            own[rows] = covariance(*(table[of[rows]].take(of, 1) for table, of in tables))
        own[np.diag_indices_from(own)] += NOISE
        # numpy's solver takes 1.5 times as long, and its OpenBLAS faults from some 24,000 rows on.
        factor = torch.linalg.cholesky(torch.from_numpy(own))
        weights = torch.cholesky_solve(torch.from_numpy(np.clip(residuals, -MOST, MOST))[:, None], factor)
        return cls(known, weights[:, 0].numpy())

    def say(self, places: Sequence[Place]) -> Array:
        """Of each of the places: what to add to the logarithm of the modelled time, and the doubt
        that is left.

        The sum of `covariance` times weight over all timings, of one kind and config together.
        """
        found, of = np.empty((2, len(places))), [problem for problem, *_ in places]
        for problem in dict.fromkeys(of):
            here = [i for i, other in enumerate(of) if other is problem or other == problem]
            found[:, here] = self._say(problem, [places[i] for i in here])
        return found

    def _say(self, problem: Any, places: Sequence[Place]) -> tuple[Array, Array]:
        """The same for places of one problem."""
        of_problem = self._near(problem)
        weights = self.weights * of_problem[self.places.problem]
        of_kinds = np.bincount(self._kind_and_pair, weights, len(self.places.kinds) * len(self._pairs)).reshape(len(self.places.kinds), -1)
        kinds: dict[str, int] = {}
        of_kind = [kinds.setdefault(kind(work), len(kinds)) for _, _, work, _ in places]
        near = self._kinds_alike(list(kinds)) @ of_kinds  # of each kind that occurs and each pair
        shared = (OF_BOTH * near + OF_CONFIG * self._everywhere)[of_kind]  # of each place and pair: by as much as their configs are alike
        if self.places.regimes.size:
            shared += [self._of_regime(regime(work)) for _, _, work, _ in places]
        alike = np.array([self._alike(config, family) for _, config, _, family in places])
        residual = OF_PROBLEM * weights.sum() + OF_KIND * near.sum(1)[of_kind] + np.einsum("ij,ij->i", alike, shared)
        nearest = np.maximum.reduceat(of_problem[self._problem_by_pair], self._first_of_pair)
        alike *= 1 + nearest
        return residual, UNTIMED * (1 - alike.max(1) / 2)

    def near(self, place: Place) -> int:
        """How many timings are near the place."""
        problem, config, work, family = place
        known, alike = self.places, self._alike(config, family)
        near = np.flatnonzero((alike > HALF)[self._pair])  # no factor is above 1
        both = alike[self._pair[near]] * self._near(problem)[known.problem[near]] * self._kinds_alike([kind(work)])[0, known.kind[near]]
        return int((both > HALF).sum())

    @cached_property
    def _near(self) -> Callable[[Any], Array]:
        """How alike a problem is to each of the known ones, from 0 to 1."""
        known = self.places
        position = {options: i for i, options in enumerate(known.options)}

        @lru_cache(maxsize=8)  # asked for again by `near`
        def alike(problem: Any) -> Array:
            apart = np.square(np.array(sizes(problem)) - known.where).sum(1)
            mine = known.option == position.get(options_of(problem), -1)
            found: Array = np.exp(apart / (-2 * REACH**2)) * np.where(mine, 1.0, OTHER_OPTIONS)
            return found

        return alike

    def _kinds_alike(self, kinds: Sequence[str]) -> Array:
        return np.array([[1.0 if a == b else OTHER_KIND for b in self.places.kinds] for a in kinds])

    def _regimes_alike(self, regimes: Array) -> Array:
        """How alike each known regime is to each of these, from 0 to 1; 0 if none is known."""
        known = self.places.regimes
        apart = np.square(known).sum(1)[:, None] - 2 * known @ regimes.T + np.square(regimes).sum(1)
        found: Array = np.exp(apart / (-2 * FINE**2)) * (known.size > 0)
        return found

    @cached_property
    def _of_regime(self) -> Callable[[tuple[int, ...]], Array]:
        """Of each pair, what its timings share with a launch of a regime and of a like config.
        Kept: sizes near each other have few regimes.
        """

        def summed(mine: tuple[int, ...]) -> Array:
            alike = self._regimes_alike(np.array([mine]))[:, 0]
            return np.bincount(self._pair, OF_REGIME * self.weights * alike[self.places.regime], len(self._pairs))

        return lru_cache(maxsize=MOST_REGIMES)(summed)

    def _alike(self, config: Any, family: str) -> Array:
        """How alike a config of a family is to each pair of config and family. Kept: sizes have no
        part in it.
        """
        found = self._rows.get((config, family))
        if found is None:
            known, mine = self.places, numbers(config)
            steps = np.minimum(np.abs(known.configs - [mine.get(name, 0.0) for name in known.names]), 2.0).sum(1)
            of_config, of_family = np.divmod(self._pairs, len(known.families))
            same = of_family == (known.families.index(family) if family in known.families else -1)
            found = self._rows[config, family] = (1 - SAME_FAMILY) * np.exp(steps / -STEPS)[of_config] + SAME_FAMILY * same
        return found

    @cached_property
    def _rows(self) -> dict[tuple[Any, str], Array]:
        return {}

    @cached_property
    def _everywhere(self) -> Array:
        """Of each pair the sum of its timings' weights."""
        return np.bincount(self._pair, self.weights, len(self._pairs))

    @cached_property
    def _kind_and_pair(self) -> Array:
        """Of each timing, as one number."""
        found: Array = self.places.kind * len(self._pairs) + self._pair
        return found

    @cached_property
    def _order(self) -> Array:
        """The timings, pair by pair."""
        return np.argsort(self._pair, kind="stable")

    @cached_property
    def _problem_by_pair(self) -> Array:
        found: Array = self.places.problem[self._order]
        return found

    @cached_property
    def _first_of_pair(self) -> Array:
        return np.searchsorted(self._pair[self._order], np.arange(len(self._pairs)))

    @cached_property
    def _paired(self) -> tuple[Array, Array]:
        pairs, of = np.unique(self.places.config * len(self.places.families) + self.places.family, return_inverse=True)
        return pairs, of

    @property
    def _pairs(self) -> Array:
        """Config and family of the timings, once each, as one number."""
        return self._paired[0]

    @property
    def _pair(self) -> Array:
        """Of each timing, the position among them."""
        return self._paired[1]

    def plain(self) -> dict[str, Any]:
        """As JSON types; the inverse of `read`."""
        p = self.places
        sizes_of = [[round(math.exp(x)) for x in where] for where in p.where.tolist()]
        columns = [getattr(p, name).tolist() for name in ("problem", "kind", "family", "config")]
        regimes = {}
        if p.regimes.size:
            columns.append(p.regime.tolist())
            regimes["regimes"] = p.regimes.astype(int).tolist()
        return {
            **{name: getattr(p, name) for name in ("options", "kinds", "families", "names")},
            "problems": [[*of, option] for of, option in zip(sizes_of, p.option.tolist(), strict=True)],
            "configs": np.round(p.configs, 3).tolist(),
            **regimes,
            "rows": list(map(list, zip(*columns, [float(f"{w:.4g}") for w in self.weights], strict=True))),
        }

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "Neighbours":
        rows, problems = np.array(data["rows"], float), np.array(data["problems"], float)
        where, option = np.log(np.maximum(problems[:, :-1], 1)), problems[:, -1].astype(int)
        regimes = np.array(data.get("regimes", [[]]), float)
        tables = data["options"], data["kinds"], data["families"], data["names"], np.array(data["configs"], float), regimes
        problem, of_kind, family, config, *more = rows[:, :-1].astype(int).T
        of_regime = more[0] if more else np.zeros_like(problem)
        return cls(Places(problem, of_kind, family, config, of_regime, where, option, *tables), rows[:, -1])


def kind(work: Works) -> str:
    """What tells launches apart: waves (1, 2, 3, more), alignment, parts, second launch."""
    parts = (work,) if isinstance(work, Work) else work
    waves = sum(-(-part.blocks // part.resident) for part in parts)
    flags = ("", "u", "o")[ALIGNED.get(parts[0].aligned, 2)] + ("r" if parts[-1].partial else "") + ("t" if len(parts) > 1 else "")
    return f"{min(waves, 4)}{flags}"


def regime(work: Works) -> tuple[int, ...]:
    """Where a launch stands between its bounds: its waves, how empty the last one is, the steps of
    a block, operations for each byte, parts, alignment. FINE apart is a standard deviation.
    """
    parts = (work,) if isinstance(work, Work) else work
    blocks = flops = moved = 0.0
    for part in parts:
        blocks += part.blocks
        flops += part.flops * part.steps * part.blocks
        moved += part.dram
    waves, last = blocks / parts[0].resident, parts[-1]
    found = (
        math.log(waves) / WAVES,
        math.log(math.ceil(waves) / waves) / TAIL,
        math.log(max(last.steps, 1)) / DEPTH,
        math.log1p(flops / max(moved, 1)) / INTENSITY,
        (last.partial > 0) / PARTS,
        ALIGNED.get(parts[0].aligned, 2) / OFF,
    )
    return tuple([round(FINE * number) for number in found])


def sizes(problem: Any) -> tuple[float, ...]:
    """Logarithms of the problem's sizes: integers without a default, which every call gives."""
    return tuple([math.log(max(getattr(problem, name), 1)) for name in size_names(problem.__class__)])


@cache
def size_names(problems: Any) -> tuple[str, ...]:
    """Of a class of problems."""
    given = (f for f in fields(problems) if f.default is MISSING and f.default_factory is MISSING)
    return tuple(f.name for f in given if f.type in ("int", int))


def options_of(problem: Any) -> str:
    """All fields of a problem except its sizes."""
    names = size_names(problem.__class__)
    return " ".join(str(getattr(problem, f.name)) for f in fields(problem) if f.name not in names)


def numbers(config: Any, prefix: str = "") -> dict[str, float]:
    """A config's fields such that a step of one is about 1: logarithms to the base of 2; what is no
    number is as far from any other as can be.
    """
    if not is_dataclass(config):
        return {prefix or "value": _number(config)}
    found: dict[str, float] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        found |= numbers(value, f"{prefix}{f.name}.") if is_dataclass(value) else {prefix + f.name: _number(value)}
    return found


def _number(value: Any) -> float:
    if value is None or isinstance(value, bool):
        return float(bool(value))
    return math.log2(value + 1) if isinstance(value, int | float) and value >= 0 else 4.0 * (zlib.crc32(repr(value).encode()) % 4096)
