"""How fast: interleaved timing against peers, measured roofs, one line a case."""
