"""Row scales D: the squared length of each row, so that multiplying a constraint by a number changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

VANISHING = 1e-8  # share of the mean squared length of rows that a vanishing row is given


def positive(norms: Tensor) -> Tensor:
    """Row scales from squared row lengths: a vanishing row gets a small share of the mean instead."""
    mean = norms.mean(-1, keepdim=True)
    return torch.maximum(norms, torch.where(mean > 0, VANISHING * mean, 1.0))
