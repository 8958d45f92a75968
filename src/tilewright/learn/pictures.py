"""Pictures of the ladders' ideas, in characters: at most 80 columns, for a terminal and a page."""

ONLINE_SOFTMAX = """\
keys      tile 0     tile 1     tile 2
           q k^T      q k^T      q k^T       scores of one row of q

largest      3          7          5         in this tile
maximum      3          7          7         so far
factor       -       e^(3 - 7)     1         shrinks all earlier sums
sums        s0       s0 f + s1   ... + s2    of weights, and of weights times v

out = (sum of weights times v) / (sum of weights): one division at the end
"""

CAUSAL_TILES = """\
               keys ->
            0    1    2    3    4    5    6    7
queries 0  [/]   .    .    .    .    .    .    .    [/]  on the diagonal:
   |    1  [#]  [/]   .    .    .    .    .    .         needs the mask
   v    2  [#]  [#]  [/]   .    .    .    .    .    [#]  seen by every row:
        3  [#]  [#]  [#]  [/]   .    .    .    .         no mask
        4  [#]  [#]  [#]  [#]  [/]   .    .    .     .   seen by no row:
        5  [#]  [#]  [#]  [#]  [#]  [/]   .    .         never loaded
        6  [#]  [#]  [#]  [#]  [#]  [#]  [/]   .
        7  [#]  [#]  [#]  [#]  [#]  [#]  [#]  [/]
"""

LONGEST_FIRST = """\
in order                      longest first
SM 0  1 55555                 SM 0  88888888 1      a digit: one step of a
SM 1  22 666666               SM 1  7777777 22      block that has so many
SM 2  333 7777777             SM 2  666666 333
SM 3  4444 88888888           SM 3  55555 4444
      12 steps                      9 steps
"""

PIPELINE = """\
one buffer     loads  | load 0 |        | load 1 |        | load 2 |
               MMAs            | mma 0  |        | mma 1  |        | mma 2  |

three buffers  loads  | load 0 | load 1 | load 2 | load 3 | load 4 | load 5 |
               MMAs            | mma 0  | mma 1  | mma 2  | mma 3  | mma 4  |
"""

TILE_ORDER = """\
row after row: 8 tiles run at once    bands of 2 rows: the same 8 tiles
       columns of b                          columns of b
       0  1  2  3  4  5  6  7                0  1  2  3
a  0 [ 0  1  2  3  4  5  6  7]        a  0 [ 0  2  4  6]  8 10 12 14
   1   8  9 10 11 12 13 14 15            1 [ 1  3  5  7]  9 11 13 15
   2  16 17 ...                          2  16 18 ...
reads 1 + 8 panels                    reads 2 + 4 panels
"""

WAVES = """\
block per tile  SM 0  [start tile 0 end][start tile 4 end][start tile 8 end]
                SM 1  [start tile 1 end][start tile 5 end][start tile 9 end]

persistent      SM 0  [start tile 0 tile 4 tile 8 end]
                SM 1  [start tile 1 tile 5 tile 9 end]
"""

HEADS_AS_ROWS = """\
a block per head (B)                     heads as rows of a block (A)
       16 rows of the MMA                       64 rows of the MMA
block 0  [h.............]  <- keys       block 0  [hhhhhhhhhhhhhh]  <- keys
block 1  [h.............]  <- keys
block 2  [h.............]  <- keys       h: a row that holds a head's query
  ...                                    .: a row of padding
"""
