"""Doors: models that were written for other tools, read as constraint sets; one file a tool.

`Constraints.from_cvxpy`, `from_casadi` and `from_nl` lead here. Each tool is an extra, imported where it is used.
"""
