"""Finds the fastest configs: measured on this GPU, stored, and looked up by `launch.Decision`.

Never inside a call of an op.
"""
