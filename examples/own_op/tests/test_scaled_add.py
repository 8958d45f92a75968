"""On a CPU: the answer, the races, and what a GPU that need not exist would launch."""

import torch
from my_ops.scaled_add import scaled_add

import tilewright
from tilewright.interpret import checking
from tilewright.launch import Device, traced


def test_the_answer_is_right_and_every_element_is_written_once():
    x, y = torch.randn(3, 1001, dtype=torch.bfloat16), torch.randn(3, 1001, dtype=torch.bfloat16)
    with checking(races=True, unwritten=True):
        out = scaled_add(x, y, 0.5)
    torch.testing.assert_close(out, (x.float() + 0.5 * y.float()).bfloat16())


def test_it_compiles_for_an_h200_without_a_spill():
    x = torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")
    with traced(Device.named("H200")) as launches:
        scaled_add(x, x, 2.0)
    (launch,) = launches
    report = tilewright.compile_report(launch.launch.kernel, launch.launch.grid, tuple(launch.args.values()), arch="sm_90")
    assert report.ok, report
