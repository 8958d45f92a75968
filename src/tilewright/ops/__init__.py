"""What is computed: one module per op, each with the same names (docs/writing-an-op.md)."""

from importlib import import_module
from types import ModuleType

from ..launch import check_name

ALL = tuple(
    import_module(f"{__name__}.{name}")
    for name in (
        "rms_norm",
        "rope",
        "silu_mul",
        "softmax",
        "matmul",
        "quantized_matmul",
        "mx_matmul",
        "rms_norm_matmul",
        "bmm",
        "grouped_gemm",
        "attention",
        "mla",
        "attention_decode",
        "kv_append",
        "merge_states",
        "mla_decode",
        "sparse_index",
        "sparse_decode",
        "dropout",
        "layer_norm",
        "embedding",
        "argmax",
        "quantize_fp8",
        "quantize_mx",
        "rms_norm_quant",
        "silu_mul_quant",
        "adjust_logits",
        "sample",
        "moe_route",
        "rms_norm_route",
        "moe",
        "quantized_moe",
        "gated_delta_rule",
        "ssd",
        "causal_conv1d",
        "rms_norm_gated",
    )
)


def named(names: list[str] | None) -> list[ModuleType]:
    """The op modules of these names, all of them for None or an empty list.

    Raises ValueError naming the known ones.
    """
    known = {op.__name__.rpartition(".")[2]: op for op in ALL}
    for name in names or ():
        check_name("op", known, name)
    return [known[name] for name in names] if names else list(ALL)
