"""The run folder: the one place that knows its files and what is in them.

Every file but metrics.jsonl is written whole or not at all, see `folder.py`, and checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.files import remove_drafts
from snarenet.model import ConstrainedModel
from snarenet.problems import Problem, load
from snarenet.training import forms
from snarenet.training.best import Kept
from snarenet.training.config import TrainConfig
from snarenet.training.folder import Folder, RunError, words
from snarenet.training.forms import misfit
from snarenet.training.parts.schedule import Keep
from snarenet.training.sketch import Sketch, differences, exact, sketch, whole
from snarenet.training.typical import Found

_CONFIG, _ENVIRONMENT, _METRICS = "config.json", "environment.json", "metrics.jsonl"
_CHECKPOINT, _MODEL = "checkpoint.safetensors", "model.safetensors"
_STEP = "layer.step"  # of the tensors: the factor of a step down the objective, if the layer takes one
_NAMED = 3  # tensors, where many differ
_EVALUATION, _INSTANCES, _REPORT = "evaluation.json", "evaluation.npz", "report.html"
FILES = {
    _CONFIG: "problem and configuration",
    _ENVIRONMENT: "machine and versions",
    _METRICS: "one line for every epoch",
    _CHECKPOINT: "what training needs to go on, the last weights and the best",
    _MODEL: "weights of the finished model",
    _EVALUATION: "results on the test instances",
    _INSTANCES: "results of every instance",
    _REPORT: "all of this on a page",
}


class Run(Folder):
    """A training run on disk.

    Attributes:
        path: its folder.
        config: its configuration.
        problem_name: the name of its problem; "" for a user's own.
        sizes: arguments of the problem.
        fingerprint: a hash of what follows; of a run of the first versions, one of all bytes of the problem's data.
        data: what was noted of the problem's data; None of a run of the first versions.
    """

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        problem_name: str,
        sizes: dict[str, Any],
        fingerprint: str,
        data: Sketch | None,
    ) -> None:
        super().__init__(path)
        self.config, self.problem_name, self.sizes = config, problem_name, sizes
        self.fingerprint, self.data = fingerprint, data

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig, problem: Problem) -> Run:
        """A new folder for a run of `config` on `problem`."""
        path = Path(path)
        cls.check_new(path)
        data = sketch(problem)
        fingerprint = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
        run = cls(path, config, problem.name, dict(problem.sizes), fingerprint, data)
        cls.make_folder(path)
        run.write_config()
        run.write_json(_ENVIRONMENT, environment(problem.inputs.device))
        return run

    @staticmethod
    def make_folder(path: str | Path) -> None:
        """Make a folder for a run, unless it is there."""
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the folder {path}: {error.strerror}") from error

    @classmethod
    def check_new(cls, path: str | Path) -> None:
        """Raise if a folder holds a run."""
        if cls.exists(path):
            raise RunError(f"{path} already holds a run; resume it, or choose another folder")

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in a folder."""
        path = Path(path)
        saved = Folder(path).read_json(_CONFIG)
        if saved is None:
            raise RunError(f"{path} holds no run: it has no {_CONFIG}")
        try:
            problem, config = saved["problem"], TrainConfig.from_dict(saved["config"])
            if said := misfit(problem, forms.PROBLEM, "'problem'"):
                raise TypeError(said)
            name, sizes, fingerprint = problem["name"], problem["sizes"], problem.get("fingerprint", "")
            data = problem.get("data", {})
            if None in (name, sizes, fingerprint, data) or not whole(data):
                raise TypeError("a part of 'problem' is missing or null")
            return cls(path, config, name, sizes, fingerprint, data or None)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{path / _CONFIG} is damaged or was not written by this version of snarenet: {words(error)}"
            ) from error

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Does a folder hold a run?"""
        return Path(path, _CONFIG).exists()

    @staticmethod
    def evaluated(path: str | Path) -> bool:
        """Does a folder hold a run that was evaluated, the last that is done about it?"""
        return Path(path, _EVALUATION).exists()

    @staticmethod
    def has_checkpoint(path: str | Path) -> bool:
        """Does a folder hold a run that can go on?"""
        return Path(path, _CHECKPOINT).exists()

    @classmethod
    def check_begun(cls, path: str | Path) -> None:
        """Raise unless a folder holds a run, or nothing yet, as after a kill before the first file was there."""
        empty = Path(path).is_dir() and all(file.name.startswith(".") for file in Path(path).iterdir())
        if not cls.exists(path) and not empty:
            raise RunError(f"{path} holds no run: it has no {_CONFIG}")

    @classmethod
    def begun(cls, path: str | Path) -> bool:
        """Is there a run to go on with? One that was stopped before its first checkpoint is removed.

        So is what a kill has left of files that were being written. A model, or an evaluation, is never removed.
        """
        path = Path(path)
        for name in (_CONFIG, _ENVIRONMENT, _METRICS, _CHECKPOINT, _MODEL):
            remove_drafts(path / name)
        if cls.has_checkpoint(path):
            return True
        if (path / _MODEL).exists() or (path / _EVALUATION).exists():
            raise RunError(f"{path} has a finished model, but no {_CHECKPOINT} to go on from: choose another folder")
        if cls.exists(path):
            cls.remove(path)
        return False

    @staticmethod
    def remove(path: str | Path) -> None:
        """Remove a run's files from a folder, and leave all others."""
        for name in FILES:
            Path(path, name).unlink(missing_ok=True)

    def resume(self, config: TrainConfig, problem: Problem) -> None:
        """Take over `config` for the rest of the run; an error unless it is a run on `problem` that this can go on.

        Only what does not change the epochs already done may differ.
        """
        if names := self.differing(problem):
            name = self.problem_name or "your own"
            raise RunError(f"{self.path} is a run of another problem ({name}): {_list(names)}")
        mine, given = self.config.to_dict(), config.to_dict()
        free = {"validate_every", "checkpoint_seconds", "keep"}
        if config.schedule == "constant" and config.warmup == 0:
            free.add("epochs")
        if config.relaxation != "adarel":
            free.add("relax_mode")  # nothing is measured
        changed = [name for name in mine if mine[name] != given[name] and name not in free]
        if changed:
            told = "; ".join(f"{name} was {mine[name]!r}, not {given[name]!r}" for name in changed)
            raise RunError(f"{self.path} is a run of another configuration: {told}")
        self.config = config

    def write_config(self) -> None:
        """Note down problem and configuration."""
        problem = {"name": self.problem_name, "sizes": self.sizes, "fingerprint": self.fingerprint}
        problem |= {} if self.data is None else {"data": self.data}
        self.write_json(_CONFIG, {"problem": problem, "config": self.config.to_dict()})

    def make_problem(self) -> Problem:
        """The problem that the configuration names, whatever its data."""
        try:
            return load(self.problem_name, **self.sizes)
        except (ValueError, MemoryError) as error:
            raise RunError(f"{self.path / _CONFIG} names no problem: {words(error)}") from error

    def load_problem(self) -> Problem:
        """The problem, made anew."""
        if not self.problem_name:
            raise RunError(f"{self.path} is a run of a problem of your own: pass it as `problem`")
        problem = self.make_problem()
        if names := self.differing(problem):
            raise RunError(
                f"{self.path}: the data of {self.problem_name!r} are not the same as when it was trained: "
                + _list(names)
            )
        return problem

    def differing(self, problem: Problem) -> list[str]:
        """What of a problem's data is not as it was in training, but for rounding."""
        if self.data is not None:
            return differences(self.data, sketch(problem))
        if self.fingerprint == exact(problem):
            return []
        if not self.problem_name or self.problem_name != problem.name or self.sizes != dict(problem.sizes):
            return ["all of it"]
        warnings.warn(
            f"{self.path} was written by a first version of snarenet, which noted the data of {problem.name!r} to the "
            "last digit; these differ, as they do on another machine",
            stacklevel=2,
        )
        return []

    def load_model(
        self, problem: Problem | None = None, net: torch.nn.Module | None = None, keep: Keep | None = None
    ) -> ConstrainedModel:
        """The trained model, or, of an unfinished run, what would be its model now.

        Args:
            problem: the problem, if it is your own and not one that `problems.load` knows.
            net: a network to load the weights into, if it was not built from the configuration.
            keep: "best" or "last" for these weights, from the checkpoint, whichever the configuration says.
        """
        problem = self.load_problem() if problem is None else problem
        name = _MODEL if keep is None and (self.path / _MODEL).exists() else _CHECKPOINT
        weights = self.read_tensors(_MODEL)[0] if name == _MODEL else self._weights(keep)
        blank = Found.blank(problem)  # what was found is among the weights; the layer depends on whether it has a step
        found = blank._replace(step=weights.get(_STEP, blank.step))
        model = self.config.build(problem, net, found=found, loads=True)
        if net is not None and not any(key.startswith("units.") for key in weights):
            model.units = None  # it was trained without any
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise RunError(f"{self.path / name}: the saved weights do not fit the model: {words(error)}") from error
        return model.eval()

    def _weights(self, keep: Keep | None) -> dict[str, Tensor]:
        """Weights from the checkpoint."""
        groups, _ = self.read_checkpoint()
        if keep == "best" and "best" not in groups:
            raise RunError(f"{self.path} has no best weights: no validation found a feasible output")
        best = groups.get("best") if (keep or self.config.keep) == "best" else None
        return best or groups.get("average") or groups.get("model", {})

    def save_model(self, model: ConstrainedModel, kept: Kept) -> None:
        """Write the weights of the finished model, and which they are."""
        self.write_tensors(_MODEL, model.state_dict(), kept.to_dict())

    def kept(self) -> Kept | None:
        """Which weights the finished model has; None before it is finished, or where that was not noted yet."""
        saved = self.read_tensors(_MODEL)[1] if (self.path / _MODEL).exists() else {}
        try:
            if said := misfit(saved, forms.KEPT):
                raise TypeError(said)
            return Kept.from_dict(saved) if saved else None
        except (KeyError, TypeError) as error:
            raise RunError(f"{self.path / _MODEL} is damaged or not a model of snarenet: {words(error)}") from error

    def save_checkpoint(self, groups: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Write all that training needs to go on: groups of tensors, and some numbers.

        The group "model" has the last weights, "average" their running average, and "best" the best validated ones.
        """
        tensors = {f"{group}.{name}".strip("."): t for group, named in groups.items() for name, t in named.items()}
        self.write_tensors(_CHECKPOINT, tensors, state | {"fingerprint": self.fingerprint})

    def read_checkpoint(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """What `save_checkpoint` was given."""
        if not (self.path / _CHECKPOINT).exists():
            raise RunError(f"{self.path} has no {_CHECKPOINT}: the run was stopped before its first checkpoint")
        tensors, state = self.read_tensors(_CHECKPOINT)
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            group, dot, name = key.partition(".")
            groups.setdefault(group if dot else "", {})[name if dot else key] = tensor
        said = misfit(state, forms.STATE, "its state")
        if said or None in (state.get("epoch"), state.get("seconds")):
            raise self.unfit(TypeError(said or "its epoch or its seconds are missing"))
        if state.get("best") is not None and (set(state["best"]) != set(forms.SCORE) or "best" not in groups):
            raise self.unfit(TypeError("its best weights or their score are not whole"))
        if state.get("fingerprint") != self.fingerprint:
            raise RunError(f"{self.path / _CHECKPOINT} belongs to another run")
        return groups, state

    def unfit(self, error: Exception) -> RunError:
        """What to raise where training cannot go on from the checkpoint, since `error` came of it."""
        return RunError(f"{self.path / _CHECKPOINT} does not fit the model and its training: {words(error)}")

    def saved_epoch(self) -> int:
        """The epoch of the last checkpoint."""
        return self.read_checkpoint()[1]["epoch"]

    def save_evaluation(self, summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Keep what `evaluate` found, and of which weights; the summary comes last: it says that the run is done."""
        kept = self.kept()
        self.write_arrays(_INSTANCES, arrays)
        self.write_json(_EVALUATION, summary | {"weights": kept and kept.to_dict()})

    def summary(self) -> dict[str, Any] | None:
        """What `evaluate` found, in sum."""
        found = self.read_json(_EVALUATION)
        if said := misfit(found, forms.SUMMARY):
            raise RunError(f"{self.path / _EVALUATION} is damaged or not an evaluation of snarenet: {said}")
        return found

    def instances(self) -> dict[str, np.ndarray] | None:
        """What `evaluate` found, instance by instance."""
        found = self.read_arrays(_INSTANCES)
        if said := forms.misfit_of_arrays(found or {}):
            raise RunError(f"{self.path / _INSTANCES} is damaged or not an evaluation of snarenet: {said}")
        return found

    def environment(self) -> dict[str, Any] | None:
        """Where and with what the run was made."""
        return self.read_json(_ENVIRONMENT)

    @property
    def report_path(self) -> Path:
        """Where the run's page is, or will be."""
        return self.path / _REPORT

    def save_report(self, page: str) -> Path:
        """Write the run's page, and return its path."""
        self.write_text(_REPORT, page)
        return self.report_path

    def log(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        try:
            with open(self.path / _METRICS, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.path / _METRICS}: {error.strerror}") from error

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the metrics; the last is left out if a kill cut it off."""
        path, lines = self.path / _METRICS, []
        texts = (self.read_text(_METRICS) or "").splitlines()
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                if number == len(texts):
                    break
                raise RunError(f"{path} is damaged: line {number} is not JSON ({words(error)})") from error
            said = misfit(line, forms.LINE)
            if said or line is None or line.get("epoch") is None:
                raise RunError(
                    f"{path} is damaged: line {number} is not that of an epoch ({said or 'which is missing'})"
                )
            lines.append(line)
        return lines

    def rewind(self, epoch: int) -> None:
        """Forget the metrics of epochs after `epoch`, from which training goes on."""
        kept = [line for line in self.metrics() if line["epoch"] <= epoch]
        self.write_text(_METRICS, "".join(json.dumps(line) + "\n" for line in kept))


def load_model(
    run: str | Path, problem: Problem | None = None, net: torch.nn.Module | None = None, keep: Keep | None = None
) -> ConstrainedModel:
    """The trained model of a run folder, in eval mode; see `Run.load_model`."""
    return Run.open(run).load_model(problem, net, keep)


def _list(names: list[str]) -> str:
    """Which data differ, in words."""
    return "other numbers in " + ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def default_folder(problem: Problem) -> Path:
    """Where a run goes that was given no folder."""
    return Path("runs") / f"{problem.name or 'own'}-{time.strftime('%Y%m%d-%H%M%S')}"


def environment(device: torch.device) -> dict[str, str]:
    """Where and with what a run was made."""
    return {
        "snarenet": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": str(torch.get_num_threads()),
        "git": _revision(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _version() -> str:
    try:
        return version("snarenet")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "unknown"


def _revision() -> str:
    """The git revision of the working directory, if it is a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
