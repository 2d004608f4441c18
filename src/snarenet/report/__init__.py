"""Figures, tables and the page of a run."""

from snarenet.report.evaluation import evaluation_table, sentence
from snarenet.report.page import write_report

__all__ = ["evaluation_table", "sentence", "write_report"]
