"""The rates that this device reaches, measured at the start of a run: the roofs of all times."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import Bound, Device, Launch
from .timer import Contender, launch_floor_us, time_interleaved

WORDS = 4096  # int32 words per tile: 16 KiB in flight per load


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The roofs. copy_gbs counts bytes read plus bytes written; launch_us is an empty kernel's.

    read_gbs: of a reduction that writes next to nothing. tflops: of a bf16 8192^3 by cuBLAS.
    """

    copy_gbs: float
    read_gbs: float
    tflops: float
    launch_us: float


@ct.kernel
def read_kernel(X: Any, OUT: Any, TILE: ct.Constant[int]) -> None:
    """Blocks stride over X [n] int32 and write one word each to OUT [blocks]."""
    total = ct.full((TILE,), 0, dtype=ct.int32)
    for i in range(ct.bid(0), ct.num_tiles(X, axis=0, shape=(TILE,)), ct.num_blocks(0)):
        total = total + ct.load(X, index=(i,), shape=(TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(OUT, index=(ct.bid(0),), tile=ct.sum(total).reshape((1,)))


def check_sums(reads: Mapping[str, Contender], out: Tensor, words: int) -> None:
    """Checks each kernel by itself: one with fewer blocks leaves words of the one before.

    Raises: RuntimeError naming the kernel.
    """
    for name, read in reads.items():
        out.zero_()
        read()
        if int(out.sum()) != words:
            raise RuntimeError(f"{name} summed {int(out.sum())}, must be {words}")


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes about a second and 4 GiB."""
    words = 1 << 28
    source = torch.ones(words, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    here = Device.of(source)
    out = torch.empty(4 * here.sms, dtype=torch.int32, device=device)
    launches = {f"read{o}": Launch(read_kernel, (o * here.sms,), {"tile": WORDS}, occupancy=o) for o in (1, 2, 4)}
    contenders: dict[str, Contender] = {name: partial(Bound([launch], ("x", "out"), here).run, source, out) for name, launch in launches.items()}
    check_sums(contenders, out, words)
    # A captured copy_ becomes a memcpy node, which is slower than a kernel (2.8 against 4.3 TB/s on
    # an H200). Negation moves the same bytes.
    times = time_interleaved({**contenders, "copy": lambda: torch.neg(source, out=target)}, [{}])
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = time_interleaved({"matmul": lambda: torch.matmul(a, b)}, [{}])["matmul"]
    return Ceilings(
        copy_gbs=2 * source.nbytes / times["copy"].time_us / 1e3,
        read_gbs=source.nbytes / min(times[name].time_us for name in launches) / 1e3,
        tflops=2 * 8192**3 / matmul.time_us / 1e6,
        launch_us=launch_floor_us(),
    )
