"""Compiles kernels for any architecture without a GPU: registers, spills and instruction mix."""

from .build import compile_launches as compile_launches
from .cache import ResultCache as ResultCache
from .disassemble import Resources as Resources, ToolMissing as ToolMissing, find_tool as find_tool, require_tools as require_tools
from .job import Compiled as Compiled
from .own import compile_report as compile_report
from .report import ARCHS as ARCHS, compile_ops as compile_ops, representative as representative
from .signature import kernel_signature as kernel_signature
