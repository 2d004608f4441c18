"""`ConstrainedRegressor` in scikit-learn: pipelines, searches, data frames, and the package's own checks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import snarenet as sn

pytest.importorskip("sklearn", reason="the extra sklearn is not installed")

from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from snarenet.doors.sklearn import ConstrainedRegressor


def shares() -> sn.Constraints:
    """Non-negative parts of a total, which is the first feature."""
    return sn.Box(0.0, None) & sn.Linear(torch.ones(1, 3), equals=lambda x: x[:, :1])


def data(count: int = 200, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    X = generator.uniform(1, 3, (count, 2))
    parts = np.exp(np.stack([X[:, 1], -X[:, 1], 0 * X[:, 1]], 1))
    Y = X[:, :1] * parts / parts.sum(1, keepdims=True)
    return X, Y + noise * generator.normal(size=Y.shape)


def regressor(**options) -> ConstrainedRegressor:
    return ConstrainedRegressor(shares(), **{"width": 16, "epochs": 15, "random_state": 0, **options})


def test_predictions_obey_and_fit() -> None:
    X, Y = data()
    fitted = regressor(epochs=35).fit(X[:150], Y[:150])
    y = fitted.predict(X[150:])
    assert y.shape == (50, 3)
    assert y.min() >= -1e-8
    assert np.abs(y.sum(1) - X[150:, 0]).max() <= 1e-8
    truth = data(noise=0.0)[1][150:]
    free = LinearRegression().fit(X[:150], Y[:150]).predict(X[150:])
    assert np.square(y - truth).mean() < 0.5 * np.square(free - truth).mean()
    assert fitted.score(X[150:], Y[150:]) > 0.5
    assert fitted.loss_[-1] < 0.5 * fitted.loss_[0]
    assert fitted.solve(X).converged.all()


def test_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    X, Y = data(60)
    frame, targets = pandas.DataFrame(X, columns=["total", "slope"]), pandas.DataFrame(Y, columns=list("abc"))
    fitted = regressor(epochs=2).fit(frame, targets)
    assert fitted.feature_names_in_.tolist() == ["total", "slope"]
    assert np.abs(fitted.predict(frame).sum(1) - frame["total"]).max() <= 1e-8
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(frame.rename(columns={"slope": "other"}))


def test_searches_pipelines_and_clones() -> None:
    X, Y = data(60)
    search = GridSearchCV(regressor(epochs=3), {"width": [4, 16], "lr": [1e-2, 1e-7]}, cv=2).fit(X, Y)
    assert search.best_params_["lr"] == 1e-2
    assert np.abs(search.predict(X).sum(1) - X[:, 0]).max() <= 1e-8
    piped = make_pipeline(FunctionTransformer(), regressor(epochs=2)).fit(X, Y)
    assert np.abs(piped.predict(X).sum(1) - X[:, 0]).max() <= 1e-8
    assert len(cross_val_score(regressor(epochs=2), X, Y, cv=2)) == 2
    first, second = regressor(epochs=2), clone(regressor(epochs=2, width=8)).set_params(width=16)
    assert np.array_equal(first.fit(X, Y).predict(X), second.fit(X, Y).predict(X))


def test_seeds() -> None:
    X, Y = data(60)
    before = torch.get_rng_state()
    first, other = (regressor(epochs=1, random_state=seed).fit(X, Y).predict(X) for seed in (0, 1))
    assert np.abs(first - other).max() > 1e-3
    assert torch.equal(before, torch.get_rng_state())


def test_failures_are_reported() -> None:
    X, Y = data(60)
    fitted = regressor(epochs=1, on_failure="raise").fit(X, Y)
    with pytest.raises(sn.RepairError, match="STALLED"):
        fitted.predict(-X)  # a negative total of non-negative parts


def test_wrong_arguments() -> None:
    X, Y = data(20)
    with pytest.raises(ValueError, match="`epochs` must be a whole number >= 1, but got 0"):
        regressor(epochs=0).fit(X, Y)
    with pytest.raises(TypeError, match="`constraints` must be a set of constraints, but got str"):
        ConstrainedRegressor("none").fit(X, Y)  # pyright: ignore


def test_pickled() -> None:
    X, Y = data(60)
    fitted = ConstrainedRegressor(sn.Box(0.0, 2.0), epochs=2, random_state=0).fit(X, Y)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(fitted.predict(X), again.predict(X))
    assert again.predict(X).max() <= 2.0 + 1e-8


# joblib gives a tensor and its copy different hashes, and so the set before and after a fit
HASHES = {"check_estimators_overwrite_params": "tensors have no stable hash"}


@parametrize_with_checks(
    [ConstrainedRegressor(sn.Box(-1e3, 1e3), width=16, epochs=20, random_state=0)],
    expected_failed_checks=lambda estimator: HASHES,
)
def test_checks_of_scikit_learn(estimator, check) -> None:
    check(estimator)
