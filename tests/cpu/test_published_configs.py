"""Configs that published documents found best are candidates on their architecture."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tilewright.launch import Device
from tilewright.ops import attention, matmul

TUTORIAL = "cuTile playbook for DGX Spark and B300, FMHA platform configuration"
BLOG = "Tuning Flash Attention for Peak Performance in NVIDIA CUDA Tile, adaptive tiling"
GEMM = "cuTile GEMM note, tuning the static persistent kernel"


@dataclass(frozen=True)
class Published:
    """A config that `source` names for a GPU and a problem. config: the fields that it fixes."""

    source: str
    gpu: str
    problem: Any
    config: dict[str, int]

    def __str__(self) -> str:
        return f"{self.gpu} {' '.join(f'{name}={value}' for name, value in self.config.items())}"


def prefill(n: int, head_dim: int) -> attention.Problem:
    return attention.Problem(4, 32, 32, n, n, head_dim, torch.bfloat16)


def tiles(tile_m: int, tile_n: int, occupancy: int) -> dict[str, int]:
    return {"tile_m": tile_m, "tile_n": tile_n, "occupancy": occupancy}


ATTENTION = [
    Published(source, gpu, prefill(n, head_dim), config)
    for head_dim in (64, 128)
    for source, gpu, n, config in (
        (TUTORIAL, "GB10", 2048, tiles(64, 64, 2)),  # 66.5 to 79.5 TFLOP/s
        (TUTORIAL, "B300", 8192, tiles(256, 128, 1)),
        (TUTORIAL, "B300", 2048, tiles(128, 128, 2)),
        (BLOG, "RTX5090", 2048, tiles(64, 64, 2)),
        (BLOG, "B200", 1024, tiles(64, 64, 2)),
        (BLOG, "B200", 2048, tiles(64, 64, 2)),
        (BLOG, "B200", 4096, tiles(128, 128, 2)),
        (BLOG, "B200", 8192, tiles(256, 128, 1)),
        (BLOG, "B200", 16384, tiles(256, 128, 1)),
    )
]


def reachable(space: list[Any], config: dict[str, int]) -> bool:
    return any(all(getattr(c, name) == value for name, value in config.items()) for c in space)


@pytest.mark.parametrize("published", ATTENTION, ids=str)
def test_a_published_attention_config_is_in_the_space(published):
    assert reachable(attention.space(published.problem, Device.named(published.gpu)), published.config), published.source


def test_two_blocks_of_64_x_64_are_the_default_where_they_were_published_as_best():
    default = attention.space(prefill(2048, 64), Device.named("RTX5090"))[0]
    assert (default.tile_m, default.tile_n, default.occupancy) == (64, 64, 2)


@pytest.mark.parametrize(("gpu", "n"), [("GB10", 2048), ("B200", 512), ("B200", 1024), ("B200", 2048)])
def test_a_published_config_is_among_the_first_that_are_tuned_where_no_time_orders_them(gpu, n):
    """Prices there come from an H200's constants with a data sheet: two blocks of 64 x 64 come out
    within 30 % of the default, and only times of the GPU itself can order them.
    """
    p, device = prefill(n, 64), Device.named(gpu)
    space = attention.space(p, device)
    (published,) = (c for c in space[:4] if (c.tile_m, c.tile_n, c.occupancy) == (64, 64, 2))
    assert attention.CHOICES.us(p, published, device) < 1.3 * attention.CHOICES.us(p, space[0], device)


def test_the_model_goes_from_small_to_large_tiles_as_prompts_grow_on_b200():
    """64x64 was found best for 1024 to 2048 tokens, 256x128 from 8192 on. The price of the large
    tile over that of the small one falls with the prompt.
    """

    def us(n: int, *wanted: int) -> float:
        p, device = prefill(n, 64), Device.named("B200")
        (config,) = (c for c in attention.space(p, device) if (c.tile_m, c.tile_n, c.occupancy) == wanted)
        return attention.CHOICES.us(p, config, device)

    ratios = [us(n, 256, 128, 1) / us(n, 64, 64, 2) for n in (512, 4096, 16384)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1.2
    long = attention.space(prefill(16384, 64), Device.named("B200"))[0]
    assert (long.tile_m, long.tile_n) >= (128, 128)


# --- matmul: the note's search range
GEMM_TILES = (32, 64, 128, 256, 512)
MATMUL = [
    *(Published(GEMM, "B200", matmul.Problem(m, 4096, 4096), {"num_ctas": n}) for m in (4096, 8192) for n in (1, 2, 4, 8)),
    *(
        Published(GEMM, gpu, matmul.Problem(8192, 8192, 8192), {name: size})
        for gpu in ("B200", "GB10")
        for name in ("tile_m", "tile_n", "tile_k")
        for size in GEMM_TILES
    ),
    *(Published(GEMM, "GB10", matmul.Problem(4096, 4096, 4096), {"occupancy": n}) for n in (1, 2, 4)),
]


@pytest.mark.parametrize("published", MATMUL, ids=str)
def test_a_published_matmul_config_is_legal(published):
    assert reachable(matmul.space(published.problem, Device.named(published.gpu)).legal, published.config), published.source
