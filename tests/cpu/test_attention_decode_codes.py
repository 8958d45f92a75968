"""`attention_decode` over e4m3 keys and values: every code, any magnitude, what is refused."""

import pytest
import torch

from tilewright import attention_decode, kv_append
from tilewright.ops.attention_decode import reference

pytestmark = pytest.mark.usefixtures("inference")
E4M3 = torch.float8_e4m3fn
HALVES = [torch.bfloat16, torch.float16]
CODES = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8).view(E4M3)  # all but NaN
ONE = {"k_scale": torch.ones(1, 1, 1), "v_scale": torch.ones(1, 1, 1)}


@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_is_its_value(dtype):
    """Of keys by the lse of sequences of one key, of values by the result of one."""
    q, k = torch.zeros(len(CODES), 1, 1, 4, dtype=dtype), torch.zeros(len(CODES), 1, 1, 4, dtype=E4M3)
    q[..., 2], k[:, 0, 0, 2] = 1.0, CODES
    scales = {"k_scale": torch.full((len(CODES), 1, 1), 0.37), "v_scale": torch.full((len(CODES), 1, 1), 4.0)}
    _, lse = attention_decode(q, k, k, scale=1.0, return_lse=True, **scales)
    torch.testing.assert_close(lse.flatten(), CODES.float() * 0.37, rtol=1e-6, atol=0)
    v = torch.cat((CODES, CODES[:2])).view(1, 1, 1, -1)
    out = attention_decode(q[:1], k[:1], v, k_scale=scales["k_scale"][:1], v_scale=scales["v_scale"][:1])
    assert torch.equal(out.flatten(), 4 * v.flatten().to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [1e-4, 3e4])
def test_small_and_large_values_keep_their_bits(dtype, size):
    """Trap: weights times scales below fp16's normal numbers, or beyond its largest."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 1, 16).to(dtype), torch.randn(2, 1, 40, 16), size * torch.rand(2, 1, 40, 16)
    caches, scales = [torch.zeros(2, 1, 40, 16, dtype=E4M3) for _ in range(2)], [torch.zeros(2, 1, 40) for _ in range(2)]
    positions = torch.arange(40, dtype=torch.int32).expand(2, -1).contiguous()
    kv_append(k.to(dtype), v.to(dtype), *caches, positions=positions, k_scale=scales[0], v_scale=scales[1])
    found = attention_decode(q, *caches, k_scale=scales[0], v_scale=scales[1])
    expected = reference(q.double(), *(x.double() for x in caches), k_scale=scales[0].double(), v_scale=scales[1].double())
    assert (found - expected).abs().max() < 2 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize(("head_dim", "v_dim"), [(192, None), (160, None), (96, 64), (144, 128)])
def test_columns_behind_a_power_of_two_are_codes_too(head_dim, v_dim):
    """Trap: of 192 columns and the like, 16-bit keys are read as 128 and 64."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 1, head_dim).to(torch.bfloat16), torch.randn(2, 2, 40, head_dim).to(E4M3)
    v, scale = k if v_dim is None else None, torch.rand(2, 2, 40) + 0.5
    found = attention_decode(q, k, v, v_dim=v_dim, k_scale=scale, v_scale=scale)
    wide = [x if x is None else x.double() for x in (q, k, v)]
    expected = reference(*wide, v_dim=v_dim, k_scale=scale.double(), v_scale=scale.double())
    assert (found - expected).abs().max() < 2**-7 * expected.abs().max()


def test_a_step_over_pages_of_codes_compiles_to_one_graph():
    """Both ops looked at addresses, which a traced tensor does not have."""

    def step(q, new, k, v, positions, table, **scales):
        kv_append(new, new, k, v, positions=positions, block_table=table, **scales)
        return attention_decode(q, k, v, kv_len=positions[:, 0] + 1, block_table=table, **scales)

    with torch.inference_mode(False), torch.no_grad():
        q, new, scale = torch.randn(2, 2, 1, 16).half(), torch.randn(2, 1, 1, 16).half(), torch.rand(4, 1, 16)
        k, v = (torch.randn(4, 1, 16, 16).to(E4M3) for _ in range(2))
        where = torch.tensor([[3], [20]], dtype=torch.int32), torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
        given, again = ((*(x.clone() for x in (q, new, k, v)), *where, {"k_scale": scale.clone(), "v_scale": scale + 1}) for _ in range(2))
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given[:-1], **given[-1])
        assert torch.equal(found, step(*again[:-1], **again[-1]))


Q, K = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 8, dtype=E4M3)
WRONG = [
    ({"k": K, "v": K}, r"k_scale must be given for float8_e4m3fn, as fp32 of shape \(.*\), got None"),
    ({"k": K, "v": K, **ONE, "v_scale": torch.ones(1)}, r"v_scale.shape must be \(1, 1, 1\), got \(1,\)"),
    ({"k": K, "v": Q, **ONE}, r"v.dtype must be float8_e4m3fn, got bfloat16"),
    ({"k": Q, "v": Q, **ONE}, r"k_scale must be None for bfloat16, got Tensor"),
    ({"q": Q.float(), "k": K, "v": K, **ONE}, r"q.dtype must be bfloat16 or float16 with k in float8_e4m3fn, got float32"),
    ({"q": Q[..., :6], "k": K[..., :6], "v": K, **ONE}, r"k.shape\[-1\] must be a multiple of 4, at most 256, in float8_e4m3fn, got 6"),
    ({"q": torch.zeros(1, 1, 1, 512).half(), "k": torch.zeros(1, 1, 1, 512).to(E4M3), "v": K, **ONE}, r"k.shape\[-1\] must be a multiple of 4"),
    ({"k": torch.zeros(1, 1, 1, 12).to(E4M3)[..., 2:10], "v": K, **ONE}, r"k's strides and offset must be multiples of 4 in float8_e4m3fn"),
    ({"k": Q, "v": Q, "softcap": -1.0}, r"softcap must be positive, got -1.0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attention_decode(**{"q": Q, **arguments})
