"""The names, dtypes and shapes of a safetensors file, from its header alone.

The format: 8 bytes with the header's length, the header, a JSON object, and the data without holes.
https://huggingface.co/docs/safetensors
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..launch.files import open_regular
from .files import ModelFileError, file_error, json_object, read_json, some

LONGEST_HEADER = 1 << 25
LONGEST_INDEX = 1 << 25
_FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_BITS = {
    **_FLOATS,
    **dict.fromkeys(("I64", "U64", "C64"), 64),
    **dict.fromkeys(("I32", "U32"), 32),
    **dict.fromkeys(("I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """shape: as stored. plain: of a float dtype that needs no scale. size: in bytes."""

    shape: tuple[int, ...]
    plain: bool
    size: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name.

    Raises: ModelFileError where the file is not whole and sound.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise file_error(path, "a safetensors file, of at least 8 bytes", size)
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, LONGEST_HEADER):
                raise file_error(path, f"a safetensors file with a header of at most {min(size - 8, LONGEST_HEADER)} bytes", length)
            header = json_object(path, file.read(length), once=True)
    except OSError as error:
        raise ModelFileError(str(error)) from None
    about = header.pop("__metadata__", None)
    if about is not None and not (isinstance(about, dict) and all(isinstance(text, str) for text in about.values())):
        raise file_error(path, "a safetensors file with texts as __metadata__", f"{about!r:.80}")
    found: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        begin, end, found[name] = _entry(path, name, entry)
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise file_error(path, "a safetensors file without holes and overlaps", f"{name!r} at byte {begin} of the data, after byte {at}")
        at = end
    if at != size - 8 - length:
        raise file_error(path, f"a safetensors file with {at} bytes of data", size - 8 - length)
    return found


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, StoredTensor]:
    """Where a tensor begins and ends in the data, and the tensor."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise file_error(path, f"a safetensors file with a known dtype of {name!r}", repr(dtype)[:80])
    if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise file_error(path, f"a safetensors file with a shape and two rising offsets of {name!r}", f"{shape!r} and {offsets!r}"[:120])
    bits = _BITS[dtype]
    for size in shape:
        bits *= size
        if bits >= 1 << 66:  # before the product of a million sizes grows; a later size of 0 is none either
            break
    if bits != 8 * (offsets[1] - offsets[0]):
        raise file_error(
            path, f"a safetensors file with as many bytes of {name!r} as its shape says, {dtype} {shape!r:.80}", f"{offsets[1] - offsets[0]}"
        )
    return *offsets, StoredTensor(tuple(shape), dtype in _FLOATS, offsets[1] - offsets[0])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def folder_weights(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face folder by name: of model.safetensors, or of the files that
    model.safetensors.index.json names.

    Raises: ModelFileError where a file is missing, not sound or outside of the folder.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return read_header(single)
    if not index.exists():
        raise file_error(folder, "a folder with model.safetensors, or with model.safetensors.index.json and its files", "neither")
    places = read_json(index, LONGEST_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise file_error(index, 'an object with the file of each weight in "weight_map"', f"{type(places).__name__} {str(places)[:60]}")
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(places.values())):
        if not re.fullmatch(r"[^/\\.\0][^/\\\0]*\.safetensors", name):
            raise file_error(index, "a list of .safetensors files of its own folder", repr(name)[:120])
        if not (folder / name).exists():
            raise file_error(folder / name, f"a file, for {index.name} names it", "none")
        here = read_header(folder / name)
        if both := sorted(found.keys() & here.keys()):
            raise file_error(folder / name, "the only file with its weights", some(both))
        found |= here
        if absent := sorted(weight for weight, place in places.items() if place == name and weight not in here):
            raise file_error(folder / name, f"the file of {index.name}, which has all that it names there", f"missing {some(absent)}")
    return found
