"""`ConstrainedRegressor`: a scikit-learn regressor whose predictions obey constraints.

    min_θ  mean_i |(y_i - Y_i) / σ|²   so that   l(x_i) <= g(y_i, x_i) <= u(x_i),   y_i = repair(M_θ(x_i))

with the features x_i and the targets Y_i of each sample, and σ the deviation of each target over all samples.
"""

from __future__ import annotations

from copy import deepcopy
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.layers import SnareLayer
from snarenet.layers.base import OnFailure
from snarenet.model import MLP, ConstrainedModel, Units
from snarenet.solution import Solution

try:
    from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
    from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
except ImportError as error:
    raise ImportError('`ConstrainedRegressor` needs scikit-learn: pip install "snarenet[sklearn]"') from error


class ConstrainedRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """A network with a repair behind it, trained on squared errors, for arrays and data frames.

    Args:
        constraints: the set of targets y (B, n) that are allowed at the features x (B, d), both in float64 and in
            their own units. Targets of the training data need not obey it.
        width: size of the network's hidden layers.
        depth: how many there are.
        epochs: how often training sees each sample.
        batch_size: how many samples a step sees.
        lr: of AdamW; it falls to zero along a cosine.
        weight_decay: of AdamW.
        tol: largest violation of a prediction.
        on_failure: what to do about predictions that could not be repaired: "warn", "raise" or "ignore".
        random_state: seed of the weights and of the order of samples.

    Attributes:
        model_: the trained `ConstrainedModel`.
        n_features_in_: how many features it was trained on; their names, where they had some: `feature_names_in_`.
        loss_: the mean squared error of each epoch, in units of the targets' variances.
    """

    def __init__(
        self,
        constraints: Constraints,
        *,
        width: int = 64,
        depth: int = 2,
        epochs: int = 100,
        batch_size: int = 64,
        lr: float = 1e-2,
        weight_decay: float = 1e-4,
        tol: float = 1e-8,
        on_failure: OnFailure = "warn",
        random_state: Any = None,
    ) -> None:
        self.constraints, self.width, self.depth = constraints, width, depth
        self.epochs, self.batch_size, self.lr, self.weight_decay = epochs, batch_size, lr, weight_decay
        self.tol, self.random_state = tol, random_state
        self.on_failure: OnFailure = on_failure

    def fit(self, X: Any, y: Any) -> ConstrainedRegressor:
        """Train on features X (N, d) and targets y (N, n), or (N,) for one."""
        for name in ("epochs", "batch_size"):
            if not isinstance(getattr(self, name), Integral) or getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be a whole number >= 1, but got {getattr(self, name)!r}")
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self._flat = y.ndim == 1
        inputs, targets = torch.tensor(X), torch.tensor(y, dtype=torch.float64).reshape(len(X), -1)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = MLP(inputs.shape[1], targets.shape[1], self.width, self.depth).double()
            layer = SnareLayer(deepcopy(self.constraints), tol=self.tol, on_failure=self.on_failure)
            self.model_ = ConstrainedModel(net, layer, Units.of(inputs, targets))
            self.loss_ = self._train(inputs, targets)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(N, n) predictions that obey the constraints, or (N,) if y had one dimension."""
        value = self.solve(X).value.numpy()
        return value[:, 0] if self._flat else value

    def solve(self, X: Any) -> Solution:
        """The same with status, steps and violation of every prediction."""
        check_is_fitted(self)
        with torch.no_grad():
            return self.model_.eval().solve(torch.tensor(validate_data(self, X, dtype=np.float64, reset=False)))

    def _train(self, x: Tensor, targets: Tensor) -> list[float]:
        model, scale, losses = self.model_.train(), self.model_.units.scale, []  # pyright: ignore
        optimizer = torch.optim.AdamW(model.net.parameters(), self.lr, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        for _ in range(self.epochs):
            total = 0.0
            for batch in torch.randperm(len(x)).split(self.batch_size):
                solution = model.solve(x[batch])
                loss = ((solution.value - targets[batch]) / scale).square().mean()
                optimizer.zero_grad()
                (loss + model.layer.proximity(solution, loss)).backward()
                optimizer.step()
                total += loss.item() * len(batch)
            schedule.step()
            losses.append(total / len(x))
        return losses
