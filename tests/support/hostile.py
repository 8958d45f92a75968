"""Small files of models, sound ones and hostile ones that differ from them in one thing.

GGUF files are in hostile_gguf.py.

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
LARGE = {"2**31": 1 << 31, "2**63": 1 << 63, "2**64-1": (1 << 64) - 1}  # the last is -1 to who reads it signed


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
    names = ", ".join(f'"{i}": 0' for i in (*range(20_000), 19_999))
    yield "the last of many names twice", "twice", safetensors_content(tensors, f"{{{names}}}".encode())
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


def hostile_windows() -> Iterator[tuple[str, str, str]]:
    """Likewise."""
    for value in ("x", [], {}, 1.5, -1, 0):
        yield f"window {value}", "sliding_window", json.dumps(CONFIG | {"sliding_window": value})
    for kind, key in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
        layers = {"layer_types": [kind] * CONFIG["num_hidden_layers"]}
        for given in ({}, {key: None}, {key: 0}):
            yield f"{kind} {given}", key, json.dumps(CONFIG | layers | given)


def hostile_choices() -> Iterator[tuple[str, str, str]]:
    """Likewise: experts, groups and numbers that loaded, and then raised inside of transformers."""
    for key, values in {"num_experts_per_tok": (-1, 9), "n_group": (0, -1, 3, 1 << 63), "topk_group": (-1, 5)}.items():
        for value in values:
            yield f"{key} {value}", key, json.dumps(CONFIG | {"n_routed_experts": 8, "n_group": 4} | {key: value})
    yield "a large limit", "fp32", json.dumps(CONFIG | {"swiglu_limit": 1e300})


def hostile_configs() -> Iterator[tuple[str, str, str | bytes]]:
    """Name, word of the reason, content of config.json."""
    for name, text in {"empty": "", "a list": "[]", "null": "null", "a string": '"llama"', "a number": "1", "open": "{", "NUL": "\0" * 100}.items():
        yield name, "JSON", text
    yield "not UTF-8", "JSON", b'{"model_type": "\xff"}'
    yield "deep", "JSON", '{"a":' * 100_000
    yield "deep lists", "JSON", "[" * 100_000
    yield "many digits", "JSON", json.dumps(CONFIG)[:-1] + ', "hidden_size": ' + "9" * 100_000 + "}"
    yield "huge", "at most", json.dumps(CONFIG) + " " * (1 << 24)
    yield from hostile_windows()
    yield from hostile_choices()
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
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):  # 65 MB of holes

        def huge(path: Path, name: str = name) -> None:
            with (write_folder(path) / name).open("wb") as made:
                made.truncate((1 << 26) + 1)

        yield f"a huge {name}", "67108864 bytes", huge
    yield "an adapter", "adapter", file("adapter_config.json", '{"base_model_name_or_path": "/"}')
    yield "a distributed checkpoint", "shards", lambda path: (write_folder(path) / "shard-00000-model-00000-of-00001.safetensors").write_bytes(b"")
    yield "no weights", "neither", lambda path: (write_folder(path) / "model.safetensors").unlink()
    yield "weights of pickle", "neither", lambda path: (write_folder(path) / "model.safetensors").rename(path / "pytorch_model.bin")
    names = list(weights())
    maps: dict[str, Any] = {
        name: dict.fromkeys(names, name)
        for name in ("../../etc/passwd", "/etc/passwd", "../part-0.safetensors", "missing.safetensors", "\n\x1b[2J.safetensors", "", ".", "..")
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
        "a weight under two names",
        "two, with and without 'model.', of ['norm.weight']",
        lambda path: (write_folder(path) / "model.safetensors").write_bytes(safetensors_content({**weights(), "norm.weight": torch.ones(32)})),
    )
    yield (
        "a file of the index is not there",
        "part-0.safetensors must be a file, for model.safetensors.index.json names it, got none",
        lambda path: (write_shards(path) / "part-0.safetensors").unlink(),
    )
    yield (
        "a file of the index is a FIFO",
        "part-0",
        lambda path: ((write_shards(path) / "part-0.safetensors").unlink(), os.mkfifo(path / "part-0.safetensors")),
    )
    yield "index cut", "JSON", lambda path: (write_shards(path) / "model.safetensors.index.json").write_text('{"weight_map": {')
