"""What a GGUF file says of itself: metadata and where its tensors lie, checked against its size.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..launch.files import open_regular
from .files import ModelFileError, file_error

MOST_TENSORS = 1 << 16  # large models have about 2000
MOST_KEYS = 1 << 12  # they have about 50; transformers compares each with all, three times over
MOST_ITEMS = 1 << 20  # of a list; the largest vocabularies have 2**18 tokens and twice as many merges
MOST_OTHERS = 1 << 16  # of all lists that are no vocabulary; models have one item a layer
LONGEST_NAME = (1 << 16) - 1
MOST_DIMS = 4
EXPANDED_KINDS = "a GGUF file of F32, F16, BF16, Q4_0 to Q8_0, K, IQ, TQ, MXFP4 or NVFP4 tensors, which the gguf package expands"
VOCABULARY = {f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges", "precompiled_charsmap")}
_STRING, _LIST = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: outermost axis first. kind: GGMLQuantizationType. begin, size: bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: numbers, strings and lists by key; strings in a list are bytes, not yet looked at.
    tensors: as in the file.
    """

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_header(path: Path) -> GgufHeader:
    """The header of a file.

    Raises: ModelFileError where the file is not whole and sound. ImportError without the package
    gguf, which knows the tensor types.
    """
    try:
        with open_regular(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise file_error(path, "a GGUF file", "an empty one")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelFileError(str(error)) from None


class _Reader:
    """Reads one value after another; raises where one does not fit into the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)
        self.others = 0  # items of lists that are no vocabulary

    def header(self) -> GgufHeader:
        if self.take(4, "the magic") != b"GGUF":
            raise file_error(self.path, "a GGUF file, which begins with GGUF", repr(self.data[:4]))
        if (version := self.number("I", "the version")) not in (2, 3):
            raise file_error(self.path, "a little-endian GGUF file of version 2 or 3", f"version {version}")
        tensors, keys = self.count("Q", MOST_TENSORS, "number of tensors"), self.count("Q", MOST_KEYS, "number of keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text("a key", LONGEST_NAME)
            if not key or key in metadata:
                raise file_error(self.path, "a GGUF file with other names for other keys", f"{key!r} again" if key else "an empty key")
            metadata[key] = self.value(key, self.number("I", f"the type of {key}"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise file_error(self.path, "a GGUF file whose general.alignment is a power of two", alignment)
        entries = [self.entry() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        return GgufHeader(metadata, self.placed(entries, start, alignment))

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise file_error(self.path, f"a GGUF file that has all {count} bytes of {what} at byte {self.at}", f"a file of {self.size} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str, what: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}"), what))
        return value

    def count(self, kind: str, most: int, what: str) -> int:
        if (count := int(self.number(kind, f"the {what}"))) > most:
            raise file_error(self.path, f"a GGUF file whose {what} is at most {most}", count)
        return count

    def text(self, what: str, most: int | None = None) -> str:
        content = self.take(self.count("Q", self.size if most is None else most, f"length of {what}"), what)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise file_error(self.path, f"a GGUF file with UTF-8 as {what}", error) from None

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text(f"the value of {key}")
        if kind == _LIST:
            return self.list_of(key)
        if kind not in _SCALARS:
            raise file_error(self.path, f"a GGUF file with a known type of {key}", kind)
        value = self.number(_SCALARS[kind], f"the value of {key}")
        if isinstance(value, float) and not math.isfinite(value):
            raise file_error(self.path, f"a GGUF file with a finite {key}", value)
        return value

    def list_of(self, key: str) -> list[Any]:
        kind, count = self.number("I", f"the type in the list {key}"), self.count("Q", MOST_ITEMS, f"length of the list {key}")
        if key not in VOCABULARY:  # of which transformers makes Python's objects, one by one
            self.others += count
            if self.others > MOST_OTHERS:
                raise file_error(
                    self.path, f"a GGUF file with lists of at most {MOST_OTHERS} items beside its vocabulary", f"{self.others} up to {key}"
                )
        if kind in _SCALARS:
            numbers = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack(numbers, self.take(struct.calcsize(numbers), f"the list {key}")))
        if kind == _STRING:
            return [self.string(key) for _ in range(count)]
        raise file_error(self.path, f"a GGUF file with a list of numbers or strings as {key}", f"one of type {kind}")

    def string(self, key: str) -> bytes:
        """The next one of a list, of which a vocabulary has 100,000."""
        at = self.at + _LENGTH.size
        if at <= self.size:
            (length,) = _LENGTH.unpack_from(self.data, self.at)
            if length <= self.size - at:
                self.at = at + length
                return self.data[at : self.at]
        return self.take(self.number("Q", f"a length in the list {key}"), f"a string in the list {key}")  # raises

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of the next tensor."""
        name = self.text("a tensor's name", LONGEST_NAME)
        dims = self.count("I", MOST_DIMS, f"number of axes of {name!r}")
        shape = tuple(self.number("Q", f"the sizes of {name!r}") for _ in range(dims))[::-1]
        return name, shape, self.number("I", f"the type of {name!r}"), self.number("Q", f"the offset of {name!r}")

    def placed(self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int) -> tuple[GgufTensor, ...]:
        """The tensors, none of which reaches into another or beyond the file."""
        from gguf import GGML_QUANT_SIZES

        known: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        tensors = []
        for name, shape, kind, offset in entries:
            if kind not in known:
                raise file_error(self.path, EXPANDED_KINDS, f"{name!r:.80} of type {kind}")
            block, block_bytes = known[kind]
            if not shape or 0 in shape or shape[-1] % block:
                raise file_error(
                    self.path, f"a GGUF file where the sizes of {name!r} are at least 1, and rows of whole blocks of {block}", list(shape)
                )
            size = math.prod(shape) // block * block_bytes
            if offset % alignment or start + offset + size > self.size:
                within = f"begins at a multiple of {alignment} and lies within the {self.size} bytes"
                raise file_error(self.path, f"a GGUF file where {name!r} {within}", f"{size} bytes at byte {start + offset}")
            tensors.append(GgufTensor(name, shape, kind, start + offset, size))
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise file_error(self.path, "a GGUF file with other names for other tensors", "one name twice")
        in_order = sorted(tensors, key=lambda tensor: tensor.begin)
        for one, after in itertools.pairwise(in_order):
            if one.begin + one.size > after.begin:
                raise file_error(self.path, "a GGUF file whose tensors do not overlap", f"{one.name!r} and {after.name!r}")
        return tuple(tensors)
