"""Values of options on a command line."""

from __future__ import annotations

import ast


def literal(text: str) -> object:
    """A Python number, list or name, or else the text itself.

    >>> literal("1e-3"), literal("[8, 9]"), literal("adamw")
    (0.001, [8, 9], 'adamw')
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
