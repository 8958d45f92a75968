"""Stores which mode was faster, as measured by `tilewright bench --suite decode --json FILE`.

    python -m tilewright.engine.keep_modes FILE          # for this user, on this machine
    python -m tilewright.engine.keep_modes FILE --to src/tilewright/engine/modes.jsonl

`mode="auto"` goes by these rows (modes.py). A module that the package does not import, because
Python warns of running one that is loaded already.
"""

import argparse
import json
from pathlib import Path

from ..launch.files import replace_file
from .modes import Row, own_table, rows

KEPT = ("gpu", "dtype", "weights", "sizes", "keys", "mode", "time_us", "date", "clocks")


def keep(source: Path, to: Path) -> int:
    """Puts the rows of modes that "auto" chooses from, of a file of the suite's, in front of the
    table's. Returns how many.
    """
    found = [{name: row.get(name) for name in KEPT} for row in rows(source) if row["op"] == "decode" and row["mode"] in ("graph", "mega")]
    old = [row for row in rows(to) if not any(_same(row, new) for new in found)]
    replace_file(to, "".join(json.dumps(row) + "\n" for row in (*found, *old)).encode())
    return len(found)


def _same(a: Row, b: Row) -> bool:
    return all(a.get(name) == b.get(name) for name in ("gpu", "dtype", "weights", "sizes", "keys", "mode"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", type=Path, default=own_table())
    options = parser.parse_args()
    if not options.file.is_file():
        parser.error(f"file must exist, got {options.file}")
    if not (kept := keep(options.file, options.to)):
        parser.error(f"file must hold rows of the suite in mode graph or mega, got none in {options.file}")
    print(f"{kept} rows now in {options.to}")


if __name__ == "__main__":
    main()
