"""Values of 8 bits by rows, transposed in front of attention."""

from dataclasses import replace

import pytest
import torch

from tilewright import interpret
from tilewright.launch import Bound, Device
from tilewright.ops.attention import Problem, plan, space

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def test_values_of_8_bits_by_rows_are_transposed_in_front_where_that_is_faster():
    """By the model: what a launch in front costs against what each step saves. On an H200 from 2048
    keys on 1.33 to 1.58 times as fast as without.
    """
    for problem, transposed in (
        (Problem(4, 32, 32, 2048, 2048, 128, E4M3), True),
        (Problem(4, 32, 32, 16384, 16384, 128, E4M3, causal=False), True),
        (Problem(4, 32, 32, 2048, 2048, 128, E4M3, keys_last=True), False),
        (Problem(4, 32, 32, 16, 4096, 128, E4M3), False),  # few queries: the keys are read once anyway
        (Problem(4, 32, 32, 2048, 2048, 128, BF16), False),
    ):
        config = space(problem, Device.named("H200"))[0]
        assert config.transpose_values is transposed, problem
        launches = plan(problem, config, Device.named("H200"))
        merge = ["attention_decode_merge_kernel"] * (config.num_kv_splits > 1)
        assert [launch.name for launch in launches] == ["transpose_kernel"] * transposed + ["attention_kernel"] + merge
    assert not space(Problem(4, 32, 32, 2048, 2048, 128, E4M3), Device.named("B200"))[0].transpose_values, "its MMA reads either layout"


@pytest.mark.parametrize("columns", [80, 128, 7])
def test_transposed_values_are_those_of_every_key_and_zeros_behind_them(columns):
    """Of a view with strides of its own, NaN around it; 141 keys are more than a block's and no
    multiple of 16.
    """
    held = torch.full((2, 141, 3, columns + 5), torch.nan).to(E4M3)
    v = held[..., 2 : columns + 2].transpose(1, 2)
    v.copy_(torch.randn(v.shape).to(E4M3))
    problem = Problem(2, 3, 3, 16, 141, 64, E4M3, v_dim=columns)
    config = next(c for c in space(problem, Device.of(v)) if c.transpose_values)
    launch = plan(problem, config, Device.of(v))[0]
    ((shape, dtype),) = launch.scratch.values()
    found = torch.full(shape, 3.0).to(dtype)
    with interpret.checking(races=True, order=5):
        Bound([replace(launch, scratch={})], ("v", "transposed"), Device.of(v)).run(v, found)
    assert shape == (2, 3, columns, 144)
    assert torch.equal(found[..., :141].float(), v.transpose(2, 3).float())
    assert not found[..., 141:].float().any()
