"""Which mode takes less time for one sequence of a model, as measured: what `mode="auto"` goes by.

The table has rows of `tilewright bench --suite decode --json FILE`, cut down by keep_modes.py.
"""

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from ..launch import Device, dtype_name
from ..launch.identity import cache_folder
from .mega.pack import CODES, dims_of_config, packed_bytes, refuse_model
from .parallel import Group

Mode = Literal["eager", "graph", "mega", "auto"]
SHIPPED = Path(__file__).with_name("modes.jsonl")
REACH = 32  # times as many keys as were measured, at most
Row = dict[str, Any]


def own_table() -> Path:
    return cache_folder() / "modes.jsonl"


def own_rows() -> list[Row]:
    """The rows of `own_table`; none, with a warning, if it cannot be read or holds anything else:
    no engine fails for a file that only makes it faster.
    """
    path = own_table()
    try:
        found = rows(path)
        if not all(isinstance(row, dict) and isinstance(row.get("mode"), str) and _numbers(row) for row in found):
            raise ValueError("a line that is no measured mode")
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} must be a file of measured modes, got {error}; it is not used", stacklevel=2)
        return []
    return found


def _numbers(row: Row) -> bool:
    return type(row.get("keys")) is int and type(row.get("time_us")) in (int, float)


def auto_mode(model: Any, max_batch: int, max_len: int, group: Group | None, small: bool, beyond: bool) -> Mode:
    """The mode that "auto" stands for. "graph" where nothing was measured; "eager" on a CPU.

    "mega" only for one sequence, of a model that it runs and has room to pack, and if it was the
    faster one at every measured number of keys up to max_len. small: weights are quantised, or will
    be to CODES. beyond: the cache has pages or 8 bits, or there is a draft, or weights will have
    another format, which is beyond the megakernel.
    """
    device = Device.of(next(model.parameters()))
    if device.is_cpu:
        return "eager"
    if max_batch > 1 or beyond or group is not None:
        return "graph"
    try:
        refuse_model(model, device)
    except ValueError:
        return "graph"
    if packed_bytes(model.config, device, small) > torch.cuda.mem_get_info(model.device)[0]:
        return "graph"
    return faster(model.config, device, model.dtype, max_len, [*own_rows(), *rows(SHIPPED)], CODES if small else None)


def faster(config: Any, device: Device, dtype: torch.dtype, max_len: int, table: Iterable[Row], weights: str | None = None) -> Mode:
    """ "mega" or "graph". Of rows of the same mode and keys the first counts.

    "graph" too where max_len is far beyond all measured keys: attention over many keys is what the
    megakernel is slower at.
    """
    wanted = {"gpu": device.name, "dtype": dtype_name(dtype), "sizes": asdict(dims_of_config(config)), "weights": weights}
    times: dict[tuple[str, int], float] = {}
    for row in table:
        if all(row.get(name) == value for name, value in wanted.items()):
            times.setdefault((row["mode"], row["keys"]), row["time_us"])
    pairs = {keys: (us, times["graph", keys]) for (mode, keys), us in times.items() if mode == "mega" and ("graph", keys) in times}
    reached = [us for keys, us in pairs.items() if keys <= max_len]
    known = bool(reached) and max_len <= REACH * max(pairs)
    return "mega" if known and all(mega < graph for mega, graph in reached) else "graph"


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
