"""The constants of the cost model for each GPU and op, each with a meaning and a unit.

`data/<GPU>.json` holds what `tilewright tune --fit` made of measured times. A GPU without a file
gets the constants of its architecture's file, else of the H200's, with its own SMs, bandwidth and
tensor rate from the data sheet (`Device`).
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..launch import Device

Rates = Mapping[str, float]
Data = dict[str, Any]

DATA = Path(__file__).resolve().parent / "data"
BASE = "H200"  # the GPU whose constants stand in for an architecture that nobody measured

# Name: unit, meaning. "eff.<kind>" beside them: share of the bf16 peak that a kind of product
# reaches (eff.fp8 is near 2).
MEANING = {
    "start": ("us", "launch, first loads, last stores"),
    "tile": ("us", "start and end of a tile of 128 x 128"),
    "persistent": ("ratio", "what stays of `tile` where a persistent block goes from tile to tile"),
    "step": ("us", "barrier and issue of one pipeline step"),
    "serial": ("us", "a step's wait for a result of its own"),
    "dram": ("bytes/us", "memory, all blocks together"),
    "draw": ("bytes/us", "what one block draws from memory"),
    "pair": ("bytes/us", "what the blocks of two neighbouring SMs draw from memory together"),
    "burst": ("bytes", "of a block, that come with its first loads, whose wait is in `start`"),
    "fill": ("bytes/us", "into one SM, L2 hits included"),
    "l2": ("bytes/us", "out of L2 into all SMs together"),
    "padding": ("bytes/us", "likewise, zeros for rows that are not there: slower than rows that are"),
    "unaligned": ("ratio", "time of `fill` where rows begin off multiples of 128 bytes"),
    "sectors": ("bytes/us", "out of L2 into all SMs together, where rows begin off multiples of 32 bytes"),
    "reach": ("bytes", "that a wave may span before address translation misses"),
    "far": ("ratio", "time of memory beyond it, less 1"),
    "fade": ("ratio", "time of the MMA once it has run for much more than 500 us, less 1: clocks"),
    "exponentials": ("1/us", "of one SM"),
    "reduce": ("us", "a second launch"),
    "reduce_rate": ("bytes/us", "partial results, written and read"),
    "latency": ("us", "one more memory round trip of a block"),
    "tail": ("ratio", "of the longest block's excess, that no other work covers"),
    "spill": ("1/byte", "time of the waves for each byte of stack, less 1"),
}


@cache
def rates(op: str, device: Device) -> Rates:
    """The constants of an op on a device, "flops" (one SM's bf16 peak, flop/us) among them."""
    data = data_of(device)[0]
    found = {**data["rates"]["common"], **data["rates"].get(op, {})}
    found["flops"] = device.tflops * 1e6 / device.sms
    if data["gpu"] != device.name:
        for name in ("dram", "reduce_rate", "l2", "padding", "sectors"):
            found[name] *= device.memory_gbs / data["memory_gbs"]
        found["reach"] *= device.l2_bytes / data["l2_bytes"]
    return found


@cache
def data_of(device: Device) -> tuple[Data, str]:
    """The data that a device is priced with, and what it is: "model", or "model, data-sheet
    numbers" where its own GPU was not measured.
    """
    files = {path.stem: path for path in sorted(DATA.glob("*.json"))}
    own = device.name.replace(" ", "_")
    if own in files:
        return read(files[own]), "model"
    known = [read(path) for path in files.values()]
    near = next((data for data in known if data["arch"] == device.arch), None) or read(files[BASE])
    return near, "model, data-sheet numbers"


def read(path: Path) -> Data:
    """A file of `data/`."""
    found: Data = json.loads(path.read_text())
    return found


def forget() -> None:
    """Reads the files again at the next call: after a fit in this process."""
    rates.cache_clear()
    data_of.cache_clear()
