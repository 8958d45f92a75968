"""Times `cascade_decode` beside `attention_decode`, which reads shared keys once for each user.

    python benchmarks/cascade.py --users 64 --prefix 8192 --own 256 --json out.jsonl

Both read the same keys: for the latter they lie once in a pool of pages, which all users' tables
name. So it does not need more memory, only more reads. The least time is that of reading each key
and value once. Without a GPU, small sizes are only compared.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import attention_decode, cascade_decode
from tilewright.bench.report import tell
from tilewright.bench.timer import input_sets, time_interleaved
from tilewright.launch import Device

PAGE = 64


def inputs(users: int, prefix: int, own: int, heads: tuple[int, int], dim: int, device: str) -> dict[str, Tensor]:
    """Pages of the shared keys, then of each user's own, and the tables that name them."""
    shared, each = prefix // PAGE, -(-own // PAGE)
    pages = torch.arange(shared + users * each, dtype=torch.int32, device=device)
    mine = pages[shared:].view(users, each)
    pool = (len(pages), heads[1], PAGE, dim)
    return {
        "q": torch.randn(users, heads[0], 1, dim, dtype=torch.bfloat16, device=device),
        "k": torch.randn(pool, dtype=torch.bfloat16, device=device),
        "v": torch.randn(pool, dtype=torch.bfloat16, device=device),
        "prefix_table": pages[:shared],
        "block_table": mine,
        "kv_len": torch.full((users,), own, dtype=torch.int32, device=device),
        "whole_table": torch.cat((pages[:shared].expand(users, -1), mine), 1),
        "whole_len": torch.full((users,), prefix + own, dtype=torch.int32, device=device),
    }


def cascade(q: Tensor, k: Tensor, v: Tensor, prefix_table: Tensor, block_table: Tensor, kv_len: Tensor, **unused: Any) -> Any:
    return cascade_decode(q, k, v, k, v, kv_len, block_table=block_table, prefix_table=prefix_table)


def plain(q: Tensor, k: Tensor, v: Tensor, whole_table: Tensor, whole_len: Tensor, **unused: Any) -> Any:
    return attention_decode(q, k, v, whole_len, block_table=whole_table)


CALLS: dict[str, Callable[..., Any]] = {"cascade_decode": cascade, "attention_decode": plain}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("users", 64), ("prefix", 8192), ("own", 256), ("q-heads", 32), ("kv-heads", 8), ("dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if min(given.users, given.prefix, given.own) < 1 or given.prefix % PAGE:
        parser.error(f"--users, --prefix and --own must be positive, --prefix a multiple of {PAGE}")
    sizes = given.users, given.prefix, given.own, (given.q_heads, given.kv_heads), given.dim
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = " ".join(f"{name}={value}" for name, value in vars(given).items() if name != "json")
    row: dict[str, Any] = {"op": "cascade_decode", "case": case, "gpu": Device.of(torch.empty(0, device=device)).name}
    torch.manual_seed(0)
    first = inputs(*sizes, device)
    found = {name: call(**first).float() for name, call in CALLS.items()}
    row["difference"] = float((found["cascade_decode"] - found["attention_decode"]).norm() / found["attention_decode"].norm())
    if device == "cuda":
        once = first["k"].nbytes + first["v"].nbytes
        sets = input_sets(lambda: inputs(*sizes, device), once, torch.cuda.get_device_properties(0).L2_cache_size)
        times = {name: timing.time_us for name, timing in time_interleaved(CALLS, sets).items()}
        row |= {"bytes": once, "us": times, "ratio": times["attention_decode"] / times["cascade_decode"]}
    tell(row, given.json)
    return row


if __name__ == "__main__":
    main()
