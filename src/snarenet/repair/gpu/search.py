"""`search`: that of `start/active_set.py` by a kernel, one block a sample, where rows are constant and fit."""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.constraints.maps import Map
from snarenet.memo import Memo
from snarenet.repair.gpu import launching, rows
from snarenet.repair.gpu.rows import PackedRows
from snarenet.repair.start.active_set import FLAT, Task, enough


def pack(memo: Memo, map: Map, y: Tensor) -> PackedRows | None:
    """The rows for the kernel; None if it cannot take them."""
    if not launching.supported(y) or not rows.suits(map):
        return None
    used = min(map.rows, y.shape[1])  # more of them can hardly be active at the nearest point
    return memo.get(("search", y.dtype, y.device), rows.tensors(map), lambda: rows.pack("search", map, None, y, used))


def search(packed: PackedRows, task: Task, shares: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(z, multipliers, found); first with two blocks on a multiprocessor, then for samples that need more memory."""
    (_, lower, upper, _), y, weights, reach = task
    y, lower, upper, reach = (tensor.contiguous() for tensor in (y, lower, upper, reach))
    z, multipliers = torch.empty_like(y), torch.empty_like(reach)
    outcome = torch.empty(len(y), dtype=torch.int32, device=y.device)
    rooms = [rows.room(packed, y, blocks) for blocks in (2, 1)]
    for again, room in enumerate(rooms[:1] if rooms[0] == packed.kept else rooms):
        rows.launch(
            "search", "search", packed, y,
            y, lower, upper, weights.contiguous(), reach, launching.constants(shares, y.dtype, y.device), len(shares),
            FLAT, enough(y), room, again, z, multipliers, outcome, used=room,
        )  # fmt: skip
    return z, multipliers, outcome == rows.FOUND
