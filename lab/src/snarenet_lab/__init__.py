"""snarenet-lab: what snarenet's claims rest on: comparisons, benchmarks, and the paper's experiments done again."""
