"""Training: configuration, trainer, run folders, evaluation."""

from snarenet.training.config import TrainConfig
from snarenet.training.evaluate import Evaluation, evaluate
from snarenet.training.progress import tensorboard
from snarenet.training.run import Run, RunError, default_folder, load_model
from snarenet.training.trainer import Trainer

__all__ = [
    "Evaluation",
    "Run",
    "RunError",
    "TrainConfig",
    "Trainer",
    "default_folder",
    "evaluate",
    "load_model",
    "tensorboard",
]
