"""How far a model's logits move with weights of each format, beside a reference quantiser of the
same format: the one of the gguf package, of compressed-tensors, of torch's observers, or torch's
own scaling. GGUF's kinds that we keep small are read from the same blocks, here and by the gguf
package.

    pip install --no-deps compressed-tensors loguru    # the reference of nvfp4
    python benchmarks/quality.py [MODEL] [--text FILE] [--json out.jsonl]

MODEL is a folder of a transformers model or a GGUF file; by default the SmolLM2-135M-Instruct of
`make demo`, whose Q4_1 weights, widened to bf16, are then the model that all formats are measured
against. Linear weights whose rows the format fits are rounded, here and there, and widened again;
the model runs in fp32, so that only the weights differ. The head keeps its 16 bits, but in the rows
of formats with "head=". KL(bf16 || rounded) is the mean over the tokens of a text. Nothing is
calibrated. Exits with 1 if one of ours is more than 2 % above its reference.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize as gguf_wide, quantize as gguf_small
from torch import Tensor
from torch.ao.quantization import PerChannelMinMaxObserver

from tilewright.bench.report import tell
from tilewright.launch import Device
from tilewright.models import demo_gguf, load
from tilewright.models.gguf_tensors import KEPT, from_gguf
from tilewright.models.quantized import KEPT_WIDE
from tilewright.ops.common.weight_formats import E4M3, FORMATS, INT4, INT8, QuantizedWeight, WeightFormat, format_named

ALLOWED = 1.02
# Of the other matrices, "" for 16 bits, and of the head.
HEADS = {"head=int8": ("", "int8"), "head=e4m3": ("", "e4m3"), "int4-32,head=int8": ("int4-32", "int8")}
README = Path(__file__).resolve().parent.parent / "README.md"
Rounding = Callable[[Tensor], Tensor]


def linears(model: Any) -> list[torch.nn.Linear]:
    """Those that `tilewright quantize` rounds."""
    return [m for path, m in model.named_modules() if type(m) is torch.nn.Linear and path.rpartition(".")[2] not in KEPT_WIDE]


def ours(of: WeightFormat) -> Rounding:
    return lambda weight: QuantizedWeight.of(weight, of.name).dequantize(torch.float32)


def reference(of: WeightFormat) -> tuple[str, Rounding] | None:
    """Who rounds a weight [n, k] to this format too, and how; None if nobody here does."""
    if of.name == "mxfp4":
        return "gguf MXFP4", _gguf("MXFP4")
    if of.name == "int4-32":
        return "gguf Q4_0", _gguf("Q4_0")
    if of.code in (INT4, INT8):
        return "torch min-max observer", _observed(of)
    if of.code == E4M3:
        return "torch e4m3 of the largest", _scaled(of)
    return ("compressed-tensors", _nvfp4) if find_spec("compressed_tensors") else None


def blocks(weight: Tensor, kind: str) -> np.ndarray:
    """A weight [n, k] as the bytes of a GGUF file. The gguf package does not write Q4_K and Q6_K:
    these are rounded to nearest, as its own kinds are.
    """
    if kind not in ("Q4_K", "Q6_K"):
        return gguf_small(weight.float().cpu().numpy().astype(np.float32), gguf.GGMLQuantizationType[kind])
    super_blocks = weight.float().cpu().unflatten(1, (-1, 256))

    def half(d: Tensor) -> tuple[Tensor, Tensor]:
        d = d[..., None].half()
        return d.view(torch.uint8), torch.where(d == 0, 1.0, d.float())

    if kind == "Q4_K":
        x = super_blocks.unflatten(2, (8, 32))
        least = -x.amin(3).clamp(max=0)
        step = (x.amax(3) + least) / 15
        (d_bytes, d), (e_bytes, e) = half(step.amax(2) / 63), half(least.amax(2) / 63)
        s, m = (step / d).round().clamp(0, 63), (least / e).round().clamp(0, 63)
        q = ((x + (e * m)[..., None]) / (d * s).clamp(min=1e-20)[..., None]).round().clamp(0, 15).to(torch.uint8)
        s, m, q = s.to(torch.uint8), m.to(torch.uint8), q.unflatten(2, (4, 2))
        six = (s[..., :4] | s[..., 4:] >> 4 << 6, m[..., :4] | m[..., 4:] >> 4 << 6, s[..., 4:] & 15 | (m[..., 4:] & 15) << 4)
        parts = (d_bytes, e_bytes, *six, (q[..., 0, :] | q[..., 1, :] << 4).flatten(2))
    else:
        x = super_blocks.unflatten(2, (16, 16))
        step = x.abs().amax(3) / 31
        d_bytes, d = half(step.amax(2) / 127)
        s = (step / d).round().clamp(0, 127)
        q = ((x / (d * s).clamp(min=1e-20)[..., None]).round().clamp(-32, 31) + 32).to(torch.uint8).flatten(2).unflatten(2, (2, 4, 32))
        low = torch.stack((q[..., 0, :] & 15 | (q[..., 2, :] & 15) << 4, q[..., 1, :] & 15 | (q[..., 3, :] & 15) << 4), 3)
        high = q[..., 0, :] >> 4 | q[..., 1, :] >> 4 << 2 | q[..., 2, :] >> 4 << 4 | q[..., 3, :] >> 4 << 6
        parts = (low.flatten(2), high.flatten(2), s.to(torch.uint8), d_bytes)
    return torch.cat(parts, 2).flatten(1).numpy()


def _gguf(kind: str) -> Rounding:
    def rounded(weight: Tensor) -> Tensor:
        return torch.from_numpy(gguf_wide(blocks(weight, kind), gguf.GGMLQuantizationType[kind])).to(weight.device)

    return rounded


def _kept(kind: str) -> Rounding:
    """As a model of `load(..., weights="gguf")` has it."""
    return lambda weight: from_gguf(torch.from_numpy(blocks(weight, kind)), kind).dequantize(torch.float32).to(weight.device)


def _observed(of: WeightFormat) -> Rounding:
    scheme = torch.per_channel_affine if of.zeros else torch.per_channel_symmetric
    low, high = (0, (1 << of.bits) - 1) if of.zeros else (-(1 << of.bits - 1), (1 << of.bits - 1) - 1)

    def rounded(weight: Tensor) -> Tensor:
        groups = weight.float().reshape(-1, of.group or weight.shape[1])
        observer = PerChannelMinMaxObserver(0, torch.quint8 if of.zeros else torch.qint8, scheme, quant_min=low, quant_max=high)
        observer(groups.cpu())
        scale, zero = observer.calculate_qparams()
        found = torch.fake_quantize_per_channel_affine(groups, scale.to(groups.device), zero.to(groups.device).int(), 0, low, high)
        return found.view(weight.shape)

    return rounded


def _scaled(of: WeightFormat) -> Rounding:
    """Scales as torch._scaled_mm takes them: a row, or 128 x 128."""

    def rounded(weight: Tensor) -> Tensor:
        n, k = weight.shape
        high, wide = (of.blocks, of.group) if of.group else (1, k)
        padded = torch.nn.functional.pad(weight.float(), (0, -k % wide, 0, -n % high))
        tiles = padded.view(padded.shape[0] // high, high, -1, wide)
        scale = (tiles.abs().amax((1, 3), keepdim=True) / 448.0).clamp(min=2.0**-100)
        return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).view_as(padded)[:n, :k]

    return rounded


def _nvfp4(weight: Tensor) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    low, high = torch.aminmax(weight.float().unflatten(1, (-1, 16)), dim=2)
    whole = generate_gparam(low.amin().view(1), high.amax().view(1))
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    return fake_quantize(weight.float(), scale, zero, args, global_scale=whole)


def divergence(model: Any, wide: Tensor, ids: Tensor, rounding: Rounding | None, multiple: int = 1, of_head: Rounding | None = None) -> float:
    """KL of a model's tokens from log-probabilities `wide`, with its Linear weights rounded, those
    whose rows have a multiple of so many, and its head, no longer tied to the embedding.
    """
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for module in (module for module in linears(rounded) if rounding and module.in_features % multiple == 0):
            module.weight.copy_(rounding(module.weight.to(torch.bfloat16)))
        if of_head:
            rounded.lm_head.weight = torch.nn.Parameter(of_head(rounded.lm_head.weight.to(torch.bfloat16)))
        found = rounded(ids).logits.log_softmax(-1)
    return float((wide.exp() * (wide - found)).sum(-1).mean())


def compare(model: Any, ids: Tensor) -> Iterator[dict[str, Any]]:
    """A row for each format that fits some matrices of the model and that has a reference here.

    share: of the weights in Linear modules, how many those matrices hold. difference: of a kind of
        GGUF, root mean square from the file's values, over that of the weights.
    """
    model = copy.deepcopy(model).float()
    with torch.no_grad():
        wide = model(ids).logits.log_softmax(-1)
    tried = {of.name: (of.multiple, of, ours(of), reference(of)) for of in FORMATS.values()}
    for kind in KEPT:
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        tried[f"gguf {kind}"] = block, None, _kept(kind), ("gguf's own values", _gguf(kind))
    for name, (multiple, of, mine, found) in tried.items():
        fit = [module.weight.detach() for module in linears(model) if module.in_features % multiple == 0]
        if found is None or not fit:
            continue
        who, theirs = found
        kl, reference_kl = (divergence(model, wide, ids, rounding, multiple) for rounding in (mine, theirs))
        kept = of or format_named(from_gguf(torch.from_numpy(blocks(fit[0][:1], name[5:])), name[5:]).weight_format)
        share = sum(w.numel() for w in fit) / sum(module.weight.numel() for module in linears(model))
        bits = 8 * kept.size_bytes(64, 8192) / (64 * 8192)
        row = {"format": name, "kept_as": kept.name, "bits": round(bits, 2), "share": round(share, 3), "kl": kl, "reference": who}
        if of is None:
            row["difference"] = float((mine(fit[0]) - theirs(fit[0])).norm() / theirs(fit[0]).norm())
        yield row | {"reference_kl": reference_kl, "ratio": kl / reference_kl}
    yield from heads(model, wide, ids)


def heads(model: Any, wide: Tensor, ids: Tensor) -> Iterator[dict[str, Any]]:
    """Rows of formats that round the head too, or only it. share: of the other Linear modules."""
    for name, (others, head) in HEADS.items():
        who, *of_head = _both(FORMATS[head])
        _, *of_others = _both(FORMATS[others]) if others else ("", None, None)
        multiple = FORMATS[others].multiple if others else 1
        kl, reference_kl = (divergence(model, wide, ids, *both) for both in zip(of_others, (multiple, multiple), of_head, strict=True))
        bits = 8 * FORMATS[others or head].size_bytes(64, 8192) / (64 * 8192)
        row = {"format": name, "kept_as": name, "bits": round(bits, 2), "share": float(bool(others)), "kl": kl, "reference": who}
        yield row | {"reference_kl": reference_kl, "ratio": kl / reference_kl}


def _both(of: WeightFormat) -> tuple[str, Rounding, Rounding]:
    """The name of a format's reference, which it has; our rounding, and that one's."""
    found = reference(of)
    assert found is not None
    return found[0], ours(of), found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder of a transformers model or a GGUF file; by default the demo's")
    parser.add_argument("--text", type=Path, default=README)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also append the rows here")
    given = parser.parse_args()
    path = given.model or demo_gguf()
    loaded = load(path, device=torch.device(given.device), dtype=torch.bfloat16)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer(given.text.read_text(), return_tensors="pt").input_ids[:, : given.tokens].to(given.device)
    where = {"op": "quality", "gpu": "CPU" if given.device == "cpu" else Device.of(ids).name}
    lost = 0
    for row in compare(loaded.model, ids):
        tell({**where, "case": f"{Path(path).stem} tokens={ids.shape[1]} format={row['format']}", **row}, given.json)
        lost += row["ratio"] > ALLOWED
    return int(lost > 0)


if __name__ == "__main__":
    raise SystemExit(main())
