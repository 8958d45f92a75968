"""Batch-1 decode of a Llama-family model in one persistent kernel a token, and a reference machine that runs the same program."""

from .program import Dims, Kind, Phase, phases
from .schedule import Config, Schedule

__all__ = ["Config", "Dims", "Kind", "Phase", "Schedule", "phases"]
