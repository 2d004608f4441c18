"""Row scales D: the squared length of each row, so that multiplying a constraint by a number changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

VANISHING = 1e-8  # share of the mean squared length of rows that a vanishing row is given
_LARGEST = 0.75  # power of the largest number: no scale is above, so that it can be multiplied by a damping


def positive(norms: Tensor) -> Tensor:
    """Row scales from squared row lengths: a vanishing row gets a small share of the mean instead.

    Squares that overflow, or nearly do, are cut, and do not count in the mean: they say nothing of the other rows.
    """
    largest = torch.finfo(norms.dtype).max ** _LARGEST
    mean = torch.where(norms < largest, norms, 0.0).mean(-1, keepdim=True)
    return torch.maximum(norms.clamp(max=largest), torch.where(mean > 0, VANISHING * mean, 1.0))
