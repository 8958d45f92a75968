"""Pages that the TMA unit cannot read."""

import pytest
import torch
from tensors import int32

from tilewright.launch import Device
from tilewright.ops import attention_decode as decode_op
from tilewright.ops.attention_decode import Problem, attention_decode
from tilewright.testing import check_op


def test_small_pages_of_rows_that_tma_cannot_read_are_not_gathered():
    """The compiler gathers by TMA whatever the strides are, and reads other memory: on an H200, a
    fuzz found it.
    """
    h200, shape = Device.named("H200"), {"batch": 2, "q_heads": 6, "kv_heads": 2, "max_len": 256, "dtype": torch.bfloat16, "page_size": 16}
    for options in ({"head_dim": 20}, {"head_dim": 5, "v_dim": 2, "shared": True, "q_len": 4, "window": 2}, {"head_dim": 36, "codes": True}):
        found = decode_op.space(Problem(**shape, **options), h200)
        assert found
        assert all(c.tile_n <= 16 for c in found.legal)
    assert any(c.tile_n > 16 for c in decode_op.space(Problem(**shape, head_dim=64), h200))
    odd = Problem(**shape, head_dim=20, has_len=True)
    check_op(decode_op, odd, torch.device("cpu"), decode_op.space(odd, h200)[0])
    q, k = torch.randn(1, 2, 1, 64).bfloat16(), torch.randn(4, 2, 16, 65).bfloat16()[..., :64]
    with pytest.raises(ValueError, match="k's strides and offset must be multiples of 8 elements with pages of fewer than 256 tokens"):
        attention_decode(q, k, k, block_table=int32([0, 1]))
