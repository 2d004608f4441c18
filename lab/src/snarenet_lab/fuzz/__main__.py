"""`python -m snarenet_lab.fuzz`: the same as `snarenet fuzz`, without tyro."""

from __future__ import annotations

import argparse
import sys

import torch

from snarenet_lab.fuzz import fuzz


def main(arguments: list[str] | None = None) -> None:
    """Search as the arguments say; exit code 1 if there are defects."""
    parser = argparse.ArgumentParser(prog="python -m snarenet_lab.fuzz", description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000, help="rows of batches to repair")
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    parser.add_argument("--seconds", type=float, help="time limit; none unless given")
    parser.add_argument("--only", type=int, metavar="INDEX", help="do this one case again")
    parser.add_argument("--most", type=int, default=10, help="defects after which to stop")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # batches are small
    search = fuzz(**vars(given))
    print(search.describe())
    sys.exit(bool(search.defects))


if __name__ == "__main__":
    main()
