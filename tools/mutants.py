"""Plants bugs, one at a time, and says which the tests do not find.

    python tools/mutants.py [--only TEXT] [--log FILE] [--list]

Each runs in a copy of the tree, with the tests that should kill it. By hand or weekly: all of them
take about two hours on one core. With `--log`, a run that was stopped goes on where it was. A
mutant survives if its tests pass; each survivor gets a test or a reason in SURVIVORS.
`tests/cpu/test_mutants.py` holds every `old` text to one place in its file.
"""
# ruff: noqa: E501 a bug a line

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS, IDLE = 300, 6  # processor time: a loop that never ends counts as found, and so does a wait of IDLE times that
SURVIVORS: dict[str, str] = {}  # "file: new text" -> why no test can or should see it


class Mutant(NamedTuple):
    """file: below src/tilewright. tests: arguments of pytest, below tests."""

    file: str
    old: str
    new: str
    tests: str


PLANTED = "cpu/test_interpret_planted.py cpu/test_interpret_right.py"
RACES, BUGS = "cpu/test_interpret_races.py", "cpu/test_interpret_bugs.py"
INTERPRETED = "cpu/test_interpret_ops.py cpu/test_interpret_memory.py"
SURVIVED = "cpu/test_survivors.py"
STATES = "cpu/test_engine_families.py -k states"


def of_op(op: str) -> str:
    return f"cpu/test_ops.py -k {op}"


MUTANTS = [
    # The interpreter: races
    Mutant("interpret/checks.py", 'if order in ("ACQUIRE", "ACQ_REL"):', 'if order in ("ACQUIRE", "ACQ_REL", "RELEASE"):', PLANTED),
    Mutant("interpret/checks.py", "self.released.update(dict.fromkeys(addresses(buffer, offset), known))", "pass", RACES),
    Mutant("interpret/run.py", "    for order in again:", "    for order in again[:0]:", RACES),
    Mutant("interpret/run.py", "    for order in again:", "    for order in again[:1]:", PLANTED),
    Mutant("interpret/run.py", "trace, late=late and not again)", "trace)", RACES),
    Mutant("interpret/past.py", "default=time)", "default=time) if not looked else max(self.times.values())", PLANTED),
    Mutant("interpret/past.py", "        if versions[-1].value != old:", "        if versions[-1].value is None:", PLANTED),
    Mutant("interpret/past.py", "            self.times[self.block] = self.progress = progress", "            self.progress = progress", PLANTED),
    Mutant("interpret/run.py", "    _put(targets, results)", "    pass", RACES),
    Mutant("interpret/checks.py", 'sync is not None and sync[1] != "BLOCK" else', "sync is not None else", PLANTED),
    Mutant("interpret/checks.py", "return self.time <= clock.get(self.block, 0)", "return self.time <= clock.get(self.block, 1)", RACES),
    Mutant("interpret/checks.py", "return before & (atomic >= access.atomic)", "return atomic >= access.atomic", RACES),
    Mutant("interpret/checks.py", "        clock[self.block] += 1\n", "        clock[self.block] += 0\n", PLANTED),
    Mutant("interpret/checks.py", "        if clock.get(block, 0) < time:", "        if clock.get(block, 0) > time:", RACES),
    Mutant("interpret/checks.py", "            self._extend(history.reads, units, mine, clock)\n            return", "            return", PLANTED),
    Mutant("interpret/checks.py", 'if atomic and order == "RELEASE":', "if False:", PLANTED),
    Mutant("interpret/checks.py", "self._extend(history.writes, units, mine, clock, writes)", "history.writes[units] = self.chains.extended(NONE, mine, clock)[0]", RACES),
    Mutant("interpret/regions.py", "if found and own.start < found[-1].end:", "if found and own.start < found[-1].start:", RACES),
    # The interpreter: schedule
    Mutant("interpret/schedule.py", "if self.machine.acquired != acquired and self.explored < EXPLORED:", "if False:", PLANTED),
    Mutant("interpret/schedule.py", "if block.steps > self.most_steps:", "if False:", f"{PLANTED} -k endless or without_an_end"),
    Mutant("interpret/schedule.py", "block.stuck = progress\n", "block.stuck = self.machine.progress + 1\n", BUGS),
    Mutant("interpret/schedule.py", "[*reversed(self.later), *self.waiting]", "[*reversed(self.later)]", PLANTED),
    Mutant("interpret/memory.py", "            elif used:\n", "            elif False:\n", PLANTED),
    # The interpreter: memory
    Mutant("interpret/allocations.py", "own if name in self.DRAWN else own[self._independent(func, target, args[1:], kwargs)]", "own", PLANTED),
    Mutant("interpret/allocations.py", "elif self.early and not self.written[units].all():", "elif self.early and not self.written[units].any():", PLANTED),
    Mutant("interpret/allocations.py", "        left = ~self.written[own]\n", "        left = self.written[own] & False\n", PLANTED),
    Mutant("interpret/memory.py", "(LEAST(at, None) >= 0 and MOST(at, None) < n)", "(MOST(at, None) < n)", PLANTED),
    Mutant("interpret/memory.py", "(LEAST(at, None) >= 0 and MOST(at, None) < n)", "(LEAST(at, None) >= 0 and MOST(at, None) <= n)", PLANTED),
    Mutant("interpret/memory.py", "if start < 0 or (start >= extent and self.strict):", "if start >= extent and self.strict:", BUGS),
    Mutant("interpret/memory.py", "if start < 0 or (start >= extent and self.strict):", "if start < 0:", BUGS),
    Mutant("interpret/memory.py", "if inbounds and part.shape != tile.lengths:", "if False:", BUGS),
    Mutant("interpret/memory.py", "if low < 0 or high >= buffer.flat.size:", "if high >= buffer.flat.size:", BUGS),
    Mutant("interpret/memory.py", "        return np.nan\n    return True", "        return 0.0\n    return True", INTERPRETED),
    Mutant("interpret/memory.py", "valid = valid & (at >= 0) & (at < array.shape[axis])", "valid = valid & (at >= 0)", INTERPRETED),
    Mutant("interpret/memory.py", "elif r is part and buffer.copies:", "elif False:", "cpu/test_interpret_api.py cpu/test_interpret_memory.py"),
    Mutant("interpret/memory.py", "    if chosen.size < 2 or np.unique(chosen).size == chosen.size:", "    if True:", INTERPRETED),
    Mutant("interpret/memory_ops.py", 'if __m.strict_bounds: {check}" if op.checked', 'if False: {check}" if op.checked', PLANTED),
    # The interpreter: numbers
    Mutant("interpret/numerics.py", "return a // b + (a % b != 0)", "return a // b + 1", INTERPRETED),
    Mutant("interpret/numerics.py", "r += acc\n", "r += 0 * acc\n", INTERPRETED),
    Mutant("interpret/numerics.py", "        distance *= 2\n", "        distance *= 4\n", INTERPRETED),
    Mutant("interpret/numerics.py", "if not 0 <= i < whole // n:", "if not 0 <= i <= whole // n:", PLANTED),
    Mutant("interpret/numerics.py", "EXTREMA[name][propagate_nan or not floating]", "EXTREMA[name][True]", SURVIVED),
    Mutant("interpret/formats.py", "near = near.clamp(-f.largest, f.largest)", "pass", "cpu/test_interpret_formats.py"),
    Mutant("interpret/formats.py", "np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))", "np.uint32(0x1000)", SURVIVED),
    Mutant("interpret/formats.py", "(back != x) & (bits & 1 == 0) & ~np.isnan(x)", "(bits < 0) & (bits > 0)", "cpu/test_interpret_formats.py"),
    Mutant("interpret/trim.py", 'view["padding"] == "ZERO" and', 'view["padding"] != "" and', SURVIVED),
    # The rule
    Mutant("testing/accuracy.py", "rms_bound = 2 * _rms(their_error)", "rms_bound = 3 * _rms(their_error)", SURVIVED),
    Mutant("testing/accuracy.py", "eps / 4 * _rms(scale)", "eps / 2 * _rms(scale)", SURVIVED),
    Mutant("testing/accuracy.py", "worst_bound = 2 * their_error.max()", "worst_bound = 3 * their_error.max()", SURVIVED),
    Mutant("testing/accuracy.py", "_ulp(scale, ours.dtype)\n", "2 * _ulp(scale, ours.dtype)\n", "cpu/test_accuracy.py"),
    Mutant("testing/accuracy.py", "torch.where(error.isnan(), torch.inf, error)", "torch.where(error.isnan(), 0.0, error)", "cpu/test_accuracy.py"),
    Mutant("testing/poison.py", "flat.copy_(torch.full((), torch.nan, device=tensor.device))", "flat.zero_()", "cpu/test_accuracy.py"),
    # Kernels: rows
    Mutant("ops/rms_norm.py", "y = y.astype(dtype).astype(ct.float32)", "y = y.astype(ct.float32)", SURVIVED),
    Mutant("ops/rms_norm.py", "(weight.astype(ct.float32) + weight_offset)", "(weight.astype(ct.float32))", of_op("rms_norm")),
    Mutant("ops/rms_norm.py", "x = load(NEW_RESIDUAL if ADD else X, i, j, whole)", "x = load(X, i, j, whole)", of_op("rms_norm")),
    Mutant("ops/softmax.py", "NEG_INF if COLS % TILE_N else ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)\n\n    def store(i, j, whole, y):\n        ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)\n\n    def normalise(i, whole):\n        xs", "ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)\n\n    def store(i, j, whole, y):\n        ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)\n\n    def normalise(i, whole):\n        xs", of_op("softmax")),
    Mutant("ops/softmax.py", "origin = _origin(new_top)", "origin = new_top", "cpu/test_softmax.py"),
    Mutant("ops/softmax.py", "_power(x, _origin(top)), axis", "_power(x, top), axis", "cpu/test_softmax.py"),
    Mutant("ops/layer_norm.py", "centred = ct.where(_inside(j, COLS, TILE_N), centred, 0.0)", "centred = centred", of_op("layer_norm")),
    Mutant("ops/layer_norm.py", "mean = _mean(total, COLS)", "mean = _mean(total, COLS + 1)", of_op("layer_norm")),
    Mutant("ops/common/first_best.py", "take = (x > best) | (ct.isnan(x) & ~ct.isnan(best))", "take = (x >= best) | (ct.isnan(x) & ~ct.isnan(best))", "cpu/test_argmax.py"),
    Mutant("ops/common/first_best.py", "(ct.isnan(x) & ~ct.isnan(best))", "(ct.isnan(x) & ct.isnan(best))", "cpu/test_argmax.py"),
    Mutant("ops/common/tiles.py", "            index = tiles - 1 - index\n", "            index = tiles - index\n", of_op("quantize_fp8")),
    Mutant("ops/common/tiles.py", "    return band * group + within % height, within // height", "    return band * group + within % group, within // group", of_op("matmul")),
    Mutant("ops/common/philox.py", "k1 = k1 + ct.full((), KEY_STEPS[1], ct.uint32)", "k1 = k1 + ct.full((), KEY_STEPS[0], ct.uint32)", "cpu/test_dropout.py"),
    Mutant("ops/common/philox.py", "return x.astype(ct.uint32), (x >> 32).astype(ct.uint32)", "return x.astype(ct.uint32), x.astype(ct.uint32)", "cpu/test_dropout.py"),
    Mutant("ops/merge_states.py", "lse = ct.where(lse == math.inf, -math.inf, lse)", "lse = lse", "cpu/test_merge_states.py"),
    Mutant("ops/merge_states.py", "values = ct.where(lse == -math.inf, 0.0, values)", "values = values", "cpu/test_merge_states.py"),
    Mutant("ops/merge_states.py", "(1.0 if BASE2 else LN2)", "LN2", of_op("merge_states")),
    # Kernels: sampling and routing
    Mutant("ops/sample/kernels.py", "if (k > 0) & (k < COLS) & drawn:", "if (k > 0) & (k < COLS - 1) & drawn:", SURVIVED),
    Mutant("ops/sample/kernels.py", "drawn = temperature > 0.0", "drawn = temperature >= 0.0", "cpu/test_sample.py"),
    Mutant("ops/sample/kernels.py", "ct.where((x < least) | (x == -math.inf), 0.0, likely(x))", "likely(x)", "cpu/test_sample.py"),
    Mutant("ops/sample/kernels.py", "from_low - from_high < 1.5 * one", "from_low - from_high < 4.5 * one", "cpu/test_sample.py"),
    Mutant("ops/sample/kernels.py", "v < 1.0 / 3.0, -v,", "v < 0.0, -v,", "cpu/test_sample.py"),
    Mutant("ops/sample/kernels.py", "if target > 0.0 else highest", "if target > 0.0 else lowest", "cpu/test_sample.py"),
    Mutant("ops/common/routing.py", "return ct.where(bits < 0, bits ^ 0x7FFFFFFF, bits)", "return bits", SURVIVED),
    Mutant("ops/common/routing.py", "_order_keys(first + second), TAKEN)", "_order_keys(first), TAKEN)", "cpu/test_moe_route.py"),
    Mutant("ops/common/routing.py", "        keys = ct.where(taken, TAKEN, keys)\n", "        keys = ct.where(taken, keys, keys)\n", "cpu/test_moe_route.py"),
    Mutant("ops/common/expert_lists.py", "known = (chosen >= 0) & (chosen < experts)", "known = chosen >= 0", "cpu/test_moe.py"),
    Mutant("ops/common/expert_lists.py", "ct.scatter(panels, 1 + first + panel, own, mask=panel < mine)", "ct.scatter(panels, 1 + first + panel, own)", "cpu/test_moe.py"),
    Mutant("ops/common/expert_lists.py", "acc = ct.where(row >= 0, acc + weight", "acc = ct.where(row > 0, acc + weight", "cpu/test_moe.py"),
    # Kernels: products and attention
    Mutant("ops/matmul/kernels.py", "last = ct.where(is_part, min(part * run + run, steps), steps)", "last = ct.where(is_part, part * run + run - 1, steps)", "cpu/test_matmul.py"),
    Mutant("ops/matmul/kernels.py", "tile = ct.where(is_part, whole + shared, block)", "tile = ct.where(is_part, whole, block)", "cpu/test_matmul.py"),
    Mutant("ops/common/softmax_tiles.py", "return weights, factor, largest, denominator * factor + total", "return weights, factor, largest, denominator + total", of_op("attention")),
    Mutant("ops/common/softmax_tiles.py", "    total = denominator + ct.exp2(sink - maximum)", "    total = denominator + ct.exp2(sink)", "cpu/test_attention_decode.py"),
    Mutant("ops/common/softmax_tiles.py", "sums * shrink + more * weight, largest,", "sums + more * weight, largest,", "cpu/test_merge_states.py cpu/test_ops.py -k merge_states"),
    Mutant("ops/common/attention_tiles.py", "begin = max(0, first - window + 1) // TAIL_N", "begin = max(0, first - window + 2) // TAIL_N", SURVIVED),
    Mutant("ops/common/attention_tiles.py", "end, whole_to = min(end, (low + share) * ratio), min(whole_to, low + share)", "end, whole_to = min(end, (low + share) * ratio), whole_to", "cpu/test_attention.py"),
    Mutant("ops/common/attention_tiles.py", "seen = seen & (key > row - window)", "seen = seen & (key >= row - window)", "cpu/test_attention.py"),
    Mutant("ops/common/attention_tiles.py", "whole_to = min(whole_to, max(0, first + 1) // TILE_N)", "whole_to = min(whole_to, max(0, first + 2) // TILE_N)", f"{SURVIVED} cpu/test_attention.py"),
    Mutant("ops/common/attention_tiles.py", "return inverse, (maximum + ct.log2(denominator)) * LN2", "return inverse, maximum + ct.log2(denominator)", "cpu/test_attention.py"),
    Mutant("ops/attention/kernels.py", "end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))", "end = max(0, ct.load(KV_LEN, (batch,), ()))", SURVIVED),
    Mutant("ops/attention/kernels.py", "begin = max(0, min(ct.load(KV_START, (batch,), ()), end))", "begin = 0", "cpu/test_attention.py"),
    Mutant("ops/attention_decode/kernels.py", "end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))", "end = max(0, ct.load(KV_LEN, (batch,), ()))", SURVIVED),
    Mutant("ops/attention_decode/kernels.py", "seen = seen & (key >= row_end - window)", "seen = seen & (key > row_end - window)", "cpu/test_attention_decode.py"),
    Mutant("ops/attention_decode/kernels.py", "key, at = ct.where(j < last, key, end), min(j, last - 1)", "key, at = key, min(j, last - 1)", "cpu/test_attention_decode.py"),
    Mutant("models/attention.py", '{"window": sliding_window, "kv_start"', '{"window": None, "kv_start"', SURVIVED),
    # Kernels: states
    Mutant("ops/ssd/kernels.py", "    return ct.minimum(ct.maximum(dt, dt_min, propagate_nan=True), dt_max, propagate_nan=True)", "    return ct.maximum(dt, dt_min, propagate_nan=True)", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "        dt = softplus(dt, raw.dtype == ct.float32)\n", "        dt = ct.maximum(dt, 0.0)\n", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "    there = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32)[:, None] < DT.shape[1]", "    there = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32)[:, None] <= DT.shape[1]", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "m = ct.where(row >= column,", "m = ct.where(row > column,", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "        elif HAS_STATE and end == chunks:", "        elif HAS_STATE and begin == 0:", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "ct.where(behind < FORGOTTEN, 1, 0)", "ct.where(behind < 1.0, 1, 0)", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "            s = own + s * kept", "            s = own + s", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "        return ct.load(STATE_ROWS, (seq,), ())\n    return seq", "        return seq\n    return seq", "cpu/test_ssd.py"),
    Mutant("ops/ssd/kernels.py", "place = ct.cdiv(end - first, SEGMENT * CHUNK), first // (SEGMENT * CHUNK) + seq", "place = ct.cdiv(end - first, SEGMENT * CHUNK), first // (SEGMENT * CHUNK)", "cpu/test_ssd.py"),
    Mutant("ops/common/scaling.py", "== block % LEAST_TMA, some, 0.0)", "== 0, some, 0.0)", of_op("matmul")),
    Mutant("ops/common/scaling.py", "scale.stride(0) != 1 or scale.stride(1) % LEAST_TMA:", "scale.stride(0) != 1:", "cpu/test_matmul_scales.py"),
    Mutant("launch/decision.py", "        if getattr(problem, name) == value:", "        if getattr(problem, name) is None:", "cpu/test_calls.py"),
    Mutant("ops/gated_delta_rule/kernels.py", "    delta = (v - decay * of_k * seen) * (beta * of_k)", "    delta = (v - of_k * seen) * (beta * of_k)", "cpu/test_linear_attention.py"),
    Mutant("ops/gated_delta_rule/kernels.py", "    below = ct.where(i // 16 > j // 16, -a, 0.0)", "    below = ct.where(i // 16 > j // 16 + 1, -a, 0.0)", "cpu/test_linear_attention.py"),
    Mutant("ops/gated_delta_rule/kernels.py", "g = ct.maximum(g * LOG2E, LEAST_DECAY, propagate_nan=True)", "g = g * LOG2E", "cpu/test_linear_attention.py cpu/test_adversary_ops.py"),
    Mutant("ops/gated_delta_rule/kernels.py", "                wanted = wanted * ct.where(j < BLOCKS, 1.0, 0.0)", "                wanted = wanted", "cpu/test_linear_attention.py"),
    Mutant("ops/gated_delta_rule/kernels.py", "        for segment in range(1, segments - 1):", "        for segment in range(1, segments - 2):", of_op("gated_delta_rule")),
    Mutant("ops/gated_delta_rule/kernels.py", "ct.where(apart == 1, small * -(row * column), 0.0)", "ct.where(apart == 1, small * -row, 0.0)", "cpu/test_linear_attention.py"),
    Mutant("ops/gated_delta_rule/kernels.py", "- ct.cumsum(decays, 0) < FORGOTTEN", "< FORGOTTEN * 0.04", "cpu/test_linear_attention.py"),
    Mutant("ops/gated_delta_rule/steady_kernels.py", "ct.where(i // 4 > j // 4, -own, 0.0)", "ct.where(i // 4 > j // 4 + 1, -own, 0.0)", "cpu/test_linear_attention.py"),
    Mutant("ops/common/recurrence.py", "there = (c >= 0) & (c * CHUNK < end - first)", "there = c >= 0", "cpu/test_linear_attention.py"),
    Mutant("ops/gated_delta_rule/channel_kernels.py", "b, place = 0, first // CHUNK + seq", "b, place = 0, first // CHUNK", "cpu/test_linear_attention.py"),
    Mutant("ops/causal_conv1d/kernels.py", "before, now = now[TILE_M - (WIDTH - 1) :], ahead", "before, now = now[: WIDTH - 1], ahead", "cpu/test_linear_attention.py"),
    Mutant("ops/causal_conv1d/kernels.py", "inner, outer = max(first, 1), min(last, whole)", "inner, outer = max(first, 1), min(last, tiles)", "cpu/test_linear_attention.py"),
    Mutant("ops/causal_conv1d/kernels.py", "(seq, TAPS + t, channel)", "(seq, TAPS + t - 1, channel)", "cpu/test_linear_attention.py"),
    Mutant("ops/causal_conv1d/decision.py", " and (p.one or c.tile_m >= p.width - 1)", "", "cpu/test_linear_attention.py"),
    Mutant("ops/causal_conv1d/kernels.py", "inputs[i + 1], mask=there", "inputs[i], mask=there", "cpu/test_linear_attention.py"),
    Mutant("ops/rms_norm_gated.py", "* (1.0 / COLS) + eps)", "* (1.0 / COLS))", of_op("rms_norm_gated")),
    Mutant("ops/common/sequences.py", "    return tokens // length + batch if varlen", "    return tokens // length + 1 if varlen", "cpu/test_linear_attention.py cpu/test_ssd.py"),
    # Kernels: small codes
    Mutant("ops/common/mx.py", "codes = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22", "codes = (bits + 0x200000) >> 22", "cpu/test_mx_matmul.py"),
    Mutant("ops/common/mx.py", "    return (low | high << 4).reshape((M, N)).astype(ct.uint8)", "    return (high | low << 4).reshape((M, N)).astype(ct.uint8)", "cpu/test_mx_matmul.py"),
    Mutant("ops/common/mx.py", "ct.where(byte == 255, 0x7FC0, ct.where(byte == 0, 0x40, byte << 7))", "ct.where(byte == 255, 0x7FC0, byte << 7)", "cpu/test_mx_matmul.py"),
    Mutant("ops/common/mx.py", "ct.where(byte == 255, 0x7FC0, ct.where", "ct.where(byte == 256, 0x7FC0, ct.where", "cpu/test_mx_matmul.py"),
    Mutant("ops/common/mx.py", "x * (1.125 * 2.0**119) * 0.0 + x", "x", "cpu/test_mx_matmul.py"),
    Mutant("ops/common/mx.py", "(q << 8, q << 2)", "(q << 8, q << 3)", "cpu/test_mx_matmul.py"),
    Mutant("ops/common/mx.py", "+ amax * 0.0).astype(scale_dtype)", ").astype(scale_dtype)", "cpu/test_mx_matmul.py"),
    Mutant("ops/common/weight_tiles.py", "            _pairs(q & 0x00F000F0) * 2.0**123 - zero,", "            _pairs(q & 0x00F000F0) * 2.0**122 - zero,", "cpu/test_quantized_matmul.py"),
    Mutant("ops/common/weight_tiles.py", "    return 0.125 if CODE == INT4 else 2.0", "    return 0.125", "cpu/test_quantized_matmul.py"),
    Mutant("ops/common/weight_tiles.py", "group = (i * RUN + j * PLANE + half * WORDS) // GROUP", "group = (i * RUN + j * PLANE) // GROUP", "cpu/test_quantized_models.py"),
    Mutant("ops/common/weight_tiles.py", "(q << 2) & E2M1_MOST | (q >> 2) & E2M1_BIT", "(q << 2) & E2M1_MOST", "cpu/test_quantized_matmul.py"),
    Mutant("ops/common/pieces.py", "            part = part - total *", "            part = part + total *", "cpu/test_quantized_matmul.py"),
    Mutant("ops/common/pieces.py", "    return high, (scaled - high).astype(ct.float8_e4m3fn).astype(ct.float32), factor", "    return high, 0 * high, factor", "cpu/test_quantized_matmul.py"),
    Mutant("ops/common/pieces.py", 'ct.where(bits == 255, float("nan"),', 'ct.where(bits == 256, float("nan"),', "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/kernels.py", "(first + AHEAD, last):\n        acc = added(acc, step, *weights(step))\n    y =", "(first, last):\n        acc = added(acc, step, *weights(step))\n    y =", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/kernels.py", "range(first + AHEAD, last):\n        accs =", "range(first, last):\n        accs =", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/kernels.py", "_rows_from(squares, 0, START)", "squares", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/kernels.py", "if START == 0 or tile_m * length + START < x.shape[0]:", "if True:", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/kernels.py", "_rows_from(out, 1, START).tiled_view", "out.tiled_view", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/kernels.py", "            ct.store(new_residual.slice(1, 0, COLS), at, some, allow_tma=False)", "            ct.store(new_residual.slice(1, 0, COLS), at, some * 0.5, allow_tma=False)", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/kernels.py", "ct.where(at[0] == 0, more, 0.0)", "more", "cpu/test_quantized_matmul.py"),
    Mutant("ops/common/tiles.py", "matrix_tile(given, (i,), at", "matrix_tile(given, (0,), at", "cpu/test_quantized_matmul.py"),
    Mutant("ops/kv_append/kernels.py", "load(i * POSITIONS.shape[0] + outer)", "load(i + outer)", "cpu/test_kv_append.py"),
    Mutant("engine/append_attend.py", "ct.where(held, score(keys, q), HIDDEN)", "score(keys, q)", "cpu/test_early.py"),
    Mutant("engine/append_attend.py", "total = total + own.reshape((1,))", "total = total + 0.0", "cpu/test_early.py"),
    Mutant("engine/append_attend.py", "batch + i * POSITIONS.shape[0]", "batch", "cpu/test_early.py"),
    Mutant("engine/head_tiles.py", "range(1, SHARES)", "range(2, SHARES)", "cpu/test_attend_splits.py"),
    Mutant("engine/append_attend.py", "ct.where(held, cached(V_CACHE, half), ct.zeros((1, 1), V_CACHE.dtype))", "cached(V_CACHE, half)", "cpu/test_early.py"),
    Mutant("engine/attend_splits.py", "seen = key < position", "seen = key <= position", "cpu/test_attend_splits.py"),
    Mutant("engine/attend_splits.py", "ct.where(ct.expand_dims(seen, 1), v, ct.zeros((1, 1), DTYPE))", "v", "cpu/test_attend_splits.py"),
    Mutant("engine/attend_splits.py", "position + 1 - WINDOW", "position - WINDOW", "cpu/test_attend_splits.py"),
    Mutant("engine/attend_splits.py", "owns = last == own_tile", "owns = last <= own_tile", "cpu/test_attend_splits.py"),
    Mutant("engine/attend_splits.py", "if last == own_tile:\n            append", "if True:\n            append", "cpu/test_attend_splits.py"),
    Mutant("engine/early.py", '"kv_start", "softcap", ', '"kv_start", ', "cpu/test_attend_splits.py"),
    Mutant("engine/row_product.py", "squares + low * low + high * high", "squares + low * low", "cpu/test_early.py"),
    Mutant("engine/early.py", 'if b["sinks"] is b["window"] is None and keys', 'if b["window"] is None and keys', "cpu/test_early.py"),
    Mutant("engine/shares.py", 'return "residual" not in reads', "return True", "cpu/test_shares.py"),
    Mutant("engine/shares.py", "shares * len(x), *x.shape[1:]), (out.numel() // len(x),", "shares * len(x), *x.shape[1:]), (x.stride(0),", "cpu/test_shares.py"),
    Mutant("ops/quantized_matmul/candidates.py", "early = p.before and (left or parts == 1) and c.occupancy > 1", "early = False", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/candidates.py", "early = p.before and (left or parts == 1) and c.occupancy > 1", "early = p.before and (left or parts == 1)", "cpu/test_quantized_matmul.py"),
    Mutant("ops/quantized_matmul/__init__.py", "        torch.add(x, residual, out=total)", "        pass", "cpu/test_quantized_matmul.py"),
    # Kernels: decoding
    Mutant("ops/attention_decode/calls.py", "(ends - max(0, q_len - first - MOST_TOKENS)).clamp_min(0)", "ends", "cpu/test_attention_decode.py"),
    Mutant("ops/attention_decode/cascade.py", "    torch.unflatten(states[0], 1, (kv_heads, -1)).copy_(first)\n", "    states[0].copy_(first.flatten(1, 2).flip(1))\n", "cpu/test_cascade_decode.py"),
    Mutant("ops/attention_decode/cascade.py", "shared = attention_decode(rows.reshape(1, -1, 1, head_dim), prefix_k, prefix_v, prefix_len,", "shared = attention_decode(rows.reshape(1, -1, 1, head_dim), prefix_k, prefix_v, None,", "cpu/test_cascade_decode.py"),
    Mutant("ops/sparse_index/kernels.py", "scores = ct.maximum(products, 0.0, propagate_nan=True) * weights", "scores = products * weights", "cpu/test_sparse_index.py"),
    Mutant("ops/sparse_index/kernels.py", "    end = max(0, end - (tokens - 1 - token))", "    end = max(0, end - (tokens - token))", "cpu/test_sparse_index.py"),
    Mutant("ops/sparse_index/kernels.py", "unseen = max(0, Q.shape[1] - (tokens + 1) * TILE_T)", "unseen = max(0, Q.shape[1] - tokens * TILE_T)", "cpu/test_sparse_index.py"),
    Mutant("ops/adjust_logits.py", "x * ct.where(x > 0.0, divisor, factor)", "x * divisor", of_op("adjust_logits")),
    Mutant("ops/adjust_logits.py", "(counts & 0x7FFFFFFF).astype", "counts.astype", of_op("adjust_logits")),
    Mutant("ops/adjust_logits.py", "words >> (column % WORD)", "words", of_op("adjust_logits")),
    Mutant("ops/sparse_index/kernels.py", "ct.sum(certain), ct.sum(equal), OUT", "0, 0, OUT", "cpu/test_sparse_index.py"),
    Mutant("ops/sparse_index/kernels.py", "low = _cut(passed - 1, *cuts, WAYS)", "low = _cut(passed, *cuts, WAYS)", "cpu/test_sparse_index.py"),
    Mutant("ops/attention_decode/decision.py", "p.columns > 256 and c.tile_n > 32", "p.columns > 1024 and c.tile_n > 32", "cpu/test_attention_selection.py"),
    # Engine: drafts, prefixes, choices
    Mutant("engine/prefix.py", "self._texts[i] = torch.tensor(row + mine[:-1])", "self._texts[i] = torch.tensor(row + mine)", "cpu/test_engine_prefix.py"),
    Mutant("engine/prefix.py", "most = min(len(text), len(row) - 1)", "most = min(len(text), len(row))", "cpu/test_engine_prefix.py"),
    Mutant("engine/prefix.py", "bits.index_copy_(0, targets, bits.index_select(0, sources))", "[bits[t].copy_(bits[s]) for s, t in moves]", "cpu/test_engine_prefix.py"),
    Mutant("engine/prefix.py", "        self._texts[:batch] = [None] * batch\n", "        pass\n", "cpu/test_engine_prefix.py"),
    Mutant("engine/speculate.py", "            found.append(mine[: right + 1])", "            found.append(mine[: max(1, right)])", "cpu/test_engine_speculate.py"),
    Mutant("engine/speculate.py", "self.draws[:, :count].copy_(written[None].to(device) + torch.arange(q_len, device=device)[:, None])", "self.draws[:, :count].copy_(written[None].to(device).expand(q_len, -1))", "cpu/test_engine_speculate.py"),
    Mutant("engine/advance.py", "    ct.scatter(PAIR, (batch, 0), ct.gather(IDS, (batch, right), padding_value=0))", "    ct.scatter(PAIR, (batch, 0), ct.gather(IDS, (batch, 0), padding_value=0))", "cpu/test_engine_speculate.py"),
    Mutant("engine/advance.py", "    step = ct.minimum(right + 1, ct.gather(LIMIT, batch, padding_value=0) - place)", "    step = right + 1", "cpu/test_engine_speculate.py"),
    Mutant("engine/draft.py", "        self.places.copy_(lengths.int() - 1 +", "        self.places.copy_(lengths.int() +", "cpu/test_engine_speculate.py"),
    Mutant("engine/ending.py", "                if self.ended[i]:\n                    break\n", "", "cpu/test_engine.py cpu/test_adversary_engine.py"),
    Mutant("engine/sampling.py", "                count[torch.tensor(sorted(set(row)), device=self._device)] = PROMPT", "                count[torch.tensor(sorted(set(row)), device=self._device)] = 1", "cpu/test_engine.py"),
    Mutant("engine/sampling.py", "    bits[:vocab] = 1\n", "    bits[:] = 1\n", "cpu/test_engine.py cpu/test_adversary_engine.py"),
    Mutant("engine/attention.py", "        x, scale = x[:, :, : buffers.max_keys], scale[:, :, : buffers.max_keys]\n", "        x, scale = x[:, :, : buffers.max_keys], scale[:, :, :1].expand_as(x[..., :1])[:, :, : buffers.max_keys]\n", "cpu/test_engine_kv_fp8.py"),
    Mutant("engine/state.py", "            keys *= 2 if keys == FEW_KEYS else 4\n", "            break\n", "cpu/test_engine.py"),
    Mutant("engine/recurrent.py", "torch_calls.blank, (x, buffers.positions)", "torch_calls.blank, (x[:1], buffers.positions[:1, :1])", STATES),
    Mutant("engine/recurrent.py", "if padded and self.bias is not None:", "if padded and self.bias is None:", STATES),
    Mutant("engine/recurrent.py", "(0.0, inf)", "self.dt_limit", STATES),
    Mutant("engine/read.py", "rows**2 * module.key_multiplier", "rows * module.key_multiplier", STATES),
    Mutant("engine/state.py", "for part in cache[:states]]", "for part in cache[:1]]", STATES),
    Mutant("engine/mlp.py", "            if self.factors[0] != 1.0:", "            if self.factors[0] > 2.0:", STATES),
    Mutant("engine/read.py", "        rows[1] += len(rows[0])\n", "        rows[1] += len(rows[0]) - 1\n", STATES),
    Mutant("engine/attention.py", "gates[:, 1::2]", "gates[:, ::2]", STATES),
    Mutant("engine/attention.py", "q[:, ::2] if self.gated", "q[:, : self.q_heads] if self.gated", STATES),
    Mutant("engine/mlp.py", "gate, (active[:, None], share[:, None])", "gate, (active[:1, None], share[:1, None])", "cpu/test_engine_families.py -k obey"),
    Mutant("engine/elementwise.py", "        gate = load_tile(GATE, (i, head, j)", "        gate = load_tile(GATE, (i, head, 0)", "cpu/test_engine_families.py -k gate"),
    Mutant("engine/elementwise.py", "decay * softplus(a.astype(ct.float32) + bias)", "decay * ct.maximum(a.astype(ct.float32) + bias, 0.0)", STATES),
    # Models: files, patch, pages of codes
    Mutant("models/gguf_header.py", "if offset % alignment or start + offset + size > self.size:", "if offset % alignment or start + offset > self.size:", "cpu/test_hostile_files.py"),
    Mutant("models/gguf_header.py", "            if one.begin + one.size > after.begin:", "            if one.begin > after.begin:", "cpu/test_hostile_files.py"),
    Mutant("models/gguf_header.py", "if not key or key in metadata:", "if not key:", "cpu/test_hostile_files.py"),
    Mutant("models/safetensors_header.py", "        if begin != at:", "        if begin < at:", "cpu/test_hostile_files.py"),
    Mutant("models/safetensors_header.py", 'r"[^/\\\\.\\0][^/\\\\\\0]*\\.safetensors"', 'r"[^\\0]*\\.safetensors"', "cpu/test_hostile_files.py"),
    Mutant("models/probe.py", "    return None if judged.ok else", "    return None if True else", "cpu/test_adversary_models.py"),
    Mutant("models/probe.py", "* torch.tensor([1.0] * (ROWS - 2) + [LARGE] * 2)", "* torch.tensor([1.0] * ROWS)", "cpu/test_adversary_models.py"),
    Mutant("models/continuous_codes.py", "            if read_index.numel() and not ring:", "            if False:", "cpu/test_serving.py cpu/test_server_starts.py"),
    Mutant("models/continuous_codes.py", "        self.scales[page, :, token] = scales", "        self.scales[page, :, token] = scales[:1]", "cpu/test_serving.py cpu/test_server_starts.py"),
    Mutant("models/batch.py", "stop_tokens(loaded.model), draw.stop, getattr", "stop_tokens(loaded.model), (), getattr", "cpu/test_adversary_files.py"),
    Mutant("models/method.py", "small is None else torch.bfloat16, torch", "small is None else small.dtype, torch", "cpu/test_quantized_models.py"),
    Mutant("models/whole.py", "and -1 <= token < 1 << 31 for", "for", "cpu/test_adversary_files.py"),
    Mutant("models/server/worker.py", "            processor.fail_all_requests(error)\n", "", "cpu/test_server.py -k step_that_raises"),
    Mutant("models/server/app.py", "limiter=self._encoders[long]", "limiter=self._encoders[False]", "cpu/test_server.py -k nobody_waits"),
    Mutant("models/continuous.py", "            if len(self._storage) > MOST_GRAPHS:", "            if False:", "cpu/test_serving.py -k few_of_them"),
    Mutant("models/continuous.py", "num_q_tokens = near(-(-num_q_tokens // tokens), 3) * tokens", "pass", "cpu/test_serving.py -k few_of_them"),
    Mutant("ops/attention/__init__.py", "near(q_len, 4), near(kv_tokens, 3)", "near(q_len, 4), kv_tokens", "cpu/test_attention_selection.py -k share_a_plan"),
    Mutant("testing/definitions/products.py", "CODE_BITS = 14", "CODE_BITS = 13", "fuzz/test_fuzz.py -k bit_for_bit"),
    Mutant("testing/definitions/products.py", "part = _cut(terms.sum(-1), CODE_BITS)", "part = terms.sum(-1)", "fuzz/test_fuzz.py -k bit_for_bit"),
    Mutant("testing/definitions/attention.py", "products = code_sums(q, k, fresh=q.shape[-1])", "products = code_sums(q, k, fresh=32)", "fuzz/test_fuzz.py -k codes"),
    # Plans: grids, constants, scratch, launches left out
    Mutant("ops/rms_norm.py", "blocks = c.blocks(ct.cdiv(p.rows, c.tile_m), device)", "blocks = c.blocks(p.rows // c.tile_m or 1, device)", SURVIVED),
    Mutant("ops/rms_norm.py", '"round": p.round_before_weight}', '"round": False}', SURVIVED),
    Mutant("ops/softmax.py", "device), p, c)", "device), p, c, {\"cols\": p.cols + 1})", of_op("softmax")),
    Mutant("ops/layer_norm.py", "c.blocks(ct.cdiv(p.rows, c.tile_m), device)", "c.blocks(p.rows // c.tile_m or 1, device)", SURVIVED),
    Mutant("ops/argmax.py", "return ranges, Launch(argmax_merge_kernel, (p.rows,), {**splits, \"tile_s\": next_pow2(c.num_splits)}, pdl=True)", "return (ranges,)", "cpu/test_argmax.py cpu/test_ops.py -k argmax"),
    Mutant("ops/argmax.py", "((2, p.rows, c.num_splits), torch.int32)", "((2, p.rows, c.num_splits - 1), torch.int32)", "cpu/test_argmax.py cpu/test_ops.py -k argmax"),
    Mutant("ops/quantize_fp8/decision.py", '"largest": largest_code(p.codes),', '"largest": 448.0,', of_op("quantize_fp8")),
    Mutant("ops/quantize_fp8/decision.py", 'scratch = {"partial": ((count,), torch.float32)}', 'scratch = {"partial": ((count - 1 or 1,), torch.float32)}', of_op("quantize_fp8")),
    Mutant("ops/rms_norm_quant/decision.py", '"power_of_two": p.power_of_two_scales,', '"power_of_two": False,', of_op("rms_norm_quant")),
    Mutant("ops/matmul/decision.py", "else tiles - split_tiles + split_tiles * parts", "else tiles - split_tiles + split_tiles * (parts - 1)", "cpu/test_matmul.py"),
    Mutant("ops/matmul/decision.py", '{"partial": ((parts, split_tiles, height, width), torch.float32)}', '{"partial": ((parts - 1, split_tiles, height, width), torch.float32)}', "cpu/test_matmul.py"),
    Mutant("ops/matmul/decision.py", "Launch(matmul_reduce_kernel, (split_tiles, height // rows * (width // columns)), reduce", "Launch(matmul_reduce_kernel, (split_tiles, height // rows * (width // columns) - 1 or 1), reduce", "cpu/test_matmul.py"),
    Mutant("ops/matmul/decision.py", '"bias": p.bias, "partial": split', '"bias": False, "partial": split', of_op("matmul")),
    Mutant("ops/bmm.py", "blocks = min(tiles, c.resident(device)) if c.persistent else tiles\n", "blocks = min(tiles, c.resident(device)) if c.persistent else tiles - 1 or 1\n", of_op("bmm")),
    Mutant("ops/bmm.py", "if START and not MOVED else at_2", "if START else at_2", "cpu/test_bmm.py"),
    Mutant("ops/common/tiles.py", "(columns >= own_column) & (columns < width)", "(columns < width)", "cpu/test_bmm.py"),
    Mutant("ops/common/gemm_choices.py", "Scaling.BLOCK and c.share(self, device) <= self.most_fast", "Scaling.BLOCK", "cpu/test_matmul.py"),
    Mutant("ops/matmul/moved_kernel.py", "run_scales(scale_2, START, acc.shape[1], start_2", "run_scales(scale_2, 0, acc.shape[1], start_2", "cpu/test_matmul.py"),
    Mutant("compile/ahead.py", "wait=multiprocessing.parent_process() is not None", "wait=False", "cpu/test_survey.py"),
    Mutant("ops/common/gemm_candidates.py", "-g.m % rows >= START_UNIT and", "", "cpu/test_matmul.py cpu/test_bmm.py"),
    Mutant("ops/grouped_gemm/decision.py", '{"panels": ((3, 1 + panels), torch.int32)}', '{"panels": ((3, panels), torch.int32)}', of_op("grouped_gemm")),
    Mutant("ops/grouped_gemm/decision.py", "tiles = panels * -(-p.n // c.tile_n)", "tiles = panels * (p.n // c.tile_n or 1)", of_op("grouped_gemm")),
    Mutant("ops/common/scaling.py", "return out_dtype or (torch.bfloat16 if a.dtype in FP8 else a.dtype)", "return torch.bfloat16 if a.dtype in FP8 else a.dtype", of_op("grouped_gemm")),
    Mutant("ops/common/prefill.py", "    tiles, split = -(-p.q_len // c.tile_m), ", "    tiles, split = p.q_len // c.tile_m or 1, ", of_op("attention")),
    Mutant("ops/common/prefill.py", "grid = p.q_len // c.tile_m + p.batch, p.q_heads", "grid = p.q_len // c.tile_m + p.batch - 1, p.q_heads", of_op("attention")),
    Mutant("ops/common/prefill.py", " or p.kv_len % c.tile_n != 0,", ",", of_op("attention")),
    Mutant("ops/common/prefill.py", "((plain or not c.persistent) and", "(", SURVIVED),
    Mutant("ops/attention/decision.py", "group=p.q_heads // p.kv_heads,", "group=1,", of_op("attention")),
    Mutant("ops/attention_decode/decision.py", "return attend, merge(p, splits, prod(attend.grid), device)", "return (attend,)", of_op("attention_decode")),
    Mutant("ops/attention_decode/decision.py", "grid = (c.num_kv_splits * column_blocks *", "grid = ((c.num_kv_splits - 1 or 1) * column_blocks *", of_op("attention_decode")),
    Mutant("ops/attention_decode/decision.py", "-(-(p.columns + 2) // 4) * 4)", "-(-(p.columns + 1) // 4) * 4)", SURVIVED),
    Mutant("ops/attention_decode/kernels.py", "there = split < PARTIAL.shape[1]", "there = split < TILE_S", of_op("attention_decode")),
    Mutant("ops/attention_decode/kernels.py", "there & (column < columns), 0)", "there, 0)", of_op("attention_decode")),
    Mutant("ops/gated_delta_rule/decision.py", '"whole": p.head_dim == tile_k(p) and p.values_dim % c.tile_v == 0}', '"whole": True}', "cpu/test_linear_attention.py"),
    Mutant("ops/common/tiles.py", "inside & (rows < array.shape[array.ndim - 2])", "inside", "cpu/test_quantized_matmul.py cpu/test_mx_matmul.py"),
    Mutant("ops/common/tiles.py", "mask=columns < VECTOR.shape[0]", "mask=columns < TILE_N", "cpu/test_rms_norm_matmul.py"),
    Mutant("ops/kv_append/decision.py", "return (g.q_groups + 2 * g.kv_groups) *", "return (g.q_groups + g.kv_groups) *", of_op("kv_append")),
    Mutant("ops/kv_append/decision.py", '"rotary": p.rotary_dim,', '"rotary": p.head_dim if p.rotary_dim else 0,', of_op("kv_append")),
    Mutant("ops/merge_states.py", "(ct.cdiv(p.rows, c.tile_m),), p, c", "(p.rows // c.tile_m or 1,), p, c", of_op("merge_states")),
    Mutant("ops/sample/decision.py", 'f"has_{name}": there for', 'f"has_{name}": there and name != "top_p" for', "cpu/test_sample.py"),
    Mutant("ops/sample/decision.py", "return c.num_ctas == 1 or next_pow2(p.cols) >= LEAST_COLUMNS * c.num_ctas", "return True", SURVIVED),
    Mutant("ops/moe/decision.py", "((p.pairs, c.tile_m, p.inter), p.dtype)", "((p.pairs, 1, p.inter), p.dtype)", of_op("moe")),
    Mutant("ops/common/expert_lists.py", "return Launch(moe_sum_kernel, (p.tokens, -(", "return Launch(moe_sum_kernel, (p.tokens - 1 or 1, -(", of_op("moe")),
    Mutant("ops/moe/decision.py", "return self.pairs // tile_m + min(self.experts, self.pairs)", "return self.pairs // tile_m + 1", of_op("moe")),
    Mutant("ops/quantized_moe/kernels.py", "acc = found if i == 0 else ct.where(run < runs, found, acc)", "acc = found", of_op("quantized_moe")),
    Mutant("ops/quantized_moe/kernels.py", "            acc = ct.where(there, acc + weight * part, acc)", "            acc = acc + weight * part", of_op("quantized_moe")),
    Mutant("ops/quantized_moe/kernels.py", "ct.where(column % EACH == 0, _bias(", "ct.where(column >= 0, _bias(", of_op("quantized_moe")),
    Mutant("ops/moe/choices.py", "if c.few and (p.tokens > c.tile_m or c.quantized):", "if c.few and c.quantized:", "cpu/test_moe.py"),
    Mutant("ops/moe/choices.py", "if c.quantized and not (p.scaling and", "if c.quantized and not (", "cpu/test_moe.py"),
    Mutant("ops/moe_route.py", "(ct.cdiv(p.tokens, c.tile_m),), p, c", "(p.tokens // c.tile_m or 1,), p, c", "cpu/test_moe_route.py cpu/test_ops.py -k moe_route"),
    Mutant("ops/dropout.py", "if c.persistent else tiles\n", "if c.persistent else tiles - 1 or 1\n", of_op("dropout")),
    Mutant("ops/sparse_decode/decision.py", "(-(-p.topk // c.rows) + -(-p.more_topk // c.rows), tokens)", "(-(-p.topk // c.rows), tokens)", of_op("sparse_decode")),
    Mutant("ops/sparse_decode/decision.py", '"count": ((tokens,), torch.int32)}', '"count": ((tokens - 1 or 1,), torch.int32)}', of_op("sparse_decode")),
    Mutant("ops/sparse_index/kernels.py", "(before & 0xFFFF) + ct.minimum(rank, wanted)", "(before & 0xFFFF) + rank", "cpu/test_sparse_index.py"),
    Mutant("ops/sparse_index/decision.py", "(c.num_kv_splits, -(-p.q_len // c.tile_t), p.batch)", "(c.num_kv_splits, p.q_len // c.tile_t, p.batch)", of_op("sparse_index")),
    Mutant("ops/rms_norm_matmul.py", "if p.residual and not c.persistent else 0", "if False else 0", of_op("rms_norm_matmul")),
    # Choosing
    Mutant("launch/decision.py", "legal, device) or (configs[0],", "legal, device) or (configs[-1],", "cpu/test_select.py cpu/test_launch.py cpu/test_tune.py cpu/test_tune_lookup.py"),
    Mutant("select/choose.py", "key=lambda i: (prices[i], i)", "key=lambda i: (-prices[i], i)", "cpu/test_select.py"),
    Mutant("select/choose.py", "    return device.has_fp8 or not any(", "    return True or not any(", "cpu/test_moe.py cpu/test_matmul.py cpu/test_select.py"),
    Mutant("launch/decision.py", 'if callable(forced) else forced, "forced"', 'if callable(forced) else None, "forced"', "cpu/test_launch.py cpu/test_tune.py cpu/test_tune_lookup.py"),
    # Tuner, engine, megakernel, server
    Mutant("launch/files.py", "            os.fsync(file.fileno())\n", "            pass\n", SURVIVED),
    Mutant("tune/store.py", "            self.path.replace(aside)\n", "            pass\n", "cpu/test_tune_store.py"),
    Mutant("launch/files.py", "        part.replace(path)\n", "        pass\n", "cpu/test_tune_store.py"),
    Mutant("engine/pages.py", "if sum(missing) > self.count - 1 - len(running):", "if sum(missing) > self.count - len(running):", "cpu/test_engine_paged.py"),
    Mutant("engine/pages.py", "                self._free.append(page)\n", "                pass\n", "cpu/test_engine_paged.py"),
    Mutant("engine/pages.py", "list(range(self.count - 1, NOBODYS, -1))", "list(range(self.count - 1, NOBODYS - 1, -1))", "cpu/test_engine_paged.py"),
    Mutant("engine/mega/tiles.py", "        if kind == DOWN:\n            base = base + narrow + gate_up", "        if kind == DOWN:\n            base = base + narrow", "cpu/test_mega_codes.py"),
    Mutant("engine/mega/tiles.py", "packed(low_of(xs[n], ct.float16) * SECOND, high_of(xs[n], ct.float16) * SECOND, ct.float16)", "xs[n]", "cpu/test_mega_codes.py"),
    Mutant("engine/mega/tiles.py", "& 255, 5) - 4", "& 255, 5) - 6", "cpu/test_mega_codes.py"),
    Mutant("engine/mega/pack.py", "(alternating(found) if of_both else found for found in codes_of(matrix))", "codes_of(matrix)", "cpu/test_mega_codes.py"),
    Mutant("engine/mega/kernel.py", "ys = tuple(ys[n] * unit * scales[n] for n", "ys = tuple(ys[n] * unit * scales[n % 4] for n", "cpu/test_mega_codes.py"),
    Mutant("engine/mega/sums.py", "ct.abs(ys[r]), propagate_nan=True)", "ct.abs(ys[r]))", "cpu/test_mega.py -k nan_of_one"),
    Mutant("engine/mega/sums.py", "target = adders + 1  #", "target = adders  #", "cpu/test_mega.py"),
    Mutant("engine/mega/words.py", "while lowest < wanted:", "while lowest < wanted - 1:", "cpu/test_mega.py"),
    Mutant("engine/mega/sums.py", "ct.astype(ARRIVAL, ct.int64)) - old", "ct.astype(ARRIVAL, ct.int64))", "cpu/test_mega.py"),
    Mutant("engine/mega/attend.py", "there = key + at * SPAN < position", "there = key + at * SPAN <= position", "cpu/test_mega.py"),
    Mutant("engine/mega/attend.py", "            own = ct.full(own.shape, FLOOR, ct.float32)\n", "            own = own\n", "cpu/test_mega.py"),
    Mutant("engine/mega/attend.py", "if n + step <= last:", "if n + step < last:", "cpu/test_mega.py"),
    Mutant("engine/mega/shape.py", "start + number * some // blocks", "start + number * (some // blocks)", "cpu/test_mega.py"),
    Mutant("models/server/protocol.py", "if len(found) < len(pairs):", "if False:", "cpu/test_server_requests.py -k twice"),
    Mutant("models/quantized_folder.py", 'if said.get("desc_act") and groups > 1 and not indexed:', "if False:", "cpu/test_quantized_models.py -k other_codes"),
    Mutant("models/serve.py", "return Path(loaded.source).name", "return loaded.source", "cpu/test_serving.py"),
    Mutant("ops/attention/decision.py", "LEAST_SINGLE // c.tile_n if c.tf32x3 else 0", "0", "cpu/test_single_attention.py"),
    Mutant("ops/common/rows.py", "problem.rows <= device.sms // MOST_CLUSTER", "problem.rows < 0", "cpu/test_rows.py -k wide_and_few"),
    Mutant("ops/softmax.py", "p.rows <= device.sms // MOST_CLUSTER", "p.rows < 0", "cpu/test_rows.py -k wide_and_few"),
    Mutant("ops/common/rows.py", "late = vectors(p) > 1 and", "late = False and", "cpu/test_rows.py -k come_late"),
    Mutant("ops/common/rows.py", "0 if late else vectors(p)", "0", "cpu/test_rows.py -k come_late"),
    Mutant("testing/fuzz.py", "squares.sum() ** 2 / squares", "squares.numel() * squares.sum() / squares", "fuzz/test_fuzz.py -k carry"),
    Mutant("testing/fuzz.py", "draws += [self._case", "draws = [self._case", "fuzz/test_fuzz.py -k luck"),
    Mutant("testing/fuzz.py", "(torch.inf if few else LUCK)", "LUCK", "fuzz/test_fuzz.py -k luck"),
    Mutant("engine/checks.py", "all(map(is_, of.values(), before))", "True", "cpu/test_adversary_engine.py -k other_weights"),
    Mutant("engine/checks.py", "parameter.data_ptr() == place for", "parameter.data_ptr() for", "cpu/test_adversary_engine.py -k other_weights"),
    Mutant("engine/engine.py", "or not (left or waiting)", "or not left", "cpu/test_engine.py -k host_reads"),
    Mutant("engine/engine.py", "not (ending.possible or masks)", "not masks", "cpu/test_engine.py -k host_reads"),
    Mutant("engine/state.py", "        self.clock[0] = 0\n", "", "cpu/test_engine.py -k host_reads"),
    Mutant("engine/families.py", "if value != default and not hasattr(type(config), name):", "if False:", "cpu/test_adversary_models.py -k otherwise"),
    Mutant("models/whole.py", "if name.endswith(\"inv_freq\") and not buffer", "if name == \"inv_freq\" and not buffer", "cpu/test_adversary_files.py -k rotation"),
    Mutant("models/patch.py", "        except BaseException:  # also Ctrl-C\n", "        except Exception:\n", "cpu/test_models_patch.py -k interrupt"),
    Mutant("models/quantized.py", "    except BaseException:  # also Ctrl-C\n", "    except Exception:\n", "cpu/test_models_patch.py -k interrupt"),
    Mutant("models/patch.py", "    with _ALONE:\n        if _MARK", "    with threading.RLock():\n        if _MARK", "cpu/test_models_patch.py -k two_threads"),
    Mutant("launch/check.py", "if other <= stride])", "])", "cpu/test_ops.py -k any_length"),
    Mutant("_forks.py", "after_in_child=release", "after_in_child=lambda: None", "cpu/test_front_end.py -k forked"),
    Mutant("bench/linear_peers.py", "bool(inputs[\"g\"].dim() < inputs[\"k\"].dim())", "inputs[\"x\"] is None", "cpu/test_bench_peers.py -k knows_its_peers"),
    Mutant("ops/quantize_mx.py", "stored = x.new_empty(shape, dtype=of.stored_dtype)", "stored = x.new_empty(shape, dtype=of.scale_dtype)", "cpu/test_ops.py -k one_graph"),
    Mutant("engine/command.py", "kv_dtype and f\"kv={kv_dtype}\"", "\"\"", "cpu/test_cli_generate.py -k weights_and_the_cache"),
    Mutant("engine/modes.py", "bool(reached) and max_len <= REACH * max(pairs)", "bool(reached)", "cpu/test_mega.py -k auto"),
]  # fmt: skip


def run(mutant: Mutant) -> dict[str, object]:
    """verdict: "killed", "survived", or "broken": pytest could not run, or a test fails without the
    mutant too. by: what found it.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "results"))
        file = tree / "src/tilewright" / mutant.file
        whole = file.read_text()
        file.write_text(whole.replace(mutant.old, mutant.new))
        paths, _, chosen = mutant.tests.partition(" -k ")
        code, by = tested(tree, [*(f"tests/{path}" for path in paths.split()), *(["-k", chosen] if chosen else [])])
        verdict = "killed" if code < 0 else {0: "survived", 1: "killed", 2: "killed"}.get(code, "broken")
        if code == 1 and "::" in by:
            file.write_text(whole)
            if tested(tree, [by])[0] == 1:
                verdict = "broken"
    return {"verdict": verdict, "by": by, "seconds": round(time.perf_counter() - start)}


def tested(tree: Path, what: list[str]) -> tuple[int, str]:
    """The exit code of tests in a copy of the tree, and the test that failed, or what else did."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *what]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, timeout=IDLE * SECONDS, preexec_fn=bounded, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return 1, "time"
    failed = (line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return done.returncode, next(failed, f"exit code {done.returncode}" if done.returncode else "")


def bounded() -> None:
    """Of processor time: a busy machine kills no mutant."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose file or text holds TEXT")
    parser.add_argument("--log", type=Path, help="append each verdict to this file of JSON lines, and skip what it has")
    parser.add_argument("--list", action="store_true", help="print them, run nothing")
    options = parser.parse_args()
    logged = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log and options.log.exists() else []
    known = {(row["file"], row["old"], row["new"]): row for row in logged}
    found: dict[str, list[str]] = {"killed": [], "survived": [], "broken": []}
    for i, mutant in enumerate(MUTANTS):
        name = f"{mutant.file}: {' '.join(mutant.new.split()) or 'nothing'}"
        if options.only not in f"{mutant.file} {mutant.old} {mutant.new} {mutant.tests}":
            continue
        if options.list:
            print(f"{i:3d} {name}")
            continue
        row = known.get(mutant[:3])
        if row is None:
            row = mutant._asdict() | run(mutant)
            if options.log:
                with options.log.open("a") as log:
                    log.write(json.dumps(row) + "\n")
        found[row["verdict"]].append(name)
        print(f"{i:3d} {row['verdict']:<8} {row['seconds']:4d} s  {name}  {row['by']}", flush=True)
    ran = sum(map(len, found.values()))
    if ran:
        print(f"{len(found['killed'])} of {ran} killed, {100 * len(found['killed']) / ran:.0f} %")
        for name in (*found["survived"], *found["broken"]):
            print(f"left: {name}: {SURVIVORS.get(name, 'needs a test')}")
    return 1 if found["broken"] or any(name not in SURVIVORS for name in found["survived"]) else 0


if __name__ == "__main__":
    sys.exit(main())
