"""Whether a model's files hold the model that its config describes, seen before it is built.

The config's modules are made on the meta device, where they take no memory. So a config that asks
for more than its files hold is refused before anything is allocated.
"""

import math
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..launch import dtype_name
from .files import file_error, read_by_others, some

Shape = tuple[int, ...]

LARGEST = torch.finfo(torch.float32).max
MOST_COUNTED = 1 << 16  # heads, experts, labels
MOST_LAYERS = 1 << 12
MORE_PARAMETERS = 1 << 11  # than the files have tensors: so many may be missing and still be named
MOST_BUFFER_BYTES = 1 << 28  # tables of a rotation, masks
DRAWN_BY = {"temperature": (0, 100), "top_k": (0, (1 << 31) - 1), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100)}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LAYERS = re.compile(r"(\w+_)?(layers?|block_count)")
_EPSILON = re.compile(r"(\w+_)?(eps|epsilon)")


def check_counts(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelFileError for a count or a window that is none, a negative eps, a choice of
    experts that cannot be made, and a number that fp32 cannot hold.

    A config makes lists as long as its counts before anybody looks at them.
    """
    _check_choice(path, config)
    for name, value in config.items():
        least = 0 if config.get("use_sliding_window") is False else 1
        if name == "sliding_window" and value is not None and (type(value) is not int or value < least):
            raise file_error(path, "a model whose sliding_window is a number of tokens, or null", repr(value)[:80])
        if isinstance(value, float) and LARGEST < abs(value) < math.inf:
            raise file_error(path, f"a model whose {name} fits fp32", value)
        if isinstance(value, int | float) and value < 0 and _EPSILON.fullmatch(name.rpartition(".")[2]):  # NaN for every small row
            raise file_error(path, f"a model whose {name} is not negative", value)
        if isinstance(value, Mapping):
            check_counts(path, value)
        elif type(value) is int:
            layers = _LAYERS.fullmatch(name.rpartition(".")[2])  # of GGUF's llama.block_count
            most = MOST_LAYERS if layers else MOST_COUNTED if name.startswith("num_") else value
            if value > most or (layers and value < 0):
                raise file_error(path, f"a model whose {name} is at most {most} and not negative", value)


def _check_choice(path: Path, config: Mapping[str, Any]) -> None:
    """Of experts and groups of them: a router chooses at most as many as there are."""
    experts = next((config[name] for name in _EXPERTS if type(config.get(name)) is int), 0)
    chosen, groups, kept = (config.get(name) for name in ("num_experts_per_tok", "n_group", "topk_group"))
    if type(chosen) is int and (chosen < 0 or chosen > experts > 0):
        raise file_error(path, f"a model whose num_experts_per_tok is in 0..{experts}, its experts", chosen)
    if type(groups) is int and (groups < 1 or (experts > 0 and experts % groups)):
        raise file_error(path, f"a model whose n_group divides its {experts} experts", groups)
    if type(kept) is int and (kept < 0 or (type(groups) is int and kept > groups)):
        raise file_error(path, f"a model whose topk_group is in 0..{groups}, its n_group", kept)


def outline(path: Path, config: Any, dtype: torch.dtype, *, stored: int | None = None, trust_remote_code: bool = False) -> Any:
    """The model of a config on the meta device, its tied weights tied.

    path: what errors name. stored: tensors in the files; None for a config that is trusted.
    """
    from transformers import AutoModelForCausalLM

    budget = None if stored is None else 2 * stored + MORE_PARAMETERS
    with read_by_others(path, "a model that its config describes"), torch.device("meta"), _at_most(path, budget), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # their shapes are compared below, and named
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
        model.tie_weights()
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    if stored is not None and buffers > MOST_BUFFER_BYTES:
        raise file_error(path, f"a model with at most {MOST_BUFFER_BYTES} bytes of buffers", buffers)
    return model


@contextmanager
def _at_most(path: Path, budget: int | None) -> Iterator[None]:
    """Ends a model's making, in this thread, once it has more parameters than a budget."""
    if budget is None:
        yield
        return
    here, seen = threading.get_ident(), 0

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal seen
        seen += threading.get_ident() == here
        if seen > budget:
            raise file_error(path, f"a model of about as many weights as its files hold, so at most {budget}", "a config that asks for more")

    hook = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def refuse_other_weights(
    path: Path, model_type: str, missing: Iterable[str], unexpected: Iterable[str], misshapen: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Raises ModelFileError if there is a name in any of the three.

    misshapen: name, shape in the file, shape in the model.
    """
    parts = []
    for what, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected))):
        if names:
            parts.append(f"{what} {some(names)}")
    if found := sorted(f"{name} {list(was)} for {list(be)}" for name, was, be in misshapen):
        parts.append(f"misshapen {some(found)}")
    if parts:
        raise file_error(path, f"a complete {model_type} model", ", ".join(parts))


def check_finite_weights(path: Path, model: Any) -> None:
    """Raises ModelFileError for a NaN or an infinity, with which every answer would be one token.

    A float16 of a large bfloat16 is one; a base or a factor of 0 makes them of a rotation.
    """
    held = {name: tensor.detach() for name, tensor in model.state_dict().items() if tensor.is_floating_point() and not tensor.is_meta}
    sums = {name: tensor.sum(dtype=torch.float32) for name, tensor in held.items()}
    finite = torch.stack(list(sums.values())).isfinite().tolist() if sums else []
    if wrong := [name for name, fine in zip(sums, finite, strict=True) if not fine]:
        dtype = next(iter(model.parameters())).dtype
        raise file_error(path, f"a model whose weights are finite in {dtype_name(dtype)}", f"a NaN or an infinity in {some(wrong)}")
    turns = [name for name, buffer in model.named_buffers() if name.endswith("inv_freq") and not buffer.isfinite().all()]
    if turns:
        raise file_error(path, "a model whose config gives a rotation of finite angles", f"a NaN or an infinity in {some(turns)}")


def check_generation(path: Path, said: Mapping[str, Any]) -> None:
    """Raises ModelFileError unless what a model says of its texts can be taken: tokens that begin,
    end and pad them, and the numbers by which a server draws others.
    """
    for name, be in (("eos_token_id", "token, or a list of tokens,"), ("bos_token_id", "token"), ("pad_token_id", "token")):
        value = said.get(name)
        tokens = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if value is not None and not (tokens and all(type(token) is int and -1 <= token < 1 << 31 for token in tokens)):  # -1: none, as some say
            raise file_error(path, f"a model with the number of a {be} as {name}", repr(value)[:80])
    for name, (least, most) in DRAWN_BY.items():
        value = said.get(name)
        if value is not None and (type(value) not in ((int,) if name == "top_k" else (int, float)) or not least <= value <= most):
            raise file_error(path, f"a model with a number from {least:g} to {most:g} as {name} of texts", repr(value)[:80])


def make_buffers(model: Any, device: torch.device | str) -> None:
    """Real buffers for a model made on the meta device.

    Those of the rotation are computed from its config.
    """
    for path, module in list(model.named_modules()):
        if "inv_freq" in module._buffers:
            with torch.device(device):
                model.set_submodule(path, type(module)(model.config))
        else:
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=device)


def require_room(path: Path, model: Any, device: torch.device | str) -> None:
    """Raises MemoryError where a GPU has too little left for what of a model is not there yet."""
    where = torch.device(device)
    if where.type != "cuda":
        return
    coming = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "cuda"]
    needed = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in coming}.values())
    free, total = torch.cuda.mem_get_info(where)
    if needed > free:
        sizes = (f"{size / 2**30:.1f} GiB" for size in (needed, free, total))
        raise MemoryError(
            "{} needs {} on {}, where {} of {} are free: take a format of fewer bits (--weights)".format(path, next(sizes), where, *sizes)
        )
