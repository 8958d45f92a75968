"""Batch-1 decode of a Llama-family model in one persistent kernel, and a reference machine that
runs the same queues.
"""

from .shape import Config as Config, Dims as Dims, Schedule as Schedule
