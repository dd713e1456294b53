"""Rows of a store in, one self-contained HTML page out; and the comparison of two stores."""

from leakscope.report.compare import Comparison, compare, compare_tables, write_comparison
from leakscope.report.page import render, write_report

__all__ = ["Comparison", "compare", "compare_tables", "render", "write_comparison", "write_report"]
