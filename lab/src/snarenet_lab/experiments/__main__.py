"""`python -m snarenet_lab.experiments ITEM ...`: the same as `snarenet reproduce ITEM ...`, without tyro."""

from __future__ import annotations

import argparse
from pathlib import Path

from snarenet_lab.experiments.budget import BUDGETS
from snarenet_lab.experiments.reproduce import ITEMS, reproduce


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m snarenet_lab.experiments", description=__doc__)
    parser.add_argument("items", nargs="+", help=f"all, or some of {', '.join(ITEMS)}")
    parser.add_argument("--budget", choices=list(BUDGETS), default="smoke")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("reproduction"))
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--cluster")
    parser.add_argument("--stack-seeds", action="store_true", dest="stacked")
    parser.add_argument("--share", type=float)
    parser.add_argument("--only", nargs="+", default=(), metavar="LABEL")
    parser.add_argument("--no-train", action="store_false", dest="train")
    parser.add_argument("--engine", default="ipopt")
    parser.add_argument("--device", default="cpu")
    for found in reproduce(**vars(parser.parse_args())):
        print(f"{found.item}: {found.origin['done']} of {found.origin['runs']} runs", *found.remarks, sep="\n  ")


if __name__ == "__main__":
    main()
