"""`python -m snarenet.bench ITEM`: the same as `snarenet bench ITEM`, without tyro."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import torch

from snarenet.bench import ITEMS, bench


def main(arguments: list[str] | None = None) -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m snarenet.bench", description=__doc__)
    parser.add_argument("item", choices=[*ITEMS, "all"])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of the tables")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME VALUE", help="options of the item")
    given = parser.parse_args(arguments)
    if len(given.set) % 2:
        parser.error(f"--set needs pairs of names and values, but got {' '.join(given.set)}")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    options = dict(zip(given.set[::2], map(_literal, given.set[1::2]), strict=True))
    bench(given.item, torch.device(name), given.out, **options)


def _literal(text: str) -> object:
    """A Python value, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
