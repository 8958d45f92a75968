"""Tile code of `rms_norm_route`."""

import cuda.tile as ct

from ..common.pdl import pdl_launch_dependents, pdl_wait
from ..common.routing import chosen_experts, experts_and_groups
from ..common.tiles import ZERO, load_masked, load_tile, rounded_sum, vector_chunk


@ct.kernel
def rms_norm_route_kernel(
    X,
    RESIDUAL,
    WEIGHT,
    ROUTER,
    ROUTER_BIAS,
    BIAS,
    ARRIVED,
    LOGITS,
    OUT,
    NEW_RESIDUAL,
    WEIGHTS,
    IDS,
    eps: float,
    weight_offset: float,
    scale: float,
    first_expert: int,
    ADD: ct.Constant[bool],
    BIASED: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    SIGMOID: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    GROUPS: ct.Constant[int],
    SIZE: ct.Constant[int],
    TOP_GROUPS: ct.Constant[int],
    TOP_K: ct.Constant[int],
    K: ct.Constant[int],
    TILE_E: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_G: ct.Constant[int],
    TILE_S: ct.Constant[int],
    TILE_P: ct.Constant[int],
):
    """TILE_E experts of a token; the token's last block also chooses. Grid (parts of the experts,
    tokens).

    X, RESIDUAL, OUT, NEW_RESIDUAL: [tokens, K]; the residuals only with ADD. WEIGHT: [K].
    ROUTER: [experts, K]. ROUTER_BIAS: [experts], only with BIASED.
    BIAS: [GROUPS, SIZE], only with ADD_BIAS. LOGITS: [tokens, experts].
    ARRIVED: int32 [tokens], zero, and zero again at the end.
    WEIGHTS, IDS: [tokens, TOP_K]; IDS count from first_expert.
    TILE_G, TILE_S, TILE_P: powers of two, at least GROUPS, SIZE, TOP_K.
    """
    pdl_launch_dependents()
    part, token = ct.bid(0), ct.bid(1)
    X, ROUTER, WEIGHT = X.slice(1, 0, K), ROUTER.slice(1, 0, K), WEIGHT.slice(0, 0, K)
    even = K % TILE_K == 0 and GROUPS * SIZE % TILE_E == 0
    routers: tuple = ()
    weights: tuple = ()
    for j in ct.static_iter(range(ct.cdiv(K, TILE_K))):  # in flight while the launch before ends, and while the row is normed
        routers = (*routers, load_masked(ROUTER, (part, j), (TILE_E, TILE_K), ZERO, even, None, False))
        weights = (*weights, vector_chunk(WEIGHT, j, K, TILE_K))
    pdl_wait()
    xs: tuple = ()
    squares = ct.zeros((1, TILE_K), ct.float32)
    for j in ct.static_iter(range(ct.cdiv(K, TILE_K))):
        x = load_masked(X, (token, j), (1, TILE_K), ZERO, K % TILE_K == 0, None, False)
        if ADD:
            more = load_masked(RESIDUAL.slice(1, 0, K), (token, j), (1, TILE_K), ZERO, K % TILE_K == 0, None, False)
            x = rounded_sum(x, more)
            if part == 0:
                ct.store(NEW_RESIDUAL, (token, j), x, allow_tma=False)
        wide = x.astype(ct.float32)
        squares = squares + wide * wide
        xs = (*xs, x)
    rstd = 1.0 / ct.sqrt(ct.sum(squares) * (1.0 / K) + eps)  # rsqrt has an error of 2 ulp in fp32
    acc = ct.zeros((TILE_E, TILE_K), ct.float32)
    for j in ct.static_iter(range(ct.cdiv(K, TILE_K))):
        h = xs[j].astype(ct.float32) * rstd
        if ROUND:
            h = h.astype(OUT.dtype).astype(ct.float32)
        h = (h * (weights[j].astype(ct.float32) + weight_offset)).astype(OUT.dtype)
        if part == 0:
            ct.store(OUT, (token, j), h, allow_tma=False)
        acc = acc + routers[j].astype(ct.float32) * h.astype(ct.float32)
    logit = ct.sum(acc, axis=1)
    if BIASED:
        logit = logit + load_tile(ROUTER_BIAS, (part,), (TILE_E,), ZERO, even, None, False).astype(ct.float32)
    ct.store(LOGITS, (token, part), logit.reshape((1, TILE_E)), allow_tma=False)
    before = ct.atomic_add(ARRIVED, token, 1, memory_order=ct.MemoryOrder.ACQ_REL, memory_scope=ct.MemoryScope.DEVICE)
    if before == ct.num_blocks(0) - 1:
        # Beside the row of logits three empty ones: a row to a warp, and in all the reductions that
        # follow no warp waits for another. With groups the compiler lays rows out otherwise.
        ROWS = 4 if TOP_GROUPS == GROUPS else 1
        expert, inside = experts_and_groups(GROUPS, SIZE, TILE_G, TILE_S)
        row = ct.arange(ROWS, dtype=ct.int32).reshape((ROWS, 1))
        logits = ct.gather(LOGITS, (token + row, expert), mask=inside & (row == 0))
        how = (SIGMOID, ADD_BIAS, NORMALIZE, GROUPS, SIZE, TOP_GROUPS, TOP_K, ROWS, TILE_G, TILE_S, TILE_P)
        chosen, ids = chosen_experts(logits, BIAS, scale, how)
        ct.store(WEIGHTS, (token, 0), ct.extract(chosen, (0, 0), (1, TILE_P)), allow_tma=False)
        ct.store(IDS, (token, 0), ct.extract(ids, (0, 0), (1, TILE_P)) - first_expert, allow_tma=False)
        ct.scatter(ARRIVED, token, 0)
