"""`python -m snarenet_lab.report FOLDER`: fill the tables of the pages in a folder from its data and results."""

from __future__ import annotations

import argparse
from pathlib import Path

from snarenet_lab.report.pages import write_pages


def main() -> None:
    """Write what has changed, and say it."""
    parser = argparse.ArgumentParser(prog="python -m snarenet_lab.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the pages, with data/ and results/ in it")
    for path in write_pages(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
