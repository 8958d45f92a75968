"""Compiles kernels for any architecture without a GPU: registers, spills and instruction mix."""

from ..launch.identity import cache_folder
from .build import compile_launches
from .cache import ResultCache
from .disassemble import Resources, find_tool
from .job import Compiled
from .report import ARCHS, Row, compile_ops, every_case, representative, static_ok
from .signature import kernel_signature

__all__ = [
    "ARCHS",
    "Compiled",
    "Resources",
    "ResultCache",
    "Row",
    "cache_folder",
    "compile_launches",
    "compile_ops",
    "every_case",
    "find_tool",
    "kernel_signature",
    "representative",
    "static_ok",
]
