"""Compiles kernels for any architecture without a GPU: registers, spills and instruction mix."""

from ..launch.identity import cache_folder
from .build import compile_launches
from .cache import ResultCache
from .disassemble import Resources, ToolMissing, find_tool, require_tools
from .job import Compiled
from .own import KernelReport, compile_report
from .report import ARCHS, Row, compile_ops, every_case, representative, static_ok
from .signature import kernel_signature

__all__ = [
    "ARCHS",
    "Compiled",
    "KernelReport",
    "Resources",
    "ResultCache",
    "Row",
    "ToolMissing",
    "cache_folder",
    "compile_launches",
    "compile_ops",
    "compile_report",
    "every_case",
    "find_tool",
    "kernel_signature",
    "representative",
    "require_tools",
    "static_ok",
]
