"""Which problems the fuzz draws: for each op what a kernel is compiled for, and what it is not.

`DRAWS[op]` holds two functions of a source of sizes. The first returns the fields of a Problem that
several cases share, so that they share compiled kernels; the second returns those of one case.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..ops.common.mx import MX_FORMATS
from ..ops.common.scaling import Scaling
from ..ops.common.weight_formats import FORMATS
from .sizes import BF16, E4M3, E5M2, FP16, FP32, Sizes

Fields = dict[str, Any]
Draw = tuple[Callable[[Sizes], Fields], Callable[[Sizes, Fields], Fields]]
BLOCKS = ((None, None), (1, None), (1, 128), (128, 128))


def some(s: Sizes, *names: str) -> Fields:
    """Each of these options in half of the draws."""
    return {name: s.odds(0.5) for name in names}


def half(s: Sizes) -> torch.dtype:
    return s.choice((BF16, BF16, FP16))


def any_float(s: Sizes) -> torch.dtype:
    return s.choice((BF16, BF16, FP16, FP32))


def columns(s: Sizes, most: int = 2500) -> int:
    """A tenth of one column, a third of a power of two or near one."""
    near = (1 << s.randrange(12)) + s.choice((-1, 0, 0, 1))
    return 1 if s.odds(0.05) else max(1, min(most, near if s.odds(0.3) else s.log(2, most)))


def small_weight(s: Sizes) -> Fields:
    of = s.choice(list(FORMATS.values()))
    norm = {"norm": True, **some(s, "residual"), "weight_offset": s.choice((0.0, 1.0))}
    before = s.choice(({}, {}, norm, {"gated": True, **some(s, "gelu_tanh")}))
    return {"weight_format": of.name, "n": s.log(1, 200), "k": of.multiple * s.log(1, 600 // of.multiple), **some(s, "bias"), **before}


def block_scaled(s: Sizes, name: str, most: int) -> Fields:
    """A format, and a length of rows by this name."""
    of = s.choice(list(MX_FORMATS.values()))
    return {"mx_format": of.name, name: of.group * s.log(1, most // of.group), "dtype": any_float(s)}


def block_codes(s: Sizes) -> Fields:
    found = block_scaled(s, "cols", 2500)
    return {**found, "factor": found["mx_format"] == "nvfp4" and s.odds(0.5)}


def small_experts(s: Sizes) -> Fields:
    of = s.choice([of for of in FORMATS.values() if not of.factor])
    sizes = {name: of.multiple * s.log(1, 300 // of.multiple) for name in ("hidden", "inter")}
    act = {"alpha": s.choice((1.0, 1.702)), "limit": s.choice((0.0, 2.0)), "up_offset": s.choice((0.0, 1.0))}
    return {"weight_format": of.name, **sizes, **act, "top_k": s.choice((1, 2)), "experts": s.choice((2, 4)), **some(s, "bias")}


def rows(s: Sizes, _: Fields) -> Fields:
    return {"rows": s.log(1, 200)}


def row_wise(*options: str, **more: Callable[[Sizes], Any]) -> Draw:
    def fixed(s: Sizes) -> Fields:
        return {"cols": columns(s), "dtype": any_float(s), **some(s, *options), **{name: draw(s) for name, draw in more.items()}}

    return fixed, rows


def product(s: Sizes) -> Fields:
    dtype = s.choice((BF16, BF16, FP16, E4M3, E5M2))
    eight = dtype in (E4M3, E5M2)
    scaling = s.choice(tuple(Scaling)[1:]) if eight else Scaling.NONE
    out = s.choice((BF16, FP16, FP32)) if eight else s.choice((dtype, dtype, FP32))
    return {"dtype": dtype, "scaling": scaling, "out_dtype": out}


def matmul(s: Sizes) -> Fields:
    found = {**product(s), **some(s, "trans_a", "trans_b", "bias", "residual", "silu_mul", "out_scale")}
    if s.odds(0.2):
        found |= {"dtype": FP32, "scaling": Scaling.NONE, "out_dtype": FP32, "tf32": s.odds(0.5)}
    if s.odds(0.5):
        found |= {"residual": False, "silu_mul": False, "out_scale": False}
    return found


def matrix(s: Sizes, fixed: Fields) -> Fields:
    n = s.log(1, 300)
    return {"m": s.log(1, 300), "n": n + n % 2 if fixed.get("silu_mul") else n, "k": s.log(1, 400)}


def heads(s: Sizes, widest: int = 128) -> Fields:
    kv = s.choice((1, 1, 2, 3))
    return {"q_heads": kv * s.choice((1, 1, 2, 3, 4, 8)), "kv_heads": kv, "head_dim": s.choice((16, 32, 64, 64, 80, 96, 128, s.log(2, widest)))}


def attention(s: Sizes) -> Fields:
    eight = s.odds(0.2)
    found = {**heads(s, 128 if eight else 256), "dtype": E4M3 if eight else any_float(s), **some(s, "causal", "return_lse", "has_sinks")}
    found["window"] = s.log(1, 200) if s.odds(0.3) else None
    found["softcap"] = s.choice((5.0, 30.0)) if s.odds(0.3) else None
    found["ahead"] = s.log(1, 100) if found.get("causal") and s.odds(0.2) else 0
    found["v_dim"] = s.choice((0, 0, 32, 100))
    kind = s.choice(("", "", "has_start", "has_len", "varlen"))
    found["keys_last"] = eight and kind != "varlen" and s.odds(0.5)
    return {**found, **({kind: True} if kind else {})}


def attended(s: Sizes, fixed: Fields) -> Fields:
    found = {"batch": s.log(1, 4), "q_len": s.log(1, 200), "kv_len": s.log(1, 200)}
    return {**found, "longest": s.choice((0, 16, 200))} if fixed.get("varlen") else found


def latent(s: Sizes) -> Fields:
    eight = s.odds(0.3)
    found = {"heads": s.log(1, 4), "dtype": E4M3 if eight else half(s), **some(s, "causal", "has_len", "return_lse")}
    found |= {"nope_dim": s.choice((128, 128, 64, s.log(1, 128))), "rope_dim": s.choice((16, 64, s.log(1, 128)))}
    return {**found, "v_dim": s.choice((128, 128, 32, 100)), "keys_last": eight and s.odds(0.5)}


def decode(s: Sizes) -> Fields:
    found = {**heads(s), "dtype": any_float(s), **some(s, "has_start", "has_len", "return_lse", "sinks")}
    found |= {"page_size": s.choice((0, 0, 16, 64)), "window": s.log(1, 200) if s.odds(0.3) else None, "q_len": s.choice((1, 1, 2, 4))}
    found["max_len"] = s.choice((64, 256, 512))
    kind = s.choice(("", "", "shared", "normalize", "v_dim"))
    if kind == "normalize":
        found |= {"normalize": False, "return_lse": False, "sinks": False}
    elif kind:
        found |= {"v_dim": s.log(1, found["head_dim"]), "shared": kind == "shared"}
    if not found.get("shared") and s.odds(0.3):
        even = {name: -(-found[name] // 4) * 4 for name in ("head_dim", "v_dim") if found.get(name)}
        found |= {"codes": True, "dtype": half(s), **even}
    return {**found, **some(s, "softcap")}


def append(s: Sizes) -> Fields:
    found = {**heads(s), "dtype": any_float(s), "max_len": s.choice((64, 200)), "page_size": s.choice((0, 16)), **some(s, "k_norm", "v_norm")}
    found["head_dim"] += found["head_dim"] % 2
    if s.odds(0.6):
        found |= {"rotary_dim": s.choice((found["head_dim"], 2 * max(1, found["head_dim"] // 4))), **some(s, "interleaved", "q_norm")}
        found["own_rope_positions"] = s.odds(0.3)
    else:
        found["q_heads"] = 0
    found["cache_dtype"] = E4M3 if s.odds(0.25) else None
    found["each"] = found["cache_dtype"] is not None and s.odds(0.6)
    found["v_dim"] = s.choice((0, 0, 2 * s.log(1, 64)))
    return {**found, **some(s, "round_before_weight")}


def sparse(s: Sizes) -> Fields:
    found: Fields = {
        "q_heads": s.log(1, 20),
        "dtype": half(s),
        "head_dim": s.choice((64, 128, 576)),
        "topk": s.log(1, 200),
        "q_len": s.choice((1, 2)),
    }
    if s.odds(0.4):
        found |= {"dtype": BF16, "cache_dtype": E4M3, "head_dim": s.choice((512, 576))}
    elif s.odds(0.2):
        found |= {"dtype": FP32, "head_dim": s.choice((64, 256))}
    found["v_dim"] = s.choice((0, 0, s.log(1, min(found["head_dim"], 512))))
    return {**found, "more_topk": s.choice((0, 0, s.log(1, 100))), **some(s, "has_length", "sinks", "return_lse")}


def indexer(s: Sizes) -> Fields:
    found: Fields = {"heads": s.log(1, 20), "dtype": s.choice((E4M3, E4M3, BF16, FP16, FP32)), "head_dim": 16 * s.choice((1, 2, 4, 8, s.log(1, 10)))}
    found |= {"topk": s.log(1, 200), "max_len": s.choice((64, 192, 512)), "q_len": s.choice((1, 2, s.log(1, 40)))}
    return found | {"page_size": s.choice((0, 16, 64)), **some(s, "has_start", "has_len")}


def delta(s: Sizes) -> Fields:
    heads = s.choice((1, 1, 2))
    found = {"k_heads": heads, "v_heads": heads * s.choice((1, 2, 3)), "dtype": any_float(s), **some(s, "has_state", "varlen", "channels")}
    return found | {"head_dim": s.choice((16, 32, 64, 128, s.log(1, 200))), "v_dim": s.choice((0, 0, 24, 64)), "normalize": s.odds(0.8)}


def state_space(s: Sizes) -> Fields:
    groups = s.choice((1, 1, 2))
    found = {"groups": groups, "heads": groups * s.choice((1, 2, 3)), "dtype": any_float(s), **some(s, "varlen", "skip", "bias", "gate", "softplus")}
    found |= s.choice(({"has_state": False}, {"has_state": True}, {"has_state": True, "has_rows": True}))
    return found | {"head_dim": s.choice((16, 32, 64, s.log(1, 200))), "state_dim": s.choice((16, 64, 128, s.log(1, 200)))}


def routing(s: Sizes) -> Fields:
    top_k = s.choice((1, 2, 4, 8))
    found = {"top_k": top_k, "experts": s.choice((8, 16, 60, 64, 128)), **some(s, "sigmoid", "bias", "normalize")}
    if s.odds(0.3):
        found |= {"experts": 64, **s.choice(({"groups": 8, "top_groups": 4}, {"groups": 4, "top_groups": 2}))}
    return found | {"scale": s.choice((1.0, 2.5)), "first_expert": s.choice((0, 0, s.randrange(found["experts"])))}


def experts(s: Sizes) -> Fields:
    scaling = s.choice((Scaling.NONE, Scaling.NONE, Scaling.ROW, Scaling.BLOCK))
    found: Fields = {
        "top_k": s.choice((1, 2, 3)),
        "experts": s.choice((3, 8)),
        "dtype": half(s),
        "hidden": 8 * s.log(1, 40),
        "inter": 128 * s.choice((1, 2)) if scaling is Scaling.BLOCK else 8 * s.log(1, 16),
        "scaling": scaling,
    }
    if not scaling and s.odds(0.15):
        return found | {"shared": s.choice((1, 2)), "tokens": 1}
    found |= {"alpha": s.choice((1.0, 1.702)), "limit": s.choice((0.0, 2.0)), "up_offset": s.choice((0.0, 1.0))}
    return found | {"bias": s.odds(0.3), "foreign": s.choice((0, 0, 1)) if found["top_k"] > 1 else 0, "only": s.choice(((), (), (1,)))}


def codes(s: Sizes) -> Fields:
    block = s.choice(BLOCKS)
    found = {"cols": columns(s), "dtype": any_float(s), "block": block, "codes": s.choice((E4M3, E5M2)), **some(s, "power_of_two_scales")}
    return {**found, "given_scale": True, "power_of_two_scales": False} if block == BLOCKS[0] and s.odds(0.5) else found


def row_codes(*options: str, **more: Callable[[Sizes], Any]) -> Callable[[Sizes], Fields]:
    def fixed(s: Sizes) -> Fields:
        found = {**codes(s), "block": s.choice(BLOCKS[1:3]), **some(s, *options), **{name: draw(s) for name, draw in more.items()}}
        return {name: value for name, value in found.items() if name != "given_scale"}

    return fixed


def rope(s: Sizes) -> Fields:
    found = {**heads(s), "dtype": any_float(s), **some(s, "heads_inside", "interleaved", "from_positions")}
    found["head_dim"] += found["head_dim"] % 2
    return found | {"rotary_dim": s.choice((0, 0, 2 * max(1, found["head_dim"] // 4)))}


def tokens(most: int) -> Callable[[Sizes, Fields], Fields]:
    return lambda s, _: {"tokens": s.log(1, most)}


def grouped(s: Sizes, fixed: Fields) -> Fields:
    sizes = tuple(s.choice((0, 1, s.log(1, 60))) for _ in range(s.log(1, 6)))
    most = max(sizes) if fixed["masked"] else sum(sizes)
    return {"groups": len(sizes), "rows": max(1, most + s.choice((0, 0, 5))), "sizes": sizes, "n": s.log(1, 150), "k": s.log(1, 200)}


DRAWS: dict[str, Draw] = {
    "rms_norm": row_wise("residual", "round_before_weight", weight_offset=lambda s: s.choice((0.0, 1.0))),
    "rope": (rope, lambda s, _: {"batch": s.log(1, 4), "seq_len": s.log(1, 60)}),
    "silu_mul": row_wise("fused", "gelu_tanh"),
    "softmax": row_wise(),
    "matmul": (matmul, matrix),
    "quantized_matmul": (small_weight, lambda s, _: {"m": s.log(1, 90)}),
    "mx_matmul": (lambda s: {**block_scaled(s, "k", 600), "n": s.log(1, 200), **some(s, "bias", "out_scale")}, lambda s, _: {"m": s.log(1, 200)}),
    "rms_norm_matmul": (
        lambda s: {"dtype": half(s), "n": 2 * s.log(1, 200), "k": s.log(1, 600), **some(s, "bias", "residual", "silu_mul")},
        lambda s, _: {"rows": s.log(1, 8)},
    ),
    "bmm": (
        lambda s: {**product(s), **some(s, "trans_a", "trans_b")},
        lambda s, f: {**matrix(s, f), "batch": s.log(1, 5), **s.choice(({}, {}, {"one_a": True}, {"one_b": True}))},
    ),
    "grouped_gemm": (lambda s: {**product(s), **some(s, "masked", "trans_b")}, grouped),
    "attention": (attention, attended),
    "mla": (latent, lambda s, _: {"batch": s.log(1, 3), "q_len": s.log(1, 120), "kv_len": s.log(1, 160)}),
    "attention_decode": (decode, lambda s, _: {"batch": s.log(1, 9)}),
    "kv_append": (append, lambda s, _: {"batch": s.log(1, 6), "tokens": s.log(1, 30)}),
    "merge_states": (
        lambda s: {"cols": s.log(1, 300), "dtype": any_float(s), "base2": s.odds(0.5)},
        lambda s, _: {"states": s.log(1, 20), "rows": s.log(1, 80)},
    ),
    "mla_decode": (
        lambda s: (
            {"heads": s.log(1, 20), "dtype": half(s), "max_len": s.choice((64, 256)), "latent": s.choice((64, 512)), "rope": s.choice((16, 32))}
            | {"page_size": s.choice((0, 16, 64)), "q_len": s.choice((1, 2)), **some(s, "has_len", "return_lse", "has_start")}
            | {"codes": s.odds(0.3)}
        ),
        lambda s, _: {"batch": s.log(1, 5)},
    ),
    "sparse_decode": (sparse, lambda s, _: {"batch": s.log(1, 5)}),
    "sparse_index": (indexer, lambda s, _: {"batch": s.log(1, 5)}),
    "dropout": (
        lambda s: {"dtype": any_float(s), "p": s.choice((0.0, 0.1, 0.5, 0.9, 1.0)), **some(s, "has_offset")},
        lambda s, _: {"size": s.log(1, 20_000)},
    ),
    "layer_norm": row_wise("weight", "bias"),
    "embedding": (
        lambda s: {"dim": columns(s), "dtype": any_float(s), **some(s, "wide_ids")},
        lambda s, _: {"tokens": s.log(1, 100), "vocab": s.log(1, 300), "scale": s.choice((1.0, 3.5))},
    ),
    "argmax": row_wise(),
    "quantize_fp8": (codes, rows),
    "quantize_mx": (block_codes, rows),
    "rms_norm_quant": (row_codes("residual", "round_before_weight", weight_offset=lambda s: s.choice((0.0, 1.0))), rows),
    "silu_mul_quant": (row_codes("fused", "gelu_tanh"), rows),
    "sample": row_wise("temperature", "top_k", "top_p", "min_p", "offset", "per_row"),
    "adjust_logits": row_wise("repetition", "presence", "frequency", "bias", "mask", "shared"),
    "moe_route": (lambda s: {**routing(s), "dtype": any_float(s)}, tokens(100)),
    "rms_norm_route": (
        lambda s: {**routing(s), "dtype": half(s), "k": s.log(8, 600), **some(s, "residual", "round_before_weight", "router_bias")},
        tokens(6),
    ),
    "moe": (experts, lambda s, f: {} if f.get("shared") else {"tokens": s.log(1, 60)}),
    "quantized_moe": (small_experts, tokens(40)),
    "gated_delta_rule": (delta, lambda s, f: {"batch": s.log(1, 4), "tokens": s.choice((1, s.log(1, 40), s.log(1, 260)))}),
    "ssd": (state_space, lambda s, f: {"batch": s.log(1, 4), "tokens": s.choice((1, s.log(1, 40), s.log(1, 260)))}),
    "causal_conv1d": (
        lambda s: {
            "channels": columns(s, 600),
            "dtype": any_float(s),
            "width": s.choice((2, 3, 4, 4)),
            "taps": s.choice((0, 3, 4)),
            **some(s, "bias", "silu", "varlen"),
        },
        lambda s, _: {"batch": s.log(1, 4), "tokens": s.choice((1, s.log(1, 60)))},
    ),
    "rms_norm_gated": row_wise("gate_first", "sigmoid", groups=lambda s: s.choice((1, 1, 2, 3))),
}
