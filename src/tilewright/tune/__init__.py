"""Which config: measured on the GPU at hand, stored, looked up by `launch.Decision`.

Never inside a call of an op.
"""
