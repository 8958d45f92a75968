"""How much memory a server's pages take."""

from pathlib import Path
from typing import Any

from ...launch import argument_error
from ..continuous_codes import KV_DTYPE, token_bytes

PAGE = 256  # tokens
CPU_SHARE = 0.1  # of the memory that is available at the start; on a GPU transformers takes what is free
CPU_BATCH_TOKENS = 128  # of a step on a CPU: nothing can interrupt one


def pages_on_cpu(model: Any, most_requests: int) -> int:
    """The pages that a share of the available memory holds, and no more than all requests can use.

    Raises ValueError: it does not hold one.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = head_dim * model.dtype.itemsize if model.__dict__.get(KV_DTYPE) is None else token_bytes(head_dim)
    page = 2 * config.num_hidden_layers * heads * each * PAGE
    fit = int(available_memory() * CPU_SHARE) // page
    if not fit:
        raise argument_error("memory for the cache", f"at least one page of {PAGE} tokens, {page / 1e9:.2f} GB", f"{fit} pages")
    return int(min(fit, most_requests * -(-context_tokens(model) // PAGE)))


def context_tokens(model: Any) -> int:
    """The longest sequence the model was made for."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31 - 1)


def available_memory() -> int:
    """Bytes that this process can still take: of the machine, and of its control group."""
    import psutil

    group = Path("/sys/fs/cgroup")
    free = int(psutil.virtual_memory().available)
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if most == "max" else min(free, max(0, int(most) - int(used)))
    except (OSError, ValueError):  # not Linux, or no control group
        return free
