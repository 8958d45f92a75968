"""Small files of models, sound ones and hostile ones that differ from them in one thing.

Each hostile file comes with a word of the reason for which it must be refused.
"""

import copy
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD_DIM = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
LAYER = {
    "attn_norm": ("input_layernorm", (32,)),
    "attn_q": ("self_attn.q_proj", (32, 32)),
    "attn_k": ("self_attn.k_proj", (HEAD_DIM, 32)),
    "attn_v": ("self_attn.v_proj", (HEAD_DIM, 32)),
    "attn_output": ("self_attn.o_proj", (32, 32)),
    "ffn_norm": ("post_attention_layernorm", (32,)),
    "ffn_gate": ("mlp.gate_proj", (48, 32)),
    "ffn_up": ("mlp.up_proj", (48, 32)),
    "ffn_down": ("mlp.down_proj", (32, 48)),
}
U8, U32, F32, STRING, LIST, U64 = 0, 4, 6, 8, 9, 10
LARGE = {"2**31": 1 << 31, "2**63": 1 << 63, "2**64-1": (1 << 64) - 1}  # the last is -1 to who reads it signed


# --------------------------------------------------------------------------------------------- GGUF
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
        self.marks = [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
        data = bytearray()
        for tensor in self.stored:
            data += b"\0" * (tensor["offset"] - len(data)) + tensor["values"]
            self.marks.append(-(-len(header) // 32) * 32 + len(data))
        return header + b"\0" * (-len(header) % 32) + bytes(data) + self.tail


def changed_gguf() -> Iterator[tuple[str, str, Callable[[Gguf], None]]]:
    """Name, word of the reason, and change."""

    def tensor(at: int, **values: Any) -> Callable[[Gguf], None]:
        return lambda file: file.tensors[at].update(values)

    def put(key: str, kind: int, value: bytes) -> Callable[[Gguf], None]:
        return lambda file: file.put(key, kind, value)

    def attribute(name: str, value: Any) -> Callable[[Gguf], None]:
        return lambda file: setattr(file, name, value)

    def factors(file: Gguf) -> None:
        last = file.tensors[-1]
        file.tail = b"\0" * 32
        file.tensors.append({"name": "rope_freqs.weight", "dims": [8], "kind": 0, "offset": last["offset"] + len(last["values"])})

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
    yield "tokenizer unknown", "tokenizer", put("tokenizer.ggml.model", STRING, text("evil"))
    yield "no tokenizer", "tokenizer", lambda file: file.__setattr__("keys", [k for k in file.keys if not k[0].startswith("tokenizer")])
    yield "stop token text", "", put("tokenizer.ggml.eos_token_id", STRING, text("two"))
    yield "factors not positive", "positive", factors
    yield "factors misshapen", "misshapen", lambda file: file.tensors[1].update(name="rope_freqs.weight")


def hostile_gguf() -> Iterator[tuple[str, str, bytes]]:
    """Name, word of the reason, content."""
    for name, reason, change in changed_gguf():
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


# -------------------------------------------------------------------------------------- safetensors
def weights() -> dict[str, torch.Tensor]:
    """Of a whole llama of CONFIG."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (64, 32), "model.norm": (32,)}
    shapes |= {f"model.layers.{i}.{part}": shape for i in range(2) for part, shape in LAYER.values()}
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def safetensors_header(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    return header


def safetensors_content(tensors: dict[str, torch.Tensor], header: Any = None, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header or safetensors_header(tensors)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + b"".join(t.numpy().tobytes() for t in tensors.values())


def hostile_safetensors() -> Iterator[tuple[str, str, bytes]]:
    """Name, word of the reason, content."""
    tensors = weights()
    sound = safetensors_header(tensors)
    first, second = list(sound)[:2]
    whole = safetensors_content(tensors)
    length = len(whole) - sum(t.nbytes for t in tensors.values()) - 8

    def changed(**values: Any) -> bytes:
        header = copy.deepcopy(sound)
        header[first].update(values)
        return safetensors_content(tensors, header)

    for name, value in LARGE.items():
        yield f"length {name}", "header", safetensors_content(tensors, length=value)
        yield f"size {name}", first, changed(shape=[value, 32])
        yield f"product {name}", first, changed(shape=[value] * 4)
        yield f"end {name}", "", changed(data_offsets=[0, value])
        yield f"begin {name}", "", changed(data_offsets=[value, value + 8192])
    for name, at in {"0": 0, "7": 7, "8": 8, "9": 9, "half a header": 8 + length // 2, "no data": 8 + length}.items():
        yield f"cut at {name}", "", whole[:at]
    at = 8 + length
    for tensor in tensors.values():
        at += tensor.nbytes
        yield f"cut before {at}", "bytes of data", whole[: at - 1]
    yield "length 0", "JSON", safetensors_content(tensors, length=0)
    yield "length past the end", "header", safetensors_content(tensors, length=len(whole))
    for name, text in {"no JSON": b"evil", "a list": b"[]", "null": b"null", "a number": b"1", "not UTF-8": b'{"\xff": 1}', "open": b"{"}.items():
        yield name, "JSON", safetensors_content(tensors, text)
    yield "deep", "", safetensors_content(tensors, b'{"a":' * 100_000)
    yield "deep lists", "", safetensors_content(tensors, b'{"a":' + b"[" * 100_000)
    yield "many digits", "JSON", safetensors_content(tensors, b'{"a":' + b"9" * 100_000 + b"}")
    yield "NaN", "JSON", safetensors_content(tensors, b'{"a": NaN}')
    yield "name twice", "twice", safetensors_content(tensors, json.dumps(sound).encode()[:-1] + f', "{first}": {json.dumps(sound[first])}}}'.encode())
    yield "trailing bytes", "bytes of data", whole + b"x"
    for dtype in ("evil", "", None, 1, ["F32"], "F64", "BF16"):
        yield f"dtype {dtype}", first, changed(dtype=dtype)
    for shape in (None, "64", [64.0, 32], [True, 2048], [-64, -32], [[64], 32], {"0": 64}, []):
        yield f"shape {shape}", first, changed(shape=shape)
    yield "size 0", first, changed(shape=[0, 32])
    for offsets in (None, [], [0], [0, 8192, 8192], [8192, 0], [-8192, 0], [0.0, 8192.0], "08", [0, 4096], [4, 8196]):
        yield f"offsets {offsets}", "", changed(data_offsets=offsets)
    yield "overlap", "overlaps", changed(data_offsets=sound[second]["data_offsets"], shape=[32])
    moved = {name: entry | {"data_offsets": [at + 32 * (name != first) for at in entry["data_offsets"]]} for name, entry in sound.items()}
    yield "a hole", "holes", safetensors_content(tensors, moved) + b"\0" * 32
    yield "entry a list", first, safetensors_content(tensors, sound | {first: [1, 2]})
    yield "entry null", first, safetensors_content(tensors, sound | {first: None})
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        yield f"without {name}", name, safetensors_content(rest)
        yield f"{name} renamed", name, safetensors_content({f"{key}.evil" if key == name else key: tensor for key, tensor in tensors.items()})
        yield f"{name} misshapen", name, safetensors_content(tensors | {name: torch.ones(3, 5)})
    yield "one weight", "missing", safetensors_content({"model.norm.weight": tensors["model.norm.weight"]})
    yield "no weights", "missing", safetensors_content({})
    yield "one too many", "evil", safetensors_content(tensors | {"evil": torch.ones(3)})
    yield "layer 2 of 2", "layers.2", safetensors_content(tensors | {"model.layers.2.input_layernorm.weight": torch.ones(32)})


# ------------------------------------------------------------------------------------------ folders
def write_folder(path: Path, config: Any = None, **changes: Any) -> Path:
    """A sound folder; `config`: another one, as text or object; changes: of keys of CONFIG."""
    path.mkdir(parents=True, exist_ok=True)
    content = config if isinstance(config, (str, bytes)) else json.dumps(CONFIG | changes if config is None else config)
    (path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    (path / "model.safetensors").write_bytes(safetensors_content(weights()))
    return path


def write_shards(path: Path, weight_map: Any = None) -> Path:
    """A folder of two files and their index; `weight_map`: another one."""
    write_folder(path)
    (path / "model.safetensors").unlink()
    tensors, places = weights(), {}
    for i, names in enumerate((list(tensors)[:10], list(tensors)[10:])):
        (path / f"part-{i}.safetensors").write_bytes(safetensors_content({name: tensors[name] for name in names}))
        places |= dict.fromkeys(names, f"part-{i}.safetensors")
    index = {"metadata": {}, "weight_map": places if weight_map is None else weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _with_a_file_outside(path: Path) -> None:
    outside = f"of-{path.name}.safetensors"
    write_shards(path, {name: "part-1.safetensors" if i >= 10 else f"../{outside}" for i, name in enumerate(weights())})
    (path / "part-0.safetensors").rename(path.parent / outside)


def hostile_configs() -> Iterator[tuple[str, str, str | bytes]]:
    """Name, word of the reason, content of config.json."""
    for name, text in {"empty": "", "a list": "[]", "null": "null", "a string": '"llama"', "a number": "1", "open": "{", "NUL": "\0" * 100}.items():
        yield name, "JSON", text
    yield "not UTF-8", "JSON", b'{"model_type": "\xff"}'
    yield "deep", "JSON", '{"a":' * 100_000
    yield "deep lists", "JSON", "[" * 100_000
    yield "many digits", "JSON", json.dumps(CONFIG)[:-1] + ', "hidden_size": ' + "9" * 100_000 + "}"
    yield "huge", "at most", json.dumps(CONFIG) + " " * (1 << 24)
    for value in ("x", [], {}, 1.5, -1):
        yield f"window {value}", "sliding_window", json.dumps(CONFIG | {"sliding_window": value})
    for value in (math.nan, math.inf, -math.inf):
        yield f"epsilon {value}", "finite", json.dumps(CONFIG | {"rms_norm_eps": value})
    yield "epsilon 1e999", "finite", json.dumps(CONFIG).replace("1e-05", "1e999")
    for kind in (None, 1, ["llama"], "", "evil", "../llama", "llama\n", {"a": 1}):
        yield f"model_type {kind!r}", "", json.dumps(CONFIG | {"model_type": kind})
    numbers = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    for key in numbers:
        for value in (0, -1, 1 << 31, 1 << 63, 1 << 100, 3, 1.5, 1e12, "2", [2], {"a": 2}):
            if (key, value) != ("num_key_value_heads", 1 << 100):
                yield f"{key} {value}", "", json.dumps(CONFIG | {key: value})
    for key in ("num_labels", "num_experts"):
        yield f"{key} 2**40", key, json.dumps(CONFIG | {key: 1 << 40})
    for value in (0, -2, 1 << 31, 1 << 62, "x", [1]):
        yield f"head_dim {value}", "", json.dumps(CONFIG | {"head_dim": value})
    for value in ("evil", 1, ["silu"], ""):
        yield f"hidden_act {value}", "", json.dumps(CONFIG | {"hidden_act": value})
    for value in (1, "evil", ["x"], {"rope_type": "evil"}, {"rope_type": "yarn", "factor": "x"}, {"rope_type": ["x"]}):
        yield f"rope_scaling {value}", "", json.dumps(CONFIG | {"rope_scaling": value})
    yield "eos_token_id", "eos_token_id", json.dumps(CONFIG | {"eos_token_id": "two"})
    yield "pad_token_id", "", json.dumps(CONFIG | {"pad_token_id": 1 << 40})
    yield "quantised list", "", json.dumps(CONFIG | {"quantization_config": [1]})
    yield "kernels", "kernels", json.dumps(CONFIG | {"attn_implementation": "evil/kernel"})
    yield "kernels inside", "kernels", json.dumps(CONFIG | {"_attn_implementation": "evil/kernel:run"})
    yield "other weights", "transformers_weights", json.dumps(CONFIG | {"transformers_weights": "../../x.safetensors"})
    yield "fusion", "fusion_config", json.dumps(CONFIG | {"fusion_config": {"a": True}})
    yield "dtype", "", json.dumps(CONFIG | {"dtype": "evil"})
    yield "untied without a head", "lm_head", json.dumps(CONFIG | {"tie_word_embeddings": False})


def hostile_folders() -> Iterator[tuple[str, str, Callable[[Path], Any]]]:
    """Name, word of the reason, and what makes a folder at a path."""

    def file(name: str, content: str) -> Callable[[Path], Any]:
        return lambda path: (write_folder(path) / name).write_text(content)

    def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def build(path: Path) -> None:
            place = write_folder(path) / name
            place.unlink(missing_ok=True)
            make(place)

        return build

    for name in ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        yield f"{name} a FIFO", name, replaced(name, os.mkfifo)
        yield f"{name} a device", name, replaced(name, lambda place: place.symlink_to("/dev/zero"))
        if not name.endswith(".jinja"):
            yield f"{name} a folder", "", replaced(name, Path.mkdir)
            yield f"{name} a link to itself", "", replaced(name, lambda place: place.symlink_to(place.name))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        for content in ("", "[]", "{", "[" * 100_000, '{"a": NaN}'):
            reason = "tokenizer" if name == "tokenizer.json" else name
            yield f"{name} {content[:9]!r}", reason, file(name, content)
    yield "tokenizer.json {}", "tokenizer", file("tokenizer.json", "{}")
    yield (
        "tokenizer without vocabulary",
        "tokenizer",
        file("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": 1, "merges": []}}'),
    )
    yield "tokenizer_config alone", "tokenizer", file("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}')
    yield "tokenizer.model", "tokenizer", file("tokenizer.model", "evil")
    yield "stop tokens", "eos_token_id", file("generation_config.json", '{"eos_token_id": {"a": 1}}')
    yield (
        "a huge tokenizer",
        "at most",
        lambda path: os.truncate(write_folder(path) / "model.safetensors", 8) or (path / "tokenizer.json").open("wb").truncate(1 << 30),
    )
    yield "an adapter", "adapter", file("adapter_config.json", '{"base_model_name_or_path": "/"}')
    yield "a distributed checkpoint", "shards", lambda path: (write_folder(path) / "shard-00000-model-00000-of-00001.safetensors").write_bytes(b"")
    yield "no weights", "neither", lambda path: (write_folder(path) / "model.safetensors").unlink()
    yield "weights of pickle", "neither", lambda path: (write_folder(path) / "model.safetensors").rename(path / "pytorch_model.bin")
    names = list(weights())
    maps: dict[str, Any] = {
        name: dict.fromkeys(names, name)
        for name in ("../../etc/passwd", "/etc/passwd", "../part-0.safetensors", "missing.safetensors", "", ".", "..")
    }
    maps |= {
        "itself": dict.fromkeys(names, "model.safetensors.index.json"),
        "a list": [],
        "empty": {},
        "numbers": dict.fromkeys(names, 1),
        "null": None,
    }
    maps |= {
        "fewer": dict.fromkeys(names[:10], "part-0.safetensors"),
        "swapped": dict.fromkeys(names, "part-0.safetensors"),
        "text": "x",
        "\\": {"a": "..\\a.safetensors"},
    }
    for name, weight_map in maps.items():
        if name != "null":
            yield f"index {name}", "", lambda path, weight_map=weight_map: write_shards(path, weight_map)
    yield "a file outside", "own folder", _with_a_file_outside
    yield "a weight in two files", "only file", lambda path: (write_shards(path) / "part-0.safetensors").write_bytes(safetensors_content(weights()))
    yield (
        "a file of the index is a FIFO",
        "part-0",
        lambda path: ((write_shards(path) / "part-0.safetensors").unlink(), os.mkfifo(path / "part-0.safetensors")),
    )
    yield "index cut", "JSON", lambda path: (write_shards(path) / "model.safetensors.index.json").write_text('{"weight_map": {')
