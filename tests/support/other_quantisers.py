"""Folders of a tiny model as GPTQ (with act-order), AWQ and DeepSeek write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tilewright.models.quantized import QuantizedLinear, quantize
from tilewright.ops.common.weight_formats import FORMATS, unpack


def words_of(codes: torch.Tensor, axis: int) -> torch.Tensor:
    """Eight codes to an int32 along an axis, the lowest first."""
    found = codes.unflatten(axis, (-1, 8)).long()
    shifts = torch.arange(0, 32, 4).view((8, 1) if axis == 0 else (8,))
    return (found << shifts).sum(axis + 1).to(torch.int32)


def gptq(module: QuantizedLinear, order: torch.Tensor) -> dict[str, torch.Tensor]:
    """What GPTQ writes of a weight whose k it read in another order."""
    of = FORMATS[module.weight_format]
    codes = unpack(module.words, of, module.out_features, module.in_features)
    back = torch.argsort(order)
    zeros = words_of(module.zeros.int() - 1 & 15, 1)
    groups = (torch.arange(module.in_features) // of.group)[back].int()
    return {"qweight": words_of(codes[:, back].T, 0), "qzeros": zeros, "scales": module.scales, "g_idx": groups}


def awq(module: QuantizedLinear, order: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = unpack(module.words, FORMATS[module.weight_format], module.out_features, module.in_features)
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    qweight, qzeros = (words_of(x.unflatten(1, (-1, 8))[..., places].flatten(1), 1) for x in (codes.T, module.zeros.int()))
    return {"qweight": qweight, "qzeros": qzeros, "scales": module.scales}


def fp8(module: QuantizedLinear, order: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = unpack(module.words, FORMATS[module.weight_format], module.out_features, module.in_features)
    return {"weight": codes.to(torch.uint8).view(torch.float8_e4m3fn), "weight_scale_inv": module.scales.T[::128].clone()}


CONFIGS: dict[str, Any] = {
    "gptq": (gptq, "int4-64-zeros", {"bits": 4, "group_size": 64, "desc_act": True}),
    "awq": (awq, "int4-128-zeros", {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
    "fp8": (fp8, "e4m3-128", {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
}


def write(folder: Path, model: Any, said: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def write_as(method: str, folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """Writes the model as `method` does. Returns what its weights are now, by module."""
    tensors_of, name, said = CONFIGS[method]
    quantize(model, name)
    linears = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key.rpartition(".")[0] not in linears}
    expected = {}
    for path, module in linears.items():
        torch.manual_seed(len(expected))
        order = torch.randperm(module.in_features) if said.get("desc_act") else torch.arange(module.in_features)
        tensors |= {f"{path}.{leaf}": tensor for leaf, tensor in tensors_of(module, order).items()}
        expected[path] = module.wide[:, torch.argsort(order)]
    write(folder, model, {"quant_method": method, **said}, tensors)
    return expected
