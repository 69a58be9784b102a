"""Training runs on transformers' Trainer."""

from .run_folder import RunFolder
from .spec import TrainingSpec
from .train import Stopped, resume, train

__all__ = ["RunFolder", "Stopped", "TrainingSpec", "resume", "train"]
