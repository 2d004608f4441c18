"""`python -m snarenet_lab.bench ITEM`: the same as `snarenet bench ITEM`, without tyro."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from snarenet.training import RunError
from snarenet_lab.bench import ITEMS, bench
from snarenet_lab.options import literal


def main(arguments: list[str] | None = None) -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m snarenet_lab.bench", description=__doc__)
    parser.add_argument("item", choices=[*ITEMS, "all"])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of the tables")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME VALUE", help="options of the item")
    given = parser.parse_args(arguments)
    if len(given.set) % 2:
        parser.error(f"--set needs pairs of names and values, but got {' '.join(given.set)}")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    options = dict(zip(given.set[::2], map(literal, given.set[1::2]), strict=True))
    try:
        bench(given.item, torch.device(name), given.out, **options)
    except RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
