"""`python -m snarenet`, the same as `snarenet`."""

from snarenet.cli import main

if __name__ == "__main__":
    main()
