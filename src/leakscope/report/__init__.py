"""Rows of a store in, one self-contained HTML page out, or a SARIF log; the comparison of two stores; the page of a
published table."""

from leakscope.report.captured import render_captured, render_reproduction, write_captured, write_reproduction
from leakscope.report.compare import (
    Comparison,
    Difference,
    compare,
    compare_differences,
    compare_tables,
    write_comparison,
)
from leakscope.report.limits import Table, limits_tables, tables_of, vertical_tables
from leakscope.report.page import render, write_report
from leakscope.report.pictures import show
from leakscope.report.sarif import sarif_log
