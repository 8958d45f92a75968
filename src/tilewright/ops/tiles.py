"""Tile code that several ops share."""

import cuda.tile as ct


def grouped_tile(index, tiles_m, tiles_n, group):
    """Row and column of the index-th tile of a grid walked in bands of `group` tile rows, each band column by column.

    Blocks that run at the same time then share a few row and column panels, which stay in L2.
    """
    band = index // (group * tiles_n)
    height = min(tiles_m - band * group, group)
    within = index - band * group * tiles_n
    return band * group + within % height, within // height


def of_width(matrix, cols):
    """The matrix [rows, cols], with its width known when compiling.

    A bound that is only known when running puts each wide load into a branch of its own, with its conversion: one load in flight per thread.
    """
    return matrix.slice(1, 0, cols)


def load_tile(array, index, shape, padding, whole, latency, tma):
    """A tile of an array. whole: it lies inside, so nothing is checked or padded (tileiras 13.4 fails if given a padding it does not need).

    Checked, each wide load stands in a branch of its own and waits for the one before.
    """
    if whole:
        return ct.load(array, index, shape, check_bounds=False, latency=latency, allow_tma=tma)
    return ct.load(array, index, shape, padding_mode=padding, latency=latency, allow_tma=tma)


def each_row_tile(compute, matrix, COLS, PERSISTENT, TILE_M, TILE_N):
    """Calls compute(i, whole) for every row tile i of this block; whole, a constant: the tile lies inside the matrix [rows, COLS]."""
    if PERSISTENT:
        for i in range(ct.bid(0), ct.num_tiles(matrix, 0, (TILE_M, TILE_N)), ct.num_blocks(0)):
            compute(i, TILE_M == 1 and COLS % TILE_N == 0)
    elif COLS % TILE_N != 0:
        compute(ct.bid(0), False)
    elif TILE_M == 1:
        compute(ct.bid(0), True)
    elif ct.bid(0) * TILE_M + TILE_M <= matrix.shape[0]:
        compute(ct.bid(0), True)
    else:
        compute(ct.bid(0), False)
