"""`run_eagerly`: where a compiled model leaves its graph for a repair that cannot be traced, and comes back.

`torch.compiler.disable` imports the compiler, seconds of work that a model without torch.compile never needs. So this
file is imported by the first call that is traced, and by nobody else.
"""

from __future__ import annotations

import torch

from snarenet.repair.autograd import run

run_eagerly = torch.compiler.disable(run)
