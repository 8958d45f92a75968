"""What the text of a compiled kernel says of its loads and stores."""

import re
import subprocess
import tempfile

from tilewright.compile.disassemble import find_tool

ACCESS = re.compile(r"\b(LDG|STG)\.\S+\s.*?desc\[\w+\]\[(R\d+)\.64")
RESULT = re.compile(r"^\s*(?:@!?U?P\d+\s+)?([A-Z][\w.]*)\s+R(\d+)\b")


def sass(cubin: bytes) -> list[str]:
    """The instructions and labels of a binary, without its comments."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(find_tool("nvdisasm")), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return re.sub(r"/\*[0-9a-fx]+\*/", "", text).splitlines()


def loads_behind_stores(lines: list[str]) -> list[str]:
    """The loads from memory whose address register a store in front of them has used.

    Where several threads hold the same element, such a load may read what another has stored.
    """
    stored: set[int] = set()
    found = []
    for line in lines:
        if access := ACCESS.search(line):
            base = int(access[2][1:])
            if access[1] == "STG":
                stored.add(base)
            elif base in stored:
                found.append(line.strip())
        result = RESULT.match(line)
        if result and not result[1].startswith(("STG", "RED")):
            words = 4 if ".128" in result[1] else 2 if ".64" in result[1] or "WIDE" in result[1] else 1
            first = int(result[2])
            stored -= set(range(first - 1, first + words))
        if "EXIT" in line and "@" not in line:
            stored.clear()
    return found
