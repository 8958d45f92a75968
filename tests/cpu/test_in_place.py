"""Kernels that work in place read all of a row before they store any of it, in the binary too."""

import dataclasses

import pytest
import torch
from tests.support.sass import loads_behind_stores, sass

from tilewright.compile.disassemble import find_tool
from tilewright.compile.job import Job
from tilewright.compile.report import traced
from tilewright.launch import Device
from tilewright.ops import kv_append
from tilewright.testing import run_op
from tilewright.testing.cases import cases

SMALL = next(p for p in cases(kv_append, "small") if p.q_norm)
NORMED = dataclasses.replace(SMALL, q_heads=2, kv_heads=2, head_dim=48, rotary_dim=24, v_norm=False, cache_dtype=None, page_size=0)


def test_the_rule_sees_a_load_behind_a_store_of_the_same_address():
    lines = ["STG.E.U16 desc[UR6][R16.64+0x30], R22 ;", "@!P2 LDG.E.U16 R7, desc[UR6][R16.64+0x40] ;", "LDG.E.U16 R16, desc[UR6][R18.64] ;"]
    assert loads_behind_stores(lines) == [lines[1]]
    assert not loads_behind_stores([lines[0], "IMAD.WIDE.U32 R16, R3, UR5, R4 ;", lines[1]])
    assert not loads_behind_stores([lines[1], lines[0]])


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="no nvdisasm (pip install nvidia-cuda-nvdisasm)")
def test_queries_of_few_heads_are_normed_once():
    """The H200 normed some rows twice: the tile had fewer elements than the block has threads."""
    device = Device.for_arch("sm_90")
    for config in kv_append.space(NORMED, device):
        with traced(device) as launches, torch.inference_mode():
            run_op(kv_append, NORMED.inputs(torch.device("meta")), config)
        for launch in launches:
            assert not loads_behind_stores(sass(Job.of(launch, device.arch).build())), config
