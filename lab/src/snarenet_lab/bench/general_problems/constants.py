"""Constants of the problems; what these are written with is in `snarenet.problems.arithmetic`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


class Constants:
    """Arrays by name; as tensors they are copied to a device once, where neither a compiler nor a recording sees it.

    Args:
        arrays: numbers or indices.
    """

    def __init__(self, **arrays: Array) -> None:
        self.arrays = arrays
        self._tensors: dict[torch.device, dict[str, Tensor]] = {}

    def beside(self, y: Any) -> dict[str, Tensor]:
        """The tensors on the device of y; on the CPU if it is not torch's."""
        device = y.device if isinstance(y, Tensor) else torch.device("cpu")
        if device not in self._tensors:
            self._tensors[device] = {name: torch.from_numpy(v).to(device) for name, v in self.arrays.items()}
        return self._tensors[device]
