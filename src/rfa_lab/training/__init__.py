"""Training runs on transformers' Trainer."""

from rfa.checks import needs

needs("accelerate", "pydantic", "tensorboard", "transformers")

from .callbacks import Stopped
from .run_folder import RunFolder
from .spec import TrainingSpec
from .train import TRAINED_ON, resume, train

__all__ = [
    "TRAINED_ON",
    "RunFolder",
    "Stopped",
    "TrainingSpec",
    "resume",
    "train",
]
