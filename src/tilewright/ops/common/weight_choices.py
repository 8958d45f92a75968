"""What products with small weights state alike about their configs."""

from typing import Any

from ...launch import Device
from .weight_formats import E2M1, E4M3, INT4, INT8, WeightFormat

STEPS_BYTES = {"sm_80": 163 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10}  # of shared memory of an SM
MOST_STEPS_BYTES = 227 << 10
# Instructions of a thread for each weight, in the loops of the kernels (sm_90), and what one is
# worth beside the tensor core's 4096 flop a clock: 128 threads issue in a clock.
INSTRUCTIONS = {INT4: 2.2, INT8: 1.9, E2M1: 2.9, E4M3: 2.9}
FLOPS = 32
TIE = 0.02
LEAST_WIDE, MOST_WIDE = 8, 32  # columns of pieces: of the second operand of a product


def steps_fit(c: Any, step_bytes: int, device: Device) -> bool:
    """Whether the blocks of an SM have room for a step each."""
    return device.is_cpu or step_bytes * c.occupancy <= _room(device)


def stages(c: Any, step_bytes: int, device: Device) -> int:
    """Steps that a block has in flight."""
    found: int = max(1, min(c.latency, _room(device) // c.occupancy // step_bytes))
    return found


def _room(device: Device) -> int:
    return STEPS_BYTES.get(device.arch, MOST_STEPS_BYTES)


def takes_pieces(of: WeightFormat, columns: int, c: Any, device: Device) -> bool:
    """Four blocks an SM have 64 registers a thread: more than 8 columns of pieces spill a few."""
    return device.has_fp8 and of.code != INT8 and not of.factor and columns <= (MOST_WIDE if c.occupancy <= 3 else LEAST_WIDE)


def takes_scales(of: WeightFormat, c: Any, most_columns: int, device: Device) -> bool:
    """Sums are scaled where a group is whole runs.

    most_columns: of scales and zero points of a step that stay in registers.
    """
    if c.scale_sums and not (of.group and of.group % of.run == 0):
        return False
    columns = c.runs * of.run // of.group * (1 + of.zeros) if of.group else 0
    return device.is_cpu or columns <= most_columns
