"""Tile code of `sample`."""

import math

import cuda.tile as ct

from ..common.first_best import empty_best, first_best, take_better
from ..common.pdl import pdl_overlap
from ..common.philox import low_high, one_of_four, philox
from ..common.tiles import LOG2E, add_each, load_masked, load_tile, of_width

NEG_INF = ct.PaddingMode.NEG_INF
# log(1 + f) = f + f * f * (c0 + c1 * f + ..) for |f| <= 1/3, to 2.6e-7 of it in fp32.
LOG_TERMS = (-0.49999961, 0.33336735, -0.25006297, 0.19818234, -0.16441305, 0.16990098, -0.15264115)
LOG_OF_POWER = -math.log(2.0) * 2.0**-23
TWO_THIRDS = 0x3F2AAAAB  # bits of 2 / 3
FARTHEST, BY_VALUE = 64.0, 5  # of a search: the first cut below the top, and passes that cut values
SURE = 2.0**-17  # far above the rounding of a sum


def _mirrored(bits):
    """int32 bits of a float to an integer that orders as floats do, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _order(x, SHIFT):
    """Place of a float scalar in the order, int64, in units of 2**SHIFT."""
    return (_mirrored(ct.bitcast(x, ct.int32)) >> SHIFT).astype(ct.int64)


def _smallest(place, SHIFT):
    """The smallest float at a place; NaN beyond the infinities, and for a 16-bit dtype at the place
    of -inf.
    """
    return ct.bitcast(_mirrored((place << SHIFT).astype(ct.int32)), ct.float32)


def _exponential(word):
    """-log(1 - v) of a uint32 tile, v = min((word + 1/2) / 2**32, 1 - 2**-24).

    1 - v = (1 + f) * 2**e with |f| <= 1/3. Where e is 0, f is -v, which keeps all bits of a small
    v. `ct.log` takes twice the instructions, for numbers that do not come here.
    """
    v = ct.minimum(word.astype(ct.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    bits = ct.bitcast(1.0 - v, ct.int32)
    power = (bits - TWO_THIRDS) & -(1 << 23)  # e * 2**23
    f = ct.where(v < 1.0 / 3.0, -v, ct.bitcast(bits - power, ct.float32) - 1.0)
    p = ct.full(f.shape, LOG_TERMS[-1], ct.float32)
    for i in ct.static_iter(range(len(LOG_TERMS) - 1)):
        p = p * f + LOG_TERMS[len(LOG_TERMS) - 2 - i]
    return power.astype(ct.float32) * LOG_OF_POWER - (f + f * f * p)


@ct.kernel
def sample_kernel(
    LOGITS,
    SEED,
    OFFSET,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    MIN_P,
    OUT,
    PERSISTENT: ct.Constant[bool],
    HAS_OFFSET: ct.Constant[bool],
    HAS_TEMPERATURE: ct.Constant[bool],
    HAS_TOP_K: ct.Constant[bool],
    HAS_TOP_P: ct.Constant[bool],
    HAS_MIN_P: ct.Constant[bool],
    COLS: ct.Constant[int],
    SHIFT: ct.Constant[int],
    TILE_N: ct.Constant[int],
    WAYS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """One row, or with PERSISTENT several.

    LOGITS: [rows, COLS]; SEED, OFFSET int64, TEMPERATURE, TOP_P, MIN_P fp32 and TOP_K int32: [1] or
        [rows]; OUT: [rows] int64.
    """
    pdl_overlap(PERSISTENT)
    shape = (1, TILE_N)
    steps = ct.cdiv(COLS, TILE_N)
    LOGITS = of_width(LOGITS, COLS)

    def draw_from(row):
        def parameter(ARRAY):
            return ct.load(ARRAY, (min(row, ARRAY.shape[0] - 1),), ())

        def logits(j):
            at, whole = (row, j), COLS % TILE_N == 0
            if HAS_TOP_K or HAS_TOP_P:
                x = load_masked(LOGITS, at, shape, NEG_INF, whole, LATENCY, False)
            else:  # which is in flight early; with this latency a gather would go through shared memory
                x = load_tile(LOGITS, at, shape, NEG_INF, whole, LATENCY, False)
            x = x.astype(ct.float32)
            return ct.where(ct.isnan(x), -math.inf, x)

        temperature = 1.0
        if HAS_TEMPERATURE:
            temperature = parameter(TEMPERATURE)
        drawn = temperature > 0.0
        inverse = 1.0 / (temperature if drawn else 1.0)

        tops = ct.full(shape, -math.inf, ct.float32)
        for j in range(steps):
            tops = ct.maximum(tops, logits(j))
        top = ct.max(tops)
        # -0.0 is another place in the order, but the same value
        top = ct.where(top == 0.0, 0.0, top)

        def below_top(x):
            """(x - top) / temperature, and 0 for the top itself if it is infinite."""
            return ct.where(x == top, 0.0, (x - top) * inverse)

        def likely(x):
            """The probability of a logit, without the common divisor."""
            return ct.exp2(below_top(x) * LOG2E, flush_to_zero=True)

        def sums_from(places, COUNT):
            """How many logits lie from each place on, or the sums of their probabilities."""
            cuts: tuple = ()
            sums: tuple = ()
            zeros: tuple = ()
            for n in ct.static_iter(range(WAYS)):
                cuts, zeros = (*cuts, _smallest(places[n], SHIFT)), (*zeros, 0.0)
                sums = (*sums, ct.zeros(shape, ct.float32))

            for j in range(steps):
                x = logits(j)
                amount = ct.full(shape, 1.0, ct.float32) if COUNT else likely(x)
                new: tuple = ()
                for n in ct.static_iter(range(WAYS)):
                    new = (*new, sums[n] + ct.where(x >= cuts[n], amount, 0.0))
                sums = new
            # one reduction for all: each is several barriers of the cluster
            return ct.reduce(sums, 1, add_each, zeros)

        def search(low, high, target, from_low, COUNT):
            """The highest place from which the sum is still at least target: so it is from low,
            where it is from_low, and is not from high.

            The first cuts lie below the top by powers of two, those of the next passes evenly
            between two values, and the last ones evenly between two places. With places alone the
            first passes would cut exponents, most of them of numbers near 0.
            """
            from_high = ct.zeros((), ct.float32)
            tries = ct.zeros((), ct.int32)
            unit = 1.0 if COUNT else 1.0 / inverse
            while high - low > 1:
                step = (high - low + WAYS) // (WAYS + 1)
                least, most = _smallest(low, SHIFT), min(_smallest(high, SHIFT), top)
                places: tuple = ()
                for n in ct.static_iter(range(WAYS)):
                    below = top - unit * ct.static_eval(FARTHEST * 2.0 ** (-n * (8 // WAYS)))
                    between = least + (most - least) * ct.static_eval((n + 1) / (WAYS + 1))
                    by_value = _order(ct.where(tries == 0, below, between), SHIFT)
                    place = ct.where(tries < BY_VALUE, by_value, low + (n + 1) * step)
                    places = (*places, max(min(place, high - 1), low + 1))
                sums = sums_from(places, COUNT)
                found = False
                for n in ct.static_iter(range(WAYS)):
                    total = sums[n].item()
                    enough = total >= target
                    low, from_low = ct.where(enough, places[n], low), ct.where(enough, total, from_low)
                    from_high = ct.where(enough, from_high, max(total, from_high))
                    high = ct.where(enough, high, min(places[n], high))
                    found = (total == target) if n == 0 else (found | (total == target))
                # Done when exactly the wanted ones lie above, or between low and high only one.
                if not COUNT:
                    one = likely(_smallest(low, SHIFT))
                    found = (from_low - from_high < 1.5 * one) & (one > SURE * from_low)
                high = ct.where(found, low + 1, high)
                tries = tries + 1
            return low

        lowest = _order(ct.full((), -math.inf, ct.float32), SHIFT)
        highest = _order(top, SHIFT)
        place = lowest
        if HAS_TOP_K:
            k = parameter(TOP_K)
            if (k > 0) & (k < COLS) & drawn:
                place = search(lowest, highest + 1, k.astype(ct.float32), ct.zeros((), ct.float32), True)
        if HAS_TOP_P:
            p = parameter(TOP_P)
            if (p < 1.0) & drawn:
                least = _smallest(place, SHIFT)
                kept = ct.zeros(shape, ct.float32)
                for j in range(steps):
                    x = logits(j)
                    kept = kept + ct.where((x < least) | (x == -math.inf), 0.0, likely(x))
                total = ct.sum(kept)
                target = p * total
                place = search(place, highest + 1, target, total, False) if target > 0.0 else highest
        least = _smallest(place, SHIFT)

        key = low_high(parameter(SEED))
        draw = low_high(parameter(OFFSET) if HAS_OFFSET else ct.zeros((), ct.int64))
        number = row if SEED.shape[0] == 1 else 0 * row
        quads = ct.arange(TILE_N // 4, dtype=ct.int32).reshape((TILE_N // 4, 1))
        rows = ct.full((TILE_N // 4, 1), 0, ct.uint32) + ct.astype(number, ct.uint32)

        floor = ct.full((), -math.inf, ct.float32)
        if HAS_MIN_P:
            share = parameter(MIN_P)
            floor = ct.log(min(share, 1.0)) if (share > 0.0) & drawn else floor

        best, when = empty_best(shape)
        for j in range(steps):
            x = logits(j)
            below = below_top(x)
            score = below
            if drawn:  # as below + gumbel, of which this is the exponential
                words = philox((quads + j * (TILE_N // 4)).astype(ct.uint32), rows, *draw, *key)
                race = _exponential(one_of_four(words)).reshape(shape)
                score = ct.truediv(likely(x), race, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
            score = ct.where((x < least) | (x == -math.inf) | (below < floor), -math.inf, score)
            best, when = take_better(best, when, score, j)
        _, column = first_best(best, when * TILE_N + ct.arange(TILE_N, dtype=ct.int32).reshape(shape))
        ct.store(OUT, (row,), column.reshape((1,)).astype(ct.int64))

    if PERSISTENT:
        for row in range(ct.bid(0), LOGITS.shape[0], ct.num_blocks(0)):
            draw_from(row)
    else:
        draw_from(ct.bid(0))
