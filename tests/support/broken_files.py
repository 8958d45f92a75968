"""Sound files of small models, broken at random: each must be refused in one line, or load with the
weights that the formats' own readers find.

python tests/support/broken_files.py --seed 3 --seconds 60     # prints each case that does neither
"""

import argparse
import copy
import inspect
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import hostile
import hostile_gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from other_quantisers import CONFIGS, write_as
from safetensors.torch import load_file
from tiny_models import tiny
from transformers import GenerationConfig, GptOssConfig, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tilewright.models import ModelFileError, load
from tilewright.models.generate import encode, generate
from tilewright.models.gguf_file import halves_from_pairs, parameter_name
from tilewright.models.quantized import quantize
from tilewright.models.quantized_folder import save_quantized

SECONDS, BYTES = 20, 4 << 30  # of one case: an alarm, and address space beyond what imports took
MORE = ["padding_side", "truncation_side", "model_input_names", "extra_special_tokens", "split_special_tokens", "add_bos_token", "legacy"]
NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 127, 255, 1 << 15, (1 << 16) - 1, 1 << 20, *(n + k for n in (1 << 31, 1 << 32, 1 << 63) for k in (-1, 0, 1)))
VALUES: tuple[Any, ...] = (None, True, False, "", "x", "\0", "2", "a" * 5000, "../../x", [], {}, [None], [1, [2]], {"a": {"b": 1}}, 0.5, 1e300, -0.0)
HUGE = (-1, -(1 << 63), 1 << 40, 1 << 200)

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": i, "content": f"<{i}>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i in range(3)
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {**{f"<{i}>": i for i in range(3)}, **{chr(94 + i): i for i in range(3, 63)}, "ab": 63},
        "merges": [["a", "b"]],
    },
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<1>",
    "eos_token": "<2>",
    "pad_token": "<0>",
    "model_max_length": 64,
    "clean_up_tokenization_spaces": False,
    "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "added_tokens_decoder": {"1": {"content": "<1>", "special": True}},
}
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 64}


# ------------------------------------------------------------------------------------- sound files
def _quantised_gguf() -> bytes:
    """Rows of 256, so that every kind of blocks fits; the parts of a block are random, its scales
    small.
    """
    sizes, file = dict(zip(("Q4_0", "Q8_0", "Q4_K", "Q6_K"), ((2, 18), (8, 34), (12, 144), (14, 210)), strict=True)), hostile_gguf.Gguf()
    generator, at = np.random.default_rng(0), 0
    for key, value in (("llama.embedding_length", 256), ("llama.feed_forward_length", 256)):
        file.put(key, hostile_gguf.U32, hostile_gguf.number(hostile_gguf.U32, value))
    for i, tensor in enumerate(file.tensors):
        name = tensor["name"]
        rows = {"token_embd.weight": 64}.get(name, 128 if "attn_k" in name or "attn_v" in name else 256)
        if "norm" in name:
            tensor |= {"dims": [256], "values": np.ones(256, np.float32).tobytes()}
        else:
            kind, size = list(sizes.values())[i % 4]
            per = 8 if kind < 12 else 1
            blocks = generator.integers(0, 256, (rows * per, size), dtype=np.uint8)
            scales = {2: (0,), 8: (0,), 12: (0, 2), 14: (208,)}[kind]
            for place in scales:
                blocks[:, place : place + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            tensor |= {"dims": [256, rows], "kind": kind, "values": blocks.tobytes()}
        tensor["offset"] = at
        at += -(-len(tensor["values"]) // 32) * 32
    file.stored = file.tensors
    return file.content()


def _folder(path: Path, make: Callable[[Path], Any]) -> dict[str, bytes]:
    make(path)
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def _with_words(path: Path) -> None:
    hostile.write_folder(path)
    for name, content in (("tokenizer.json", TOKENIZER), ("tokenizer_config.json", TOKENIZER_CONFIG), ("generation_config.json", GENERATION)):
        (path / name).write_text(json.dumps(content))


def _others_folder(method: str) -> Callable[[Path], Any]:
    return lambda path: write_as(method, path, _model("llama"))


def _model(family: str, **sizes: Any) -> Any:
    return tiny(family, torch.bfloat16, **{"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1, **sizes})


def _small(weights: str, family: str = "llama", **sizes: Any) -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        model = _model(family, **sizes)
        quantize(model, weights)
        save_quantized(model, None, weights, path)

    return make


@cache
def sound() -> dict[str, tuple[dict[str, bytes], dict[str, Any]]]:
    """Files by name, and options of `load`."""
    small = {"dtype": torch.bfloat16}
    with tempfile.TemporaryDirectory() as home:
        folders = {
            "folder": (_with_words, {}),
            "shards": (hostile.write_shards, {}),
            **{name: (_small(name), small) for name in ("int4-64-zeros", "int8", "e4m3-128", "nvfp4", "mxfp4")},
            **{name: (_others_folder(name), small) for name in CONFIGS},
            "experts": (_small("mxfp4", "gpt_oss", hidden_size=64, intermediate_size=32), small),
        }
        found = {name: (_folder(Path(home) / name, make), options) for name, (make, options) in folders.items()}
    return {"gguf": ({"x.gguf": hostile_gguf.Gguf().content()}, {}), "blocks": ({"x.gguf": _quantised_gguf()}, small | {"weights": "gguf"}), **found}


# --------------------------------------------------------------------------------------- the damage
def _bytes(draw: random.Random, content: bytes, header: int) -> bytes:
    """Some bytes cut, flipped, swapped, moved, put in or replaced by a number at an edge."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        end = max(1, min(header if draw.random() < 0.8 else len(changed), len(changed)))
        at, other, size = draw.randrange(end), draw.randrange(end), draw.choice((1, 2, 4, 8, 16, 32, 100))
        kind = draw.randrange(8)
        if kind == 0:
            del changed[at:]
        elif kind == 1 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            one, two = bytes(changed[at : at + size]), bytes(changed[other : other + size])
            if len(one) == len(two):
                changed[at : at + size], changed[other : other + size] = two, one
        elif kind == 3:
            changed[at : at + size] = changed[other : other + size]
        elif kind == 4:
            del changed[at : at + size]
        elif kind == 5:
            changed[at:at] = draw.randbytes(size)
        else:
            form = draw.choice(("<B", "<H", "<I", "<Q"))
            width = struct.calcsize(form)
            value = draw.choice((*NUMBERS, len(content), len(content) - at)) % (1 << 8 * width)
            at -= at % draw.choice((1, 4, 8))
            changed[at : at + width] = struct.pack(form, value)
    return bytes(changed)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in JSON, and each key of it."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _json(draw: random.Random, content: bytes, known: Sequence[str] = ()) -> bytes:
    """Some values replaced, removed, renamed, or put where others are; or one that is known, and
    was not there.
    """
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        if known and draw.random() < 0.4:
            value[draw.choice(known)] = copy.deepcopy(draw.choice((*VALUES, *NUMBERS, *HUGE)))
            continue
        (owner, key), (other, place), kind = draw.choice(places), draw.choice(places), draw.randrange(8)
        if kind == 0:
            del owner[key]
        elif kind == 1:
            owner[key] = json.loads(json.dumps(other[place]))
        elif kind == 2 and isinstance(owner, dict):
            owner[draw.choice((key + "x", "", key[::-1], "auto_map", "__metadata__"))] = owner.pop(key)
        elif kind == 3 and type(owner[key]) in (int, float):
            owner[key] = draw.choice((-owner[key], owner[key] + 1, owner[key] * 2, str(owner[key]), [owner[key]]))
        else:
            owner[key] = copy.deepcopy(draw.choice((*VALUES, *NUMBERS, *HUGE)))
    return json.dumps(value).encode()


@cache
def known(name: str) -> list[str]:
    """What transformers looks for in a file of this name."""
    if name == "generation_config.json":
        return sorted(GenerationConfig().to_dict())
    if name == "config.json":
        return sorted({*LlamaConfig().to_dict(), *GptOssConfig().to_dict(), "rope_scaling", "torch_dtype"})
    if name == "tokenizer_config.json":
        return sorted({*PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES, *inspect.getfullargspec(PreTrainedTokenizerBase.__init__).args[1:], *MORE})
    return []


def broken(draw: random.Random, name: str, content: bytes) -> bytes:
    """A file of this name with some damage."""
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(content[:8], "little")
        if draw.random() < 0.5:
            header = _json(draw, content[8:end])
            return struct.pack("<Q", len(header)) + header + content[end:]
        return _bytes(draw, content, end)
    if name.endswith(".json") and draw.random() < 0.8:
        return _json(draw, content, known(name))
    return _bytes(draw, content, 3000 if name.endswith(".gguf") else len(content))


# ---------------------------------------------------------------------------------------- the check
def _too_long(*_: object) -> None:
    raise TimeoutError(f"{SECONDS} s")


@contextmanager
def limited() -> Iterator[None]:
    """Ends a hang, and an allocation far beyond what the files hold."""
    old, space = signal.signal(signal.SIGALRM, _too_long), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + BYTES, space[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, space)


def _others(source: Path) -> dict[str, torch.Tensor]:
    """The weights as the formats' own readers find them."""
    if source.suffix != ".gguf":
        return {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found, heads = {}, {}
    reader = GGUFReader(source)
    for side, key in (("q", "head_count"), ("k", "head_count_kv")):
        heads[side] = int(reader.fields[f"llama.attention.{key}"].contents())
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type)).copy()).view(*map(int, tensor.shape[::-1]))
        name = parameter_name(tensor.name)
        for side in heads:
            if f"{side}_proj" in name:
                values = halves_from_pairs(values, heads[side])
        found[name] = values
    return found


def outcome(source: Path, options: dict[str, Any]) -> str:
    """ "refused" or "loaded"; else what is wrong."""
    try:
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loaded = load(source, **options)
            except ModelFileError as error:
                wrong = "\n" in str(error) or len(str(error)) > 1500 or str(source) not in str(error)
                return f"error {error}" if wrong else "refused"
            state, theirs = loaded.model.state_dict(), _others(source)
            for name in state.keys() & theirs.keys():
                if not torch.equal(state[name], theirs[name].to(state[name].dtype)):
                    return f"other values in {name}"
            if not options:
                try:
                    ids = encode(loaded, "\3\4" if loaded.tokenizer is None else "ab")
                    generate(loaded, ids, max_new_tokens=2)
                except ValueError as error:
                    return f"two lines {error}" if "\n" in str(error) else "refused"
            return "loaded"
    except (Exception, MemoryError) as error:  # this is what is looked for
        return (
            "".join(traceback.format_exception_only(error)).strip()[:300]
            + " | "
            + "; ".join(f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-6:])
        )


def cases(seed: int, home: Path) -> Iterator[tuple[int, str, Path, dict[str, Any], Callable[[], None]]]:
    """Number, name, what to load, and what writes it."""
    number = 0
    while True:
        draw = random.Random(f"{seed}.{number}")
        case = draw.choice(sorted(sound()))
        files, options = sound()[case]
        name = draw.choice(sorted(files))
        home.mkdir(exist_ok=True)
        for file, content in files.items():
            (home / file).write_bytes(broken(draw, file, content) if file == name else content)
        yield number, f"{case}/{name}", home / "x.gguf" if "x.gguf" in files else home, options
        shutil.rmtree(home)
        number += 1


def run(seed: int, *, seconds: float = 1e9, most: int = 1 << 60, first: int = 0) -> tuple[dict[str, int], list[str]]:
    """How many cases ended how, and those that ended wrong."""
    counts, wrong, began = {"refused": 0, "loaded": 0}, [], time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        for number, name, source, options in cases(seed, Path(home) / "case"):
            if number >= most or time.monotonic() - began > seconds:
                break
            if number < first:
                continue
            found = outcome(source, options)
            if found in counts:
                counts[found] += 1
            else:
                wrong.append(f"--seed {seed} --case {number} ({name}): {found}")
                print(wrong[-1], flush=True)
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--case", type=int)
    given = parser.parse_args()
    how: dict[str, Any] = {"seconds": given.seconds} if given.case is None else {"first": given.case, "most": given.case + 1}
    counts, wrong = run(given.seed, **how)
    print(counts, len(wrong), "wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
