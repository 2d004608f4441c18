"""`approach_eagerly`: where a compiled model leaves its graph for a projection that looks at values, and comes back.

Imported by the first call that is traced, as `torch.compiler.disable` imports the whole compiler.
"""

from __future__ import annotations

import torch

from snarenet.repair.start.nearest import approach

approach_eagerly = torch.compiler.disable(approach)
