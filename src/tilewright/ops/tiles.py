"""Tile code that several ops share."""


def grouped_tile(index, tiles_m, tiles_n, group):
    """Row and column of the index-th tile of a grid walked in bands of `group` tile rows, each band column by column.

    Blocks that run at the same time then share a few row and column panels, which stay in L2.
    """
    band = index // (group * tiles_n)
    height = min(tiles_m - band * group, group)
    within = index - band * group * tiles_n
    return band * group + within % height, within // height
