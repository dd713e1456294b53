"""Rows of a store in, one self-contained HTML page out; the comparison of two stores; the page of a published table."""

from leakscope.report.compare import Comparison, compare, compare_tables, write_comparison
from leakscope.report.page import render, write_report
from leakscope.report.reproduction import render_reproduction, write_reproduction

__all__ = [
    "Comparison",
    "compare",
    "compare_tables",
    "render",
    "render_reproduction",
    "write_comparison",
    "write_report",
    "write_reproduction",
]
