"""Measures speed: interleaved timing against peers, measured roofs, one line per case."""
