"""Products of one row between the launches of a step: blocks that do not spill, and whose weights
come before the wait.
"""

import binaries
import pytest
import torch

from tilewright.compile.job import Job
from tilewright.engine.beside import beside
from tilewright.launch import Device, decisions, traced
from tilewright.ops import matmul, rms_norm_matmul
from tilewright.testing import run_op


@pytest.mark.parametrize("k", [2048, 8192])
def test_one_row_takes_blocks_that_load_their_weights_first(k: int) -> None:
    with traced(Device.named("H200")) as launches, beside(), torch.inference_mode():
        run_op(matmul, matmul.Problem(1, 512, k).inputs(torch.device("meta")), None)
    (launch,) = launches
    assert launch.args["WHOLE"] is True
    assert launch.launch.pdl
    found = binaries.made(Job.of(launch, "sm_90")).resources
    assert (found.stack_bytes, found.local_bytes) == (0, 0)
    assert found.shared_bytes < 2048


@pytest.mark.parametrize(
    ("op", "p", "gpu"),
    [
        (matmul, matmul.Problem(2, 512, 2048), "H200"),
        (matmul, matmul.Problem(1, 512, 4096), "H200"),
        (matmul, matmul.Problem(1, 512, 14336), "H200"),
        (matmul, matmul.Problem(1, 512, 2048, torch.float32), "H200"),
        (rms_norm_matmul, rms_norm_matmul.Problem(1, 512, 2048), "H200"),
        (matmul, matmul.Problem(1, 512, 2048), "B200"),
    ],
    ids=["two rows", "between the lengths", "a long row", "fp32", "with a norm", "another GPU"],
)
def test_others_keep_their_own_choice(op, p, gpu: str) -> None:
    with traced(Device.named(gpu)), decisions() as found, torch.inference_mode():
        run_op(op, p.inputs(torch.device("meta")), None)
        with beside():
            run_op(op, p.inputs(torch.device("meta")), None)
    own, between = found
    assert between.config == own.config
    assert between.source == own.source != "forced"
