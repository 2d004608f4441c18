"""Figures, tables and the page of results."""

from snarenet.report.page import write_report
from snarenet.report.results_page import write_results_page
from snarenet.report.tables import evaluation_table, sentence

__all__ = ["evaluation_table", "sentence", "write_report", "write_results_page"]
