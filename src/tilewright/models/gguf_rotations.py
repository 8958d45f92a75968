"""What a GGUF file says of rotations and masks, which transformers does not read.

The keys are llama.cpp's: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import file_error

_BETAS = "yarn_beta_fast", "yarn_beta_slow"
_FIXED = {"yarn_ext_factor": 1, "yarn_attn_factor": 1, "yarn_log_multiplier": 0, "alpha": 0}  # others mean another rotation


def scaled_rotations(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What to add to `rope_parameters` of a config; empty for rotations that are not scaled.

    A file that names no kind of scaling has a linear one, of `rope.scale_linear` in old files; a
    factor of 0 is none.
    Raises: ModelFileError where no config can say what the file says.
    """
    kind = metadata["general.architecture"]
    base, causal = metadata.get(f"{kind}.rope.freq_base", 10000.0), metadata.get(f"{kind}.attention.causal", True)
    prefix = f"{kind}.rope.scaling."
    said = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    named, factor = said.get("type", "linear"), said.get("factor", metadata.get(f"{kind}.rope.scale_linear", 0.0))
    length: Any = said.get("original_context_length", metadata.get(f"{kind}.context_length"))
    if not _positive(base):
        raise file_error(path, f"a GGUF file with a positive {kind}.rope.freq_base", base)
    if causal is not True:
        raise file_error(path, f"a GGUF file with {kind}.attention.causal true", causal)
    if named == "none" or (named in ("linear", "yarn") and factor in (0, 1)):
        return {}
    if named not in ("linear", "yarn"):
        raise file_error(path, "a GGUF file whose rotations are scaled as linear or yarn, or by rope_freqs.weight", named)
    attention, betas = said.get("attn_factor", 1.0), {key: said[key] for key in _BETAS if key in said}
    for key, value in {"factor": factor, "attn_factor": attention, "original_context_length": length, **betas}.items():
        if not _positive(value) or (key == "factor" and value < 1):
            raise file_error(path, f"a GGUF file whose {prefix}{key} is {'at least 1' if key == 'factor' else 'positive'}", value)
    for key, value in (_FIXED | ({"attn_factor": 1} if named == "linear" else {})).items():
        if said.get(key, value) != value:
            raise file_error(path, f"a GGUF file whose {prefix}{key} is {value}, or left out", said[key])
    if named == "linear":
        return {"rope_type": "linear", "factor": factor}
    slow, fast, turns = betas.get("yarn_beta_slow", 1.0), betas.get("yarn_beta_fast", 32.0), length / (2 * math.pi)
    if not (slow <= fast and slow <= turns <= fast * base * base):  # llama.cpp and transformers differ on a ramp that ends before it begins
        be = f"a GGUF file whose rotations turn yarn_beta_slow to yarn_beta_fast times in the tokens of {prefix}original_context_length"
        raise file_error(path, be, f"{slow} to {fast} times in {length}")
    more = {"attention_factor": attention * (1.0 + 0.1 * math.log(factor)), **{key.removeprefix("yarn_"): value for key, value in betas.items()}}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, **more}


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value is not True and 0 < value < math.inf
