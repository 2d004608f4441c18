"""The run folder: the one place that knows its files and their formats.

Every file but metrics.jsonl is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.files import write_whole
from snarenet.model import ConstrainedModel
from snarenet.problems import Problem, load
from snarenet.training.best import Kept
from snarenet.training.config import TrainConfig
from snarenet.training.parts.schedule import Keep

_CONFIG, _ENVIRONMENT, _METRICS = "config.json", "environment.json", "metrics.jsonl"
_CHECKPOINT, _MODEL = "checkpoint.safetensors", "model.safetensors"
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


class RunError(RuntimeError):
    """Something is wrong with a run folder; the message is one sentence for people."""


class Run:
    """A training run on disk.

    Attributes:
        path: its folder.
        config: its configuration.
        problem_name: the name of its problem; "" for a user's own.
        sizes: arguments of the problem.
        fingerprint: a hash of the problem's data.
    """

    def __init__(self, path: Path, config: TrainConfig, problem_name: str, sizes: dict[str, Any], fingerprint: str):
        self.path, self.config = path, config
        self.problem_name, self.sizes, self.fingerprint = problem_name, sizes, fingerprint

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig, problem: Problem) -> Run:
        """A new folder for a run of `config` on `problem`."""
        path = Path(path)
        if cls.exists(path):
            raise RunError(f"{path} already holds a run; resume it, or choose another folder")
        run = cls(path, config, problem.name, dict(problem.sizes), fingerprint(problem))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the folder {path}: {error.strerror}") from error
        run.write_json(_ENVIRONMENT, environment(problem.inputs.device))
        run.write_config()
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in a folder."""
        path = Path(path)
        try:
            saved = json.loads((path / _CONFIG).read_text())
            problem = saved["problem"]
            config = TrainConfig.from_dict(saved["config"])
            return cls(path, config, problem["name"], problem["sizes"], problem.get("fingerprint", ""))
        except FileNotFoundError as error:
            raise RunError(f"{path} holds no run: it has no {_CONFIG}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path / _CONFIG} was not written by this version of snarenet: {error}") from error

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Does a folder hold a run?"""
        return Path(path, _CONFIG).exists()

    @staticmethod
    def evaluated(path: str | Path) -> bool:
        """Does a folder hold a run that was evaluated, the last that is done about it?"""
        return Path(path, _EVALUATION).exists()

    @classmethod
    def begun(cls, path: str | Path) -> bool:
        """Is there a run to go on with? One that was stopped before its first checkpoint is removed."""
        if Path(path, _CHECKPOINT).exists():
            return True
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
        if self.fingerprint != fingerprint(problem):
            raise RunError(f"{self.path} is a run of another problem ({self.problem_name or 'your own'})")
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
        self.write_json(_CONFIG, {"problem": problem, "config": self.config.to_dict()})

    def load_problem(self) -> Problem:
        """The problem, made anew."""
        if not self.problem_name:
            raise RunError(f"{self.path} is a run of a problem of your own: pass it as `problem`")
        problem = load(self.problem_name, **self.sizes)
        if fingerprint(problem) != self.fingerprint:
            raise RunError(f"{self.path}: the data of {self.problem_name!r} are not the same as when it was trained")
        return problem

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
        model = self.config.build(problem)
        if net is not None:
            model = ConstrainedModel(net, model.layer)
        try:
            model.load_state_dict(self._weights(keep))
        except RuntimeError as error:
            raise RunError(f"{self.path}: the saved weights do not fit the model: {error}") from error
        return model.eval()

    def _weights(self, keep: Keep | None) -> dict[str, Tensor]:
        if keep is None and (self.path / _MODEL).exists():
            return self.read_tensors(_MODEL)[0]
        groups, _ = self.read_checkpoint()
        if keep == "best" and "best" not in groups:
            raise RunError(f"{self.path} has no best weights: no validation found a feasible output")
        best = groups.get("best") if (keep or self.config.keep) == "best" else None
        return best or groups.get("average") or groups["model"]

    def save_model(self, model: ConstrainedModel, kept: Kept) -> None:
        """Write the weights of the finished model, and which they are."""
        self.write_tensors(_MODEL, model.state_dict(), kept.to_dict())

    def kept(self) -> Kept | None:
        """Which weights the finished model has; None before it is finished, or where that was not noted yet."""
        saved = self.read_tensors(_MODEL)[1] if (self.path / _MODEL).exists() else {}
        return Kept.from_dict(saved) if saved else None

    def save_checkpoint(self, groups: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Write all that training needs to go on: groups of tensors, and some numbers.

        The group "model" has the last weights, "average" their running average, and "best" the best validated ones.
        """
        tensors = {f"{group}.{name}".strip("."): t for group, named in groups.items() for name, t in named.items()}
        self.write_tensors(_CHECKPOINT, tensors, state | {"fingerprint": self.fingerprint})

    def read_checkpoint(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """What `save_checkpoint` was given."""
        tensors, state = self.read_tensors(_CHECKPOINT)
        if state.get("fingerprint") != self.fingerprint:
            raise RunError(f"{self.path / _CHECKPOINT} belongs to another run")
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            group, dot, name = key.partition(".")
            groups.setdefault(group if dot else "", {})[name if dot else key] = tensor
        return groups, state

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
        return self.read_json(_EVALUATION)

    def instances(self) -> dict[str, np.ndarray] | None:
        """What `evaluate` found, instance by instance."""
        return self.read_arrays(_INSTANCES)

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

    def write_tensors(self, name: str, tensors: dict[str, Tensor], state: dict[str, Any] | None = None) -> None:
        """Write tensors to a safetensors file, with some numbers in its header."""
        from safetensors.torch import save

        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        self._write(name, lambda file: file.write(save(plain, {"state": json.dumps(state or {})})))

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and numbers of a safetensors file."""
        from safetensors import SafetensorError, safe_open

        path = self.path / name
        if not path.exists():
            raise RunError(f"{self.path} has no {name}: the run was stopped before its first checkpoint")
        try:
            with safe_open(path, "pt") as file:
                state = json.loads(file.metadata()["state"])
                return {key: file.get_tensor(key) for key in file.keys()}, state  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise RunError(f"{path} is damaged or not a checkpoint of snarenet: {error}") from error

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file."""
        self.write_text(name, json.dumps(content, indent=1))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file, if it is there."""
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except ValueError as error:
            raise RunError(f"{path} must hold JSON, but it does not: {error}") from error

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        self._write(name, lambda file: file.write(text.encode()))

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Write arrays to an npz file."""
        self._write(name, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    def read_arrays(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays of an npz file, if it is there."""
        path = self.path / name
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    def _write(self, name: str, write: Callable[[Any], object]) -> None:
        path = self.path / name
        try:
            write_whole(path, write)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}; what was saved before is intact") from error

    def log(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        try:
            with open(self.path / _METRICS, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.path / _METRICS}: {error.strerror}") from error

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the metrics; one that a kill cut off is left out."""
        path = self.path / _METRICS
        lines = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
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


def default_folder(problem: Problem) -> Path:
    """Where a run goes that was given no folder."""
    return Path("runs") / f"{problem.name or 'own'}-{time.strftime('%Y%m%d-%H%M%S')}"


def fingerprint(problem: Problem) -> str:
    """A hash of the problem's data: every tensor in it."""
    digest = hashlib.sha256(type(problem).__name__.encode())
    for name, tensor in sorted(problem.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


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
