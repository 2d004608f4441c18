"""The paper's numbers, typed as its tables print them, read into rows."""

from __future__ import annotations

import re

from snarenet_lab.report.results import Cell, Row

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"


def paper_rows(text: str, seeds: int = 5) -> list[Row]:
    """The rows of a table such as

        method | gap_max | test_time
        DC3    | (8.81 ± 5.68)e-1 | 0.186 ± 0.074

    whose first line names the columns (see `quantities`); "-" for what the paper does not say.

    Args:
        text: the table.
        seeds: over how many the means are.
    """
    head, *body = [line for line in text.strip().splitlines() if line.strip()]
    keys = [key.strip() for key in head.split("|")][1:]
    rows = []
    for line in body:
        label, *numbers = [part.strip() for part in line.split("|")]
        if len(numbers) != len(keys):
            raise ValueError(f"the row {label!r} must have {len(keys)} numbers, but has {len(numbers)}")
        cells = {key: paper_cell(number) for key, number in zip(keys, numbers, strict=True) if number != "-"}
        rows.append(Row(label, "paper", cells, done=seeds))
    return rows


def paper_cell(text: str) -> Cell:
    """A number as the paper writes it.

    >>> paper_cell("(7.16 ± 16.00)e-3") == Cell(7.16e-3, 16e-3), paper_cell("0.00"), paper_cell("> 86400 s").text
    (True, Cell(mean=0.0, spread=None, values=(), text=''), '> 86400 s')
    """
    scaled = re.fullmatch(r"\((.*) ± (.*)\)(e[-+]?\d+)", text)
    if scaled:
        mean, spread, power = scaled.groups()
        return Cell(float(mean + power), float(spread + power))
    if re.fullmatch(f"{_NUMBER} ± {_NUMBER}", text):
        mean, spread = text.split(" ± ")
        return Cell(float(mean), float(spread))
    return Cell(float(text)) if re.fullmatch(_NUMBER, text) else Cell(text=text)
