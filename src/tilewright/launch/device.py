"""What a plan may know about the processor it runs on."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .context import traced_device
from .names import one_of


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work a problem needs: bytes moved once, floating-point operations."""

    size_bytes: int
    flops: int = 0

    def times_us(self, memory_gbs: float, tflops: float) -> tuple[float, float]:
        """What the bytes take at so many GB/s, and the operations at so many TFLOP/s."""
        return self.size_bytes / memory_gbs / 1e3, self.flops / tflops / 1e6


@dataclass(frozen=True, slots=True, eq=False)  # one object per device: hashed by identity, in no time
class Device:
    """One processor, by what decides a plan.

    name: short product name ("H200") or "CPU" for the interpreter.
    arch: compiler target ("sm_90"), or "cpu".
    sms: streaming multiprocessors (on a CPU: blocks of a persistent grid).
    l2_bytes: size of the last-level cache.
    memory_gbs: device-memory bandwidth, GB/s: measured on GPUs that we had, else from the data
        sheet.
    tflops: dense bf16 rate with fp32 accumulation, TFLOP/s (likewise).
    """

    name: str
    arch: str
    sms: int
    l2_bytes: int
    memory_gbs: float
    tflops: float

    @property
    def has_fp8(self) -> bool:
        """Whether the compiler takes 8-bit floating point for it."""
        return self.arch != "sm_80"

    @property
    def has_pdl(self) -> bool:
        """Whether blocks may start while the launch before still runs: PDL came with Hopper."""
        return not self.is_cpu and int(self.arch.removeprefix("sm_")) >= 90

    @property
    def is_cpu(self) -> bool:
        return self.arch == "cpu"

    @staticmethod
    def of(tensor: Tensor) -> "Device":
        """The device that owns `tensor`; for a meta tensor, the device being traced for."""
        if tensor.is_cuda:
            return _cuda_device(tensor.get_device())
        if tensor.is_cpu:
            return CPU
        traced: Device = traced_device()
        return traced

    @staticmethod
    def named(name: str) -> "Device":
        """A device from the table, with no such GPU present.

        Raises: KeyError naming the known ones.
        """
        if name not in KNOWN:
            raise KeyError(f"device must be {one_of(sorted(KNOWN), name)}, got {name!r}")
        return KNOWN[name]

    @staticmethod
    def called(name: str) -> "Device | None":
        """The device from the table or the machine that has this name, None if there is none."""
        here = (_cuda_device(index) for index in range(torch.cuda.device_count()))
        return KNOWN.get(name) or next((device for device in here if device.name == name), None)

    @staticmethod
    def for_arch(arch: str) -> "Device":
        """The first known device of a compiler target, e.g. "sm_90".

        Raises: ValueError naming the known targets.
        """
        known = {device.arch: device for device in reversed(KNOWN.values()) if not device.is_cpu}
        if arch not in known:
            targets = ", ".join(f"{name} ({known[name].name})" for name in sorted(known, key=lambda name: int(name[3:])))
            raise ValueError(f"arch must be one of {targets}, got {arch!r}")
        return known[arch]


MIB = 1 << 20
CPU = Device("CPU", "cpu", sms=4, l2_bytes=32 * MIB, memory_gbs=20.0, tflops=0.1)
KNOWN = {
    d.name: d
    for d in (
        Device("H200", "sm_90", sms=132, l2_bytes=60 * MIB, memory_gbs=4490.0, tflops=790.0),
        Device("H100", "sm_90", sms=132, l2_bytes=50 * MIB, memory_gbs=3350.0, tflops=790.0),
        Device("A100", "sm_80", sms=108, l2_bytes=40 * MIB, memory_gbs=2039.0, tflops=312.0),
        Device("B200", "sm_100", sms=148, l2_bytes=126 * MIB, memory_gbs=8000.0, tflops=2250.0),
        Device("B300", "sm_103", sms=148, l2_bytes=126 * MIB, memory_gbs=8000.0, tflops=2500.0),
        Device("RTX5090", "sm_120", sms=170, l2_bytes=96 * MIB, memory_gbs=1792.0, tflops=209.0),
        Device("GB10", "sm_121", sms=48, l2_bytes=24 * MIB, memory_gbs=273.0, tflops=92.0),
        CPU,
    )
}


@cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    squeezed = properties.name.upper().replace(" ", "")
    listed = next((d for d in KNOWN.values() if d.arch == arch and d.name.upper() in squeezed), None)
    # An unlisted product gets its real SM count and cache. Its rates are those of the first listed
    # product of its architecture.
    base = listed or next((d for d in KNOWN.values() if d.arch == arch), KNOWN["A100"])
    return Device(
        listed.name if listed else properties.name,
        arch,
        properties.multi_processor_count,
        properties.L2_cache_size,
        base.memory_gbs,
        base.tflops,
    )


def chosen_device(name: str) -> torch.device:
    """What --device names: "cpu", "cuda", "cuda:1"; "" for a GPU if there is one.

    Raises: ValueError for anything else, and for a GPU that is not there.
    """
    kind, _, index = (name or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    count, wanted = torch.cuda.device_count(), int(index or 0)
    if wanted >= count:
        raise ValueError(f"--device must name a GPU of this machine, which has {count}, got {name!r}")
    return torch.device("cuda", wanted)


def require_gpu(verb: str) -> None:
    """Raises ValueError on a machine without a GPU."""
    if not torch.cuda.is_available():
        why = "times of the interpreter say nothing about a kernel. `tilewright compile` reports resources without one."
        raise ValueError(f"{verb} needs a CUDA GPU: {why}")
