"""Small GGUF files, a sound one and hostile ones that differ from it in one thing."""

import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hostile import HEAD_DIM, LARGE, LAYER

U8, U32, F32, STRING, LIST, U64 = 0, 4, 6, 8, 9, 10


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def number(kind: int, value: float) -> bytes:
    return struct.pack("<" + {U8: "B", U32: "I", F32: "f", U64: "Q"}[kind], value)


def strings(values: list[str]) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def gguf_keys() -> dict[str, tuple[int, bytes]]:
    """Metadata of a whole llama: key -> type and bytes of the value."""
    tokens = [f"<{i}>" for i in range(30)] + [chr(c) for c in range(97, 97 + 26)] + ["ab", *(f"[{i}]" for i in range(7))]
    return {
        "general.architecture": (STRING, text("llama")),
        "general.name": (STRING, text("tiny")),
        "general.alignment": (U32, number(U32, 32)),
        "llama.context_length": (U32, number(U32, 64)),
        "llama.embedding_length": (U32, number(U32, 32)),
        "llama.block_count": (U32, number(U32, 2)),
        "llama.feed_forward_length": (U32, number(U32, 48)),
        "llama.attention.head_count": (U32, number(U32, 2)),
        "llama.attention.head_count_kv": (U32, number(U32, 1)),
        "llama.attention.layer_norm_rms_epsilon": (F32, number(F32, 1e-5)),
        "llama.rope.freq_base": (F32, number(F32, 10000.0)),
        "llama.vocab_size": (U32, number(U32, 64)),
        "tokenizer.ggml.model": (STRING, text("gpt2")),
        "tokenizer.ggml.tokens": (LIST, strings(tokens)),
        "tokenizer.ggml.token_type": (LIST, struct.pack("<IQ64i", 5, 64, *[1] * 64)),
        "tokenizer.ggml.merges": (LIST, strings(["a b"])),
        "tokenizer.ggml.bos_token_id": (U32, number(U32, 1)),
        "tokenizer.ggml.eos_token_id": (U32, number(U32, 2)),
    }


def gguf_tensors() -> list[dict[str, Any]]:
    """Entries of a whole llama: name, dims (innermost first), type, offset, and values."""
    shapes = {"token_embd": (64, 32), "output_norm": (32,)}
    shapes |= {f"blk.{i}.{part}": shape for i in range(2) for part, (_, shape) in LAYER.items()}
    generator, at, found = torch.Generator().manual_seed(0), 0, []
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy().tobytes()
        found.append({"name": f"{name}.weight", "dims": list(shape[::-1]), "kind": 0, "offset": at, "values": values})
        at += -(-len(values) // 32) * 32
    return found


class Gguf:
    """Parts of a file, to change before they are joined. `marks`: where its sections begin."""

    def __init__(self) -> None:
        self.magic, self.version = b"GGUF", 3
        self.keys, self.tensors, self.stored = list(gguf_keys().items()), gguf_tensors(), gguf_tensors()
        self.key_count: int | None = None
        self.tensor_count: int | None = None
        self.marks: list[int] = []
        self.tail = b""  # behind the data

    def put(self, key: str, kind: int, value: bytes) -> None:
        self.keys = [entry for entry in self.keys if entry[0] != key] + [(key, (kind, value))]

    def content(self) -> bytes:
        counts = (len(self.tensors) if self.tensor_count is None else self.tensor_count, len(self.keys) if self.key_count is None else self.key_count)
        parts = [self.magic, struct.pack("<I", self.version), *(struct.pack("<Q", count) for count in counts)]
        for key, (kind, value) in self.keys:
            parts += [text(key), struct.pack("<I", kind), value]
        for tensor in self.tensors:
            dims = tensor["dims"]
            parts += [text(tensor["name"]), struct.pack("<I", tensor.get("axes", len(dims))), struct.pack(f"<{len(dims)}Q", *dims)]
            parts += [struct.pack("<I", tensor["kind"]), struct.pack("<Q", tensor["offset"])]
        header = b"".join(parts)
        self.marks = [0, *itertools.accumulate(map(len, parts))]
        data = bytearray()
        for tensor in self.stored:
            data += b"\0" * (tensor["offset"] - len(data)) + tensor["values"]
            self.marks.append(-(-len(header) // 32) * 32 + len(data))
        return header + b"\0" * (-len(header) % 32) + bytes(data) + self.tail


def factors(file: Gguf) -> None:
    last = file.tensors[-1]
    file.tail = b"\0" * 32
    file.tensors.append({"name": "rope_freqs.weight", "dims": [8], "kind": 0, "offset": last["offset"] + len(last["values"])})


def _by_scores(file: Gguf, tokens: list[str]) -> None:
    """A vocabulary of sentencepiece's, which has no merges."""
    file.keys = [entry for entry in file.keys if not entry[0].endswith("merges")]
    file.put("tokenizer.ggml.model", STRING, text("llama"))
    file.put("tokenizer.ggml.tokens", LIST, strings(tokens))
    file.put("tokenizer.ggml.scores", LIST, struct.pack(f"<IQ{len(tokens)}f", 6, len(tokens), *[0.0] * len(tokens)))


def changed_gguf() -> Iterator[tuple[str, str, Callable[[Gguf], None]]]:
    """Name, word of the reason, and change."""

    def tensor(at: int, **values: Any) -> Callable[[Gguf], None]:
        return lambda file: file.tensors[at].update(values)

    def put(key: str, kind: int, value: bytes) -> Callable[[Gguf], None]:
        return lambda file: file.put(key, kind, value)

    def attribute(name: str, value: Any) -> Callable[[Gguf], None]:
        return lambda file: setattr(file, name, value)

    yield "magic", "GGUF", attribute("magic", b"GGML")
    for version in (0, 1, 4, 3 << 24, (1 << 32) - 1):
        yield f"version {version}", "version", attribute("version", version)
    for name, value in LARGE.items():
        yield f"tensors {name}", "number of tensors", attribute("tensor_count", value)
        yield f"keys {name}", "number of keys", attribute("key_count", value)
        yield f"first size {name}", "token_embd", tensor(0, dims=[value, 64])
        yield f"second size {name}", "token_embd", tensor(0, dims=[32, value])
        yield f"offset {name}", "token_embd", tensor(0, offset=value)
        yield f"aligned offset {name}", "token_embd", tensor(0, offset=value & ~31)
        yield f"string {name}", "length", put("general.name", STRING, struct.pack("<Q", value) + b"x")
        yield f"list {name}", "length", put("general.tags", LIST, struct.pack("<IQ", U8, value))
        yield f"strings {name}", "length", put("general.tags", LIST, struct.pack("<IQ", STRING, value))
        yield f"string in a list {name}", "string in the list", put("general.tags", LIST, struct.pack("<IQQ", STRING, 1, value))
        yield f"block_count {name}", "block_count", put("llama.block_count", U64, number(U64, value))
        yield f"head_count {name}", "", put("llama.attention.head_count", U64, number(U64, value))
        yield f"head_count_kv {name}", "", put("llama.attention.head_count_kv", U64, number(U64, value))
        yield f"embedding_length {name}", "", put("llama.embedding_length", U64, number(U64, value))
        yield f"feed_forward_length {name}", "", put("llama.feed_forward_length", U64, number(U64, value))
        yield f"vocab_size {name}", "", put("llama.vocab_size", U64, number(U64, value))
        yield f"product {name}", "token_embd", tensor(0, dims=[value, value, value, value])
    for axes in (0, 5, 1 << 31, (1 << 32) - 1):
        yield f"axes {axes}", "axes" if axes else "sizes", tensor(0, axes=axes, dims=[] if axes == 0 else [32, 64])
    yield "size 0", "at least 1", tensor(0, dims=[32, 0])
    yield "overflow", "token_embd", tensor(0, dims=[1 << 32, 1 << 32, 2, 2])
    yield "type", "type", tensor(0, kind=999)
    yield "removed type", "type", tensor(0, kind=4)
    yield "integers as weights", "", tensor(1, kind=26)
    yield "blocks", "whole blocks", tensor(2, kind=12)
    yield "unaligned", "multiple", tensor(1, offset=gguf_tensors()[1]["offset"] + 4)
    yield "overlap", "overlap", tensor(3, offset=gguf_tensors()[2]["offset"] + 32)
    yield "same place", "overlap", tensor(1, offset=0)
    yield "past the end", "lies within", tensor(1, offset=1 << 20)
    yield "name twice", "twice", tensor(1, name="token_embd.weight")
    yield "name not UTF-8", "UTF-8", tensor(0, name=b"\xff\xfe")
    yield "unknown tensor", "unexpected", tensor(1, name="evil.weight")
    yield "misshapen", "misshapen", tensor(3, dims=[32, HEAD_DIM])
    yield "block twice", "", tensor(11, name="blk.00.attn_norm.weight")
    yield "one tensor fewer", "missing", lambda file: file.tensors.pop()
    yield "no tensors", "missing", lambda file: file.tensors.clear()
    yield "no keys", "architecture", lambda file: file.keys.clear()
    for value in ("", "evil", "a" * 5000):
        yield f"architecture {value[:9]!r}", "", put("general.architecture", STRING, text(value))
    yield "architecture a number", "architecture", put("general.architecture", U32, number(U32, 1))
    yield "key twice", "again", lambda file: file.keys.append(file.keys[1])
    yield "60,000 keys", "number of keys", lambda file: file.keys.extend((f"k{i}", (U8, b"\0")) for i in range(60_000))
    for key in ("llama.x", "tokenizer.x"):
        lists = [(f"{key}{i}", (LIST, struct.pack("<IQ", U8, 1 << 13) + b"\0" * (1 << 13))) for i in range(9)]
        yield f"long lists {key}", "beside its vocabulary", lambda file, lists=lists: file.keys.extend(lists)
    yield "empty key", "empty key", lambda file: file.keys.append(("", (U8, b"\0")))
    yield "key type", "known type", put("general.x", 13, b"\0" * 8)
    yield "nested list", "list of", put("general.x", LIST, struct.pack("<IQIQ", LIST, 1, U8, 0))
    yield "deep list", "list of", put("general.x", LIST, struct.pack("<IQ", LIST, 1) * 5000 + struct.pack("<IQ", U8, 0))
    for alignment in (0, 3, 33, (1 << 32) - 1):
        yield f"alignment {alignment}", "alignment", put("general.alignment", U32, number(U32, alignment))
    yield "alignment 2**31", "", put("general.alignment", U32, number(U32, 1 << 31))
    yield "alignment text", "alignment", put("general.alignment", STRING, text("32"))
    for value in (float("nan"), float("inf")):
        yield f"epsilon {value}", "finite", put("llama.attention.layer_norm_rms_epsilon", F32, number(F32, value))
    for value in (0, 3, 3000):
        yield f"block_count {value}", "", put("llama.block_count", U32, number(U32, value))
        yield f"head_count {value}", "", put("llama.attention.head_count", U32, number(U32, value))
        yield f"embedding_length {value}", "", put("llama.embedding_length", U32, number(U32, value))
    yield "head_count_kv 0", "", put("llama.attention.head_count_kv", U32, number(U32, 0))
    yield "head_count text", "", put("llama.attention.head_count", STRING, text("two"))
    yield "head_count list", "", put("llama.attention.head_count", LIST, struct.pack("<IQ2I", U32, 2, 2, 2))
    yield "block_count list", "", put("llama.block_count", LIST, struct.pack("<IQ2I", U32, 2, 2, 2))
    yield "block_count text", "", put("llama.block_count", STRING, text("2"))
    yield "no tokens", "tokenizer", put("tokenizer.ggml.tokens", LIST, strings([]))
    yield "tokens are numbers", "tokenizer", put("tokenizer.ggml.tokens", LIST, struct.pack("<IQ2I", U32, 2, 2, 2))
    yield "merges without a space", "tokenizer", put("tokenizer.ggml.merges", LIST, strings(["ab"]))
    yield "merges of unknown tokens", "tokenizer", put("tokenizer.ggml.merges", LIST, strings(["q \u00e9\u00e9"]))
    yield "more tokens than rows", "at most 64 tokens", put("tokenizer.ggml.tokens", LIST, strings([f"<{i}>" for i in range(65)]))
    yield "long tokens without merges", "at most 512 bytes", lambda file: _by_scores(file, ["a" * (i * 20 + 1) for i in range(64)])
    yield "tokenizer unknown", "tokenizer", put("tokenizer.ggml.model", STRING, text("evil"))
    yield "no tokenizer", "tokenizer", lambda file: file.__setattr__("keys", [k for k in file.keys if not k[0].startswith("tokenizer")])
    yield "stop token text", "", put("tokenizer.ggml.eos_token_id", STRING, text("two"))
    yield "factors not positive", "positive", factors
    yield "factors misshapen", "misshapen", lambda file: file.tensors[1].update(name="rope_freqs.weight")


def other_attention() -> Iterator[tuple[str, str, Callable[[Gguf], None]]]:
    """Likewise: rotations and masks that a config from the file does not have."""

    def says(**values: tuple[int, bytes]) -> Callable[[Gguf], None]:
        return lambda file: file.keys.extend((f"llama.{key.replace('__', '.')}", value) for key, value in values.items())

    for base in (0.0, -1.0):
        yield f"freq_base {base}", "positive", lambda file, base=base: file.put("llama.rope.freq_base", F32, number(F32, base))
    four = {"rope__scaling__factor": (F32, number(F32, 4.0))}
    yarn = {**four, "rope__scaling__type": (STRING, text("yarn"))}
    for named in ("longrope", "evil"):
        yield f"rotations {named}", "scaled as linear or yarn", says(**four, rope__scaling__type=(STRING, text(named)))
    for factor in (0.5, -4.0, math.inf, math.nan):
        yield f"factor {factor}", "rope.scaling.factor", says(rope__scaling__factor=(F32, number(F32, factor)))
    yield "a factor of text", "factor is at least 1", says(rope__scale_linear=(STRING, text("4")))
    yield "yarn of no tokens", "original_context_length is positive", says(**yarn, rope__scaling__original_context_length=(U32, number(U32, 0)))
    yield "linear attention factor", "attn_factor is 1", says(**four, rope__scaling__attn_factor=(F32, number(F32, 2.0)))
    for key, value in (("ext_factor", 0.5), ("attn_factor", 2.0), ("log_multiplier", 0.1)):
        yield f"yarn {key}", f"yarn_{key} is ", says(**yarn, **{f"rope__scaling__yarn_{key}": (F32, number(F32, value))})
    yield "yarn of base 1", "", lambda file: (says(**yarn)(file), file.put("llama.rope.freq_base", F32, number(F32, 1.0)))
    for slow, fast, length in ((32.0, 1.0, 4096), (1.0, 32.0, 6), (1e-9, 1e-9, 4096), (40.0, 32.0, 4096)):
        betas = {f"rope__scaling__yarn_beta_{key}": (F32, number(F32, value)) for key, value in (("slow", slow), ("fast", fast))}
        of_length = {"rope__scaling__original_context_length": (U32, number(U32, length))}
        yield f"yarn betas {slow} {fast} {length}", "yarn_beta_slow to", says(**yarn, **betas, **of_length)
    yield "yarn beta", "yarn_beta_fast is positive", says(**yarn, rope__scaling__yarn_beta_fast=(F32, number(F32, -1.0)))

    def both(file: Gguf) -> None:
        factors(file)
        says(**four)(file)

    yield "factors and a factor", "not both", both
    yield "attention both ways", "attention.causal", says(attention__causal=(7, b"\0"))


def hostile_gguf() -> Iterator[tuple[str, str, bytes]]:
    """Name, word of the reason, content."""
    for name, reason, change in (*changed_gguf(), *other_attention()):
        file = Gguf()
        change(file)
        yield name, reason, file.content()
    file = Gguf()
    whole = file.content()
    for at in sorted({*file.marks, *(mark - 1 for mark in file.marks), *(mark + 1 for mark in file.marks)}):
        if 0 <= at < len(whole):
            yield f"cut at {at}", "", whole[:at]
    yield "cut in the last tensor", "lies within", whole[:-4]
    yield "zeros", "GGUF", b"\0" * 4096
    yield "zeros after the magic", "version", b"GGUF" + b"\0" * 4096
    yield "text", "GGUF", b"not a model\n" * 100
