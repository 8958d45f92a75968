"""Folders whose weights have 4 or 8 bits: read as they are, and written.

Which modules are coded is what the files hold; `quantization_config` says by which method. What we
write is compressed-tensors, which others read too.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error, check_tensor
from ..ops.common.expert_weights import QuantizedExperts
from ..ops.common.weight_formats import E4M3, FORMATS, INT4, INT8, QuantizedWeight, WeightFormat, unpack
from .files import file_error, read_by_others, read_json, some
from .quantized import KNOWN_EXPERTS, OnProgress, QuantizedLinear, QuantizedMixture, check_dtype, experts_of, gpt_oss_biases, weight_bytes
from .quantized_tensors import from_awq, from_compressed_tensors, from_fp8, from_gptq, from_int8, from_mxfp4, from_nvfp4
from .safetensors_header import LONGEST_INDEX, StoredTensor
from .whole import make_buffers, outline, refuse_other_weights

Found = tuple[QuantizedWeight, Tensor | None]  # a weight and the order of its k
Tensors = Mapping[str, Tensor]
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
_CODES = ("qweight", "weight_packed")  # a module with one of them is coded, or one whose weight has 8 bits
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)")
_PARTS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}
_RENAMED = {".block_sparse_moe.": ".mlp."}  # of Mixtral's files
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_global_scale")  # ours have 16 bits
_LEAVES = {"qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"}
_LEAVES |= {"weight_global_scale", "weight_shape", "weight_g_idx", "bias", *_OF_ACTIVATIONS}


def check_method(path: Path, said: Any) -> None:
    """Raises ModelFileError for a quantization_config of a method that we lack."""
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method not in METHODS:
        raise file_error(path, f"a config whose quantization_config has one of {', '.join(METHODS)} as quant_method", repr(method or said)[:80])
    bits = said.get("bits", said.get("w_bit", 4))
    if method in ("gptq", "awq") and bits != 4:
        raise file_error(path, f"a {method} model of 4 bits", f"one of {bits!r:.20}")
    if method == "gptq" and said.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        raise file_error(path, "a GPTQ model with checkpoint_format gptq or gptq_v2", repr(said.get("checkpoint_format"))[:40])
    if said.get("transform_config"):
        raise file_error(path, "a model whose activations are not rotated as it runs", "one with transform_config")
    if method == "awq" and said.get("version", "gemm") != "gemm":
        raise file_error(path, "an AWQ model of version gemm", repr(said.get("version"))[:40])
    if method == "fp8" and said.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):  # e4m3fnuz's codes mean half as much
        raise file_error(path, "an fp8 model with fmt e4m3", repr(said.get("fmt"))[:40])
    block = said.get("weight_block_size")
    if method == "fp8" and block not in (None, [128, 128]):
        raise file_error(path, "an fp8 model with weight_block_size [128, 128], or one scale a row", repr(block)[:40])


def load_quantized(
    folder: Path, config: Any, dtype: torch.dtype, stored: dict[str, StoredTensor], *, device: torch.device | str, on_progress: OnProgress | None
) -> Any:
    """The model of a checked folder, its codes packed anew on `device`, in eval mode.

    Raises: ModelFileError; ValueError for another dtype than bfloat16.
    """
    check_dtype(dtype)
    said = config.quantization_config
    said = said if isinstance(said, Mapping) else said.to_dict()
    check_method(folder / "config.json", said)
    del config.quantization_config  # what becomes of the model is no longer coded by others
    model = outline(folder, config, dtype, stored=len(stored))
    with read_by_others(folder / "config.json", "a config that transformers takes"):
        make_buffers(model, "cpu")
    coded, mixtures, plain = _sorted(folder, model, stored)
    with _opened(folder) as read:

        def found(path: str, leaves: list[str]) -> Found:
            return _weight(folder, said, path, {leaf: read(f"{path}.{leaf}").to(device) for leaf in leaves})

        for done, (path, leaves) in enumerate(coded.items()):
            weight, order = found(path, leaves)
            old: Any = model.get_submodule(path)
            _check_shape(folder, path, weight, (old.out_features, old.in_features))
            bias = read(f"{path}.bias").to(device, dtype) if "bias" in leaves else None
            _check_bias(folder, config.model_type, path, bias, old)
            model.set_submodule(path, QuantizedLinear(weight, None if old.bias is None else bias, order))
            if on_progress is not None:
                on_progress(done + 1, len(coded) + len(mixtures))
        for done, (path, parts) in enumerate(mixtures.items()):
            old = model.get_submodule(path)
            act: dict[str, Any] = {}
            if type(old).__name__ == "GptOssExperts":
                names = tuple(f"{path}.{name}_proj_bias" for name in ("gate_up", "down"))
                refuse_other_weights(folder, config.model_type, set(names) - stored.keys(), (), ())
                biases = tuple(read(name).to(device, dtype) for name in names)
                shapes = old.gate_up_proj_bias.shape, old.down_proj_bias.shape
                wrong = [(name, b.shape, shape) for name, b, shape in zip(names, biases, shapes, strict=True) if b.shape != shape]
                refuse_other_weights(folder, config.model_type, (), (), wrong)
                act = {"biases": gpt_oss_biases(*biases), "alpha": old.alpha, "limit": old.limit, "up_offset": 1.0}
            model.set_submodule(path, QuantizedMixture(*_experts(folder, path, old, parts, found, lambda name: read(name).to(device)), **act))
            if on_progress is not None:
                on_progress(len(coded) + done + 1, len(coded) + len(mixtures))
        state = model.state_dict()
        tensors = {_renamed(name): read(name) for name in plain}
        plain = set(tensors)
        misshapen = [(n, tuple(t.shape), tuple(state[n].shape)) for n, t in tensors.items() if n in state and t.shape != state[n].shape]
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {}) if config.tie_word_embeddings else {}
        if any(_apart(name, other, coded, tensors) for name, other in tied.items()):
            model.config.tie_word_embeddings, tied = False, {}  # what the files hold counts, as in transformers
        missing = {name for name, tensor in state.items() if tensor.is_meta} - plain - tied.keys()
        refuse_other_weights(folder, config.model_type, missing, plain - state.keys(), misshapen)
        floats = {name: tensor.to(state[name].dtype) for name, tensor in tensors.items()}
        model.load_state_dict(floats, strict=False, assign=True)
    if tied:
        model.tie_weights()
    return model.eval()


def _apart(name: str, other: str, coded: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether files hold another weight than the one that a config ties it to."""
    if name.rpartition(".")[0] in coded:
        return True
    return name in tensors and other in tensors and not torch.equal(tensors[name], tensors[other])


def _check_shape(folder: Path, path: str, weight: QuantizedWeight, shape: tuple[int, int]) -> None:
    if (weight.n, weight.k) != shape:
        raise file_error(folder, f"a model whose {path} is {shape}", (weight.n, weight.k))


def _check_bias(folder: Path, model_type: str, path: str, bias: Tensor | None, old: nn.Linear) -> None:
    """A bias that the model lacks may be there if it is zero, as GPTQ writes one of each module."""
    name = f"{path}.bias"
    missing, unexpected = old.bias is not None and bias is None, old.bias is None and bias is not None and bool(bias.any())
    misshapen = [(name, bias.shape, old.bias.shape)] if bias is not None and old.bias is not None and bias.shape != old.bias.shape else ()
    refuse_other_weights(folder, model_type, [name] if missing else (), [name] if unexpected else (), misshapen)


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name


def _experts(
    folder: Path, path: str, old: Any, parts: dict[str, list[str]], found: Callable[[str, list[str]], Found], read: Callable[[str], Tensor]
) -> tuple[QuantizedExperts, QuantizedExperts]:
    """Gate and up, and down, of a module's experts: of gpt-oss's blocks, or of each expert's own
    matrices.
    """
    (count, _, inter, hidden) = experts_of(old)[0].shape
    with read_by_others(folder, f"a folder with all experts of {path}"):
        each = _of_blocks(path, read) if not all(map(_EXPERT.fullmatch, parts)) else _of_matrices(parts, found)
        if each.keys() != set(range(count)) or not all(len(three) == len(_PARTS) // 2 for three in each.values()):
            raise argument_error("experts", f"{count}, each with gate, up and down", some(sorted(each)))
        for three in each.values():
            for part, weight in three.items():
                _check_shape(folder, f"matrix {part} of an expert in {path}", weight, (hidden, inter) if part == 2 else (inter, hidden))
        both, one = ([[each[i][part] for part in which] for i in range(count)] for which in ((0, 1), (2,)))
        return QuantizedExperts.stacked(both), QuantizedExperts.stacked(one)


def _of_blocks(path: str, read: Callable[[str], Tensor]) -> dict[int, dict[int, QuantizedWeight]]:
    """By expert and part (0, 1, 2 of gate, up, down)."""
    gate_up, down = (zip(*(read(f"{path}.{name}_proj_{kind}") for kind in ("blocks", "scales")), strict=True) for name in ("gate_up", "down"))
    pairs = enumerate(zip(gate_up, down, strict=True))
    return {i: {0: from_mxfp4(b[0::2], s[0::2]), 1: from_mxfp4(b[1::2], s[1::2]), 2: from_mxfp4(*one)} for i, ((b, s), one) in pairs}


def _of_matrices(parts: dict[str, list[str]], found: Callable[[str, list[str]], Found]) -> dict[int, dict[int, QuantizedWeight]]:
    """Likewise."""
    each: dict[int, dict[int, QuantizedWeight]] = {}
    for stem, leaves in parts.items():
        expert = _EXPERT.fullmatch(stem)
        assert expert is not None
        weight, order = found(stem, leaves)
        if order is not None or _PARTS[expert[3]] in each.setdefault(int(expert[2]), {}):
            raise argument_error(stem, "given once, without act-order", "act-order" if order is not None else "a second time")
        each[int(expert[2])][_PARTS[expert[3]]] = weight
    return each


def _sorted(
    folder: Path, model: nn.Module, stored: dict[str, StoredTensor]
) -> tuple[dict[str, list[str]], dict[str, dict[str, list[str]]], set[str]]:
    """The leaves of each coded module, of mixtures by their experts, and the names of all other
    tensors.
    """
    mixtures: dict[str, dict[str, list[str]]] = {}
    stems: dict[str, list[str]] = {}
    for name in stored:
        stem, _, leaf = name.rpartition(".")
        stems.setdefault(stem, []).append(leaf)
    if nowhere := stems.pop("", ()):
        raise file_error(folder, "a model whose tensors are named as module.tensor", some(nowhere))
    modules, coded, plain = dict(model.named_modules()), dict[str, list[str]](), set[str]()
    for stem, leaves in stems.items():
        if (
            any(leaf in leaves for leaf in _CODES)
            or any(leaf.endswith("_blocks") for leaf in leaves)
            or ("weight" in leaves and not stored[f"{stem}.weight"].plain)
        ):
            coded[stem] = leaves
        else:
            plain |= {f"{stem}.{leaf}" for leaf in leaves}
    for stem in list(coded):
        expert = _EXPERT.fullmatch(stem)
        path = _renamed(expert[1] if expert else stem)
        if type(modules.get(path)).__name__ in KNOWN_EXPERTS:
            mixtures.setdefault(path, {})[stem] = [leaf for leaf in coded.pop(stem) if not leaf.endswith("_bias")]
    if strangers := sorted(stem for stem in coded if not isinstance(modules.get(stem), nn.Linear)):
        raise file_error(folder, "a model of which only Linear modules and experts are coded", some(strangers))
    each = {**coded, **{stem: leaves for parts in mixtures.values() for stem, leaves in parts.items() if _EXPERT.fullmatch(stem)}}
    if strangers := sorted(f"{stem}.{leaf}" for stem, leaves in each.items() for leaf in leaves if leaf not in _LEAVES):
        raise file_error(folder, "a model whose coded modules have the tensors of their method", some(strangers))
    biases = {f"{path}.{name}_proj_bias" for path in mixtures for name in ("gate_up", "down")}
    return coded, mixtures, plain - biases


def _weight(folder: Path, said: Mapping[str, Any], path: str, tensors: Tensors) -> Found:
    """Of one module, by its method or by what it has."""
    with read_by_others(folder, f"a folder with a weight of {said['quant_method']} in {path}"):
        try:
            if said["quant_method"] not in ("gptq", "awq"):
                return _compressed(tensors), None
            words, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
            if said["quant_method"] == "gptq":
                found = from_gptq(words, zeros, scales, tensors.get("g_idx"), zeros_off_by_one=said.get("checkpoint_format", "gptq") == "gptq")
            else:
                found = from_awq(words, zeros, scales), None
            _check_groups(said, len(scales), found[0].k, "g_idx" in tensors)
            return found
        except KeyError as error:
            raise file_error(folder, f"a model whose {path} has {error}", sorted(tensors)) from None


def _check_groups(said: Mapping[str, Any], groups: int, k: int, indexed: bool) -> None:
    """Raises ValueError where the config and the files of GPTQ or AWQ speak of other groups."""
    size = said.get("group_size", said.get("q_group_size"))
    if size is not None and not (type(size) is int and groups * (k if size == -1 else size) == k):
        raise argument_error("group_size", f"{k // groups}, as the files have it", size)
    if said.get("desc_act") and groups > 1 and not indexed:
        raise argument_error("g_idx", "there, because desc_act is True", None)


def _compressed(tensors: Tensors) -> QuantizedWeight:
    scale = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
    if "weight_packed" not in tensors:
        weight = tensors["weight"]
        return from_int8(weight, scale) if weight.dtype is torch.int8 else from_fp8(weight, scale)
    packed = tensors["weight_packed"]
    if packed.dtype is torch.uint8:
        if "weight_global_scale" in tensors:
            return from_nvfp4(packed, scale, 1 / tensors["weight_global_scale"].float())
        return from_mxfp4(packed.unflatten(1, (-1, 16)), scale)
    check_tensor(packed, "weight_packed", ndim=2)
    k = 8 * packed.shape[1]
    if "weight_g_idx" in tensors and not torch.equal(tensors["weight_g_idx"].long().cpu(), torch.arange(k) // (k // scale.shape[1])):
        raise argument_error("weight_g_idx", "equal groups in order (GPTQ's own format takes others)", "act-order")
    if "weight_shape" in tensors and (said := tensors["weight_shape"].tolist()) != [len(packed), k]:
        raise argument_error("weight_shape", f"{[len(packed), k]} for a weight_packed of 4 bits, int32 {tuple(packed.shape)}", f"{said!r:.80}")
    return from_compressed_tensors(packed, scale, tensors.get("weight_zero_point"))


@contextmanager
def _opened(folder: Path) -> Iterator[Callable[[str], Tensor]]:
    """Reads a tensor of a folder's files by name."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    single = (folder / "model.safetensors").exists()
    files = ["model.safetensors"] if single else sorted(set(read_json(index, LONGEST_INDEX)["weight_map"].values()))
    with ExitStack() as stack:
        places: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(folder / file, framework="pt"))
            places |= dict.fromkeys(handle.keys(), handle)
        yield lambda name: places[name].get_tensor(name)


# ------------------------------------------------------------------------------------------ writing
def save_quantized(model: Any, tokenizer: Any | None, weight_format: str, folder: Path) -> int:
    """Writes a model that `quantize` changed. Returns the bytes of its weights.

    Raises: ValueError for a folder that is not empty; OSError for one that cannot be written.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    check_output(folder)
    coded = {path: module for path, module in model.named_modules() if isinstance(module, (QuantizedLinear, QuantizedMixture))}
    of = FORMATS[weight_format]
    state = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in coded}
    if model.config.tie_word_embeddings:
        state = {name: tensor for name, tensor in state.items() if name not in getattr(model, "all_tied_weights_keys", {})}
    for path, module in coded.items():
        weights = {path: module.quantized} if isinstance(module, QuantizedLinear) else _each_expert(path, module)
        for stem, weight in weights.items():
            state |= {f"{stem}.{leaf}": tensor.clone(memory_format=torch.contiguous_format) for leaf, tensor in _stored(weight, of).items()}
        if isinstance(module, QuantizedMixture) and module.bias_gate_up is not None and module.bias_down is not None:
            in_turn = module.bias_gate_up.transpose(1, 2).flatten(1)
            state |= {f"{path}.gate_up_proj_bias": in_turn, f"{path}.down_proj_bias": module.bias_down}
        elif isinstance(module, QuantizedLinear) and module.bias is not None:
            state[f"{path}.bias"] = module.bias
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_torch_state_dict({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written: {error}") from None
    model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    wide = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": _config(of, wide)}
    # Last, since without it nothing loads what a full disk or Ctrl-C has left.
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return weight_bytes(model)


def _each_expert(path: str, module: QuantizedMixture) -> dict[str, QuantizedWeight]:
    found: dict[str, QuantizedWeight] = {}
    for i in range(len(module.gate_up.words)):
        found |= {f"{path}.{i}.{name}": module.gate_up.part(i, part) for part, name in enumerate(("gate_proj", "up_proj"))}
        found[f"{path}.{i}.down_proj"] = module.down.part(i, 0)
    return found


def check_output(folder: Path) -> None:
    """Raises ValueError for a folder that is not empty, or could not be written in the end."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise argument_error("the output folder", "new or empty", folder)
    home = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not home.is_dir() or not os.access(home, os.W_OK):
        raise argument_error("the output folder", "one that can be written", folder)


def _stored(weight: QuantizedWeight, of: WeightFormat) -> dict[str, Tensor]:
    """A weight's tensors as compressed-tensors names and lays them."""
    codes, scales = unpack(weight.words, of, weight.n, weight.k), weight.scales.T
    if of.group:
        scales = scales[:, : weight.k // of.group]
    if of.code in (INT8, E4M3):
        stored = (codes - 128).to(torch.int8) if of.code == INT8 else codes.to(torch.uint8).view(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scales[:: of.blocks] if of.blocks > 1 else scales}
    if of.code == INT4:
        found = {"weight_packed": _packed(codes, 8), "weight_scale": scales, "weight_shape": torch.tensor([weight.n, weight.k])}
        if weight.zeros is not None:
            zeros = weight.zeros.T[:, : weight.k // of.group].to(torch.int32)
            found["weight_zero_point"] = _packed(torch.nn.functional.pad(zeros, (0, 0, 0, -weight.n % 8)).T, 8).T
        return found
    found = {"weight_packed": _packed(codes, 2).to(torch.uint8), "weight_scale": scales}
    if weight.factor is not None:
        found = {**found, "weight_scale": scales.to(torch.float8_e4m3fn), "weight_global_scale": 1 / weight.factor}
    return found


def _packed(codes: Tensor, each: int) -> Tensor:
    """int32: neighbours along the last axis in one number, the first in its lowest bits."""
    shifts = torch.arange(0, 4 * each, 4, dtype=torch.int32, device=codes.device)
    parts: tuple[Tensor, ...] = (codes.to(torch.int32).unflatten(1, (-1, each)) << shifts).unbind(2)
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found


def _config(of: WeightFormat, wide: list[str]) -> dict[str, Any]:
    """The quantization_config of compressed-tensors. wide: modules that are not coded."""
    four = of.bits == 4
    kind = "int" if of.code in (INT4, INT8) else "float"
    layout = {INT4: "pack-quantized", INT8: "int-quantized", E4M3: "float-quantized"}.get(of.code)
    layout = layout or ("nvfp4-pack-quantized" if of.factor else "mxfp4-pack-quantized")
    strategy = "tensor_group" if of.factor else "block" if of.blocks > 1 else "group" if of.group else "channel"
    weights: dict[str, Any] = {"num_bits": 4 if four else 8, "type": kind, "symmetric": not of.zeros, "strategy": strategy, "dynamic": False}
    weights |= {"block_structure": [of.blocks, of.group]} if of.blocks > 1 else {"group_size": of.group} if of.group else {}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return {**said, "ignore": wide, "config_groups": {"group_0": group}}
