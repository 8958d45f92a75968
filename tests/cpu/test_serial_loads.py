"""Loads from global memory that wait for one another, though nothing asks them to: on an H200 each
costs a short launch up to 0.3 us.
"""

import binaries
import pytest
import torch

from tilewright.compile.job import Job
from tilewright.launch import Device, traced
from tilewright.ops import (
    adjust_logits,
    argmax,
    attention_decode,
    dropout,
    gated_delta_rule,
    matmul,
    moe,
    mx_matmul,
    quantized_matmul,
    quantized_moe,
    rms_norm_matmul,
    sample,
)
from tilewright.testing import op_name, run_op

H200 = Device.named("H200")
BF16 = torch.bfloat16
# By kernel, with as many as may be left: scalars that depend on one another.
KERNELS = {
    (adjust_logits, adjust_logits.Problem(16, 128_256, BF16, *5 * [True])): {"adjust_logits_kernel": 0},
    (argmax, argmax.Problem(1, 49_152, BF16)): {"argmax_merge_kernel": 0},
    (attention_decode, attention_decode.Problem(16, 4, 1, 4147, 256, BF16, page_size=16, codes=True)): {"attention_decode_merge_kernel": 0},
    (gated_delta_rule, gated_delta_rule.Problem(2, 4, 4, 4015, 128, BF16, has_state=True)): {"gates_kernel": 0, "scan_kernel": 1},
    (matmul, matmul.Problem(1, 3072, 3072, BF16, trans_b=True)): {"matmul_kernel": 0},
    (moe, moe.Problem(802, 8, 40, 1536, 512, BF16)): {"moe_count_kernel": 0},
    (mx_matmul, mx_matmul.Problem(15, 3072, 4096, "mxfp8")): {"mx_sum_kernel": 0},
    (quantized_matmul, quantized_matmul.Problem(1, 8192, 8192, "int4-128")): {"quantized_matmul_sum_kernel": 0},
    (quantized_moe, quantized_moe.Problem(1, 4, 32, 2880, 2880, "mxfp4", bias=True)): {"quantized_moe_row_sum_kernel": 0},
    (rms_norm_matmul, rms_norm_matmul.Problem(1, 5120, 3072, residual=True)): {"rms_norm_matmul_kernel": 0},
    (sample, sample.Problem(1, 128_256, BF16, top_k=True, top_p=True)): {"sample_kernel": 1},
}  # fmt: skip


@pytest.mark.parametrize(("op", "problem"), [pytest.param(*key, id=op_name(key[0])) for key in KERNELS])
def test_loads_of_a_tile_do_not_wait_for_one_another(op, problem):
    config = next((c for c in op.space(problem, H200) if getattr(c, "whole", lambda p: True)(problem)), None)
    assert config is not None, "where all of k is loaded at once there are most loads"
    with traced(H200) as launches, torch.inference_mode():
        run_op(op, problem.inputs(torch.device("meta")), config)
    left = dict(KERNELS[op, problem])
    for launch in launches:
        job = Job.of(launch, "sm_90")
        if job.kernel in left:
            found = binaries.made(job).resources
            assert found.serial_loads <= left[job.kernel], f"{job.kernel}: {found.serial_loads} of {found.count('LDG')} loads"
    assert left.keys() <= {Job.of(launch, "sm_90").kernel for launch in launches}


def test_of_a_vector_of_any_length_only_the_last_tile_is_loaded_by_elements():
    problem = dropout.Problem(11_282_418, BF16)  # no multiple of 16 bytes
    config = next(c for c in dropout.space(problem, H200) if not c.persistent)
    with traced(H200) as launches, torch.inference_mode():
        run_op(dropout, problem.inputs(torch.device("meta")), config)
    found = binaries.made(Job.of(launches[0], "sm_90")).resources
    each = config.tile // 32 // config.num_worker_warps
    assert found.count("STG") == each + each // 8


def test_no_operand_of_adjust_logits_moves_between_threads():
    problem = adjust_logits.Problem(16, 128_256, BF16, *5 * [True])
    for config in adjust_logits.space(problem, H200):
        with traced(H200) as launches, torch.inference_mode():
            run_op(adjust_logits, problem.inputs(torch.device("meta")), config)
        assert binaries.made(Job.of(launches[0], "sm_90")).resources.shared_bytes == 0, config
