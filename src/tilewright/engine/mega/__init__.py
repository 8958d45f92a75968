"""Batch-1 decode of a Llama-family model in one persistent kernel, and a reference machine that
runs the same queues.
"""

from .shape import Config, Dims, Schedule

__all__ = ["Config", "Dims", "Schedule"]
