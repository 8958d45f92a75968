"""Counts of what one launch needs. They are the same few numbers for every op, so that one formula
prices all ops.
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)  # not frozen: a new size makes a hundred, and a frozen one takes four times as long
class Work:
    """The counts of one launch, or of one part of it (whole waves, then a last wave that is split).
    Sizes in bytes. Nothing changes one once it is made.

    blocks: units of work: tiles, times the parts of a tile where k or the keys are split. A
        persistent block takes several.
    resident: blocks that the device holds at once; a wave is that many.
    per_sm: of them, blocks that share an SM (or the SMs of a cluster).
    sms: SMs that one block takes: the size of its cluster. flops, fill and out count the share of
        one of them.
    steps: pipeline steps of one block.
    flops: floating-point operations of one step of one block on the MMA or the CUDA cores, padding
        included.
    kinds: names of the efficiencies ("eff.<kind>" in the rates) whose product is the share of the
        bf16 peak that those operations reach.
    serial: waits of one step for a result of its own before the next may begin, such as sums that
        leave the tensor cores.
    exponentials: of one step of one block.
    fill: bytes that one step of one block reads into its SM, L2 hits included.
    padding: bytes of a step that the TMA unit fills with zeros: rows of a tile that are not there.
    dram: bytes that the launch moves to and from memory, all blocks together.
    span: bytes between the first and the last row that a wave reads at a time; beyond the reach of
        address translation memory is slower.
    aligned: bytes, the largest power of two up to 128 that all rows begin at multiples of: off 128
        a line of L2 is read twice, off 32 a sector too.
    unaligned: share of `fill` whose rows do; the others begin at multiples of 128.
    out: elements of the output tile of one block: what its start and its epilogue cost grows with
        the square root.
    persistent: blocks take tile after tile: the next tile's loads start under the end of the last.
    chain: memory round trips of a block that follow each other, beyond the first: a second pass,
        checked loads, reductions.
    ragged: steps of the longest block over those of the mean one. 1: all are equal.
    partial: bytes of partial results, written once and read once by a second launch. 0: no second
        launch.
    spill: bytes of stack of a thread: a cost, not a ban.
    stages: steps whose loads are under way at once, what shared memory holds: so many take a memory
        round trip. Infinite where nothing is known.
    """

    blocks: int
    resident: int
    per_sm: int = 1
    sms: int = 1
    steps: float = 1
    flops: float = 0.0
    kinds: tuple[str, ...] = ()
    serial: float = 0.0
    exponentials: float = 0.0
    fill: float = 0.0
    padding: float = 0.0
    dram: float = 0.0
    span: float = 0.0
    aligned: int = 128
    unaligned: float = 1.0
    out: float = 0.0
    persistent: bool = False
    chain: float = 0.0
    ragged: float = 1.0
    partial: float = 0.0
    spill: int = 0
    stages: float = math.inf
