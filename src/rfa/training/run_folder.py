"""The run folder: what joins training, evaluation and reports.

run.json         what was asked, resolved; versions, commit, data; how far it came and what it measured
tokenizer/       as transformers saves it
metrics.jsonl    a line for each logged step
tensorboard/     the same for TensorBoard
checkpoints/     the newest two, each whole
model/           the trained model, as transformers saves it
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

import rfa.version
from rfa.files import write_whole
from rfa.models import RFAForCausalLM

from .quiet import quiet_transformers
from .spec import TrainingSpec

FORMAT = 1
_CHECKPOINT_FILES = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")


class RunFolder:
    """A run on disk.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.tokenizer = self.path / "tokenizer"

    @classmethod
    def create(cls, path: str | Path, overwrite: bool = False) -> "RunFolder":
        """An empty run folder.

        Raises:
            ValueError: if something is there already, unless it is a run and `overwrite` is given.
        """
        run = cls(path)
        if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
            if not run._is_run():
                raise ValueError(f"out: {run.path} exists and is no run folder, expected a new or an empty folder")
            if not overwrite:
                raise ValueError(f"out: run folder {run.path} exists, expected a new one, --resume or --overwrite")
            shutil.rmtree(run.path)
        run.path.mkdir(parents=True, exist_ok=True)
        return run

    def _is_run(self) -> bool:
        try:
            return {"format", "spec"} <= json.loads((self.path / "run.json").read_text(encoding="utf-8")).keys()
        except (OSError, ValueError, AttributeError):
            return False

    def read(self) -> dict[str, Any]:
        """The contents of run.json.

        Raises:
            ValueError: if the folder is no run, is damaged or was written by another version.
        """
        file = self.path / "run.json"
        if not file.is_file():
            raise ValueError(f"run: {self.path} holds no run.json, expected a folder made by `rfa train`")
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            written = record["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"run: {file} is damaged ({error}), expected the run.json of `rfa train`") from error
        if written != FORMAT:
            raise ValueError(f"run: {self.path} has format {written}, expected {FORMAT}, that of rfa {_version()}")
        missing = {"spec", "data", "config", "steps", "finished"} - record.keys()
        if missing:
            raise ValueError(f"run: {file} is damaged, it lacks {', '.join(sorted(missing))}")
        try:
            TrainingSpec.from_dict(record["spec"])
            _ = record["data"]["fingerprint"], record["data"]["test_fingerprint"]
            _ = record["result"]["valid_perplexity"] if record["finished"] else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"run: {file} is damaged ({error}), expected the run.json of `rfa train`") from error
        return record

    def write(self, record: dict[str, Any]) -> None:
        """Replace run.json, whole."""
        text = json.dumps({"format": FORMAT, **record}, indent=2) + "\n"
        write_whole(self.path / "run.json", lambda path: path.write_text(text, encoding="utf-8"))

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, if there is one."""
        found = checkpoints_in(self.checkpoints)
        whole = [path for path in found if _is_complete(path)]
        return whole[-1] if whole else None

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Raise `ValueError` where a file of a checkpoint cannot be read."""
        hint = "delete it to go on from the one before"
        _load(f"run: {checkpoint} is damaged, {hint}: it", lambda: _read_all(checkpoint))

    def load_model(self) -> RFAForCausalLM:
        """The trained model, or the newest checkpoint's where the run is not finished.

        Raises:
            ValueError: if there is none, or its files are damaged.
        """
        self.read()
        source = self.model if self.model.is_dir() else self.latest_checkpoint()
        if source is None:
            raise ValueError(f"run: {self.path} holds no model yet, expected a finished run or a checkpoint")
        return _load(f"run: the model in {source}", lambda: RFAForCausalLM.from_pretrained(source).eval())

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The run's tokenizer.

        Raises:
            ValueError: if its files are damaged.
        """
        where = f"run: the tokenizer in {self.tokenizer}"
        return _load(where, lambda: PreTrainedTokenizerFast.from_pretrained(self.tokenizer))


def environment() -> dict[str, Any]:
    """Versions, commit and machine of this process."""
    return {
        "rfa": _version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "tokenizers": tokenizers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _is_complete(checkpoint: Path) -> bool:
    """Checkpoints are renamed into place when they are whole; this finds those that lost a file since."""
    sharded = any(checkpoint.glob("*fsdp*"))  # FSDP has files of its own for weights and optimiser
    needed = ("trainer_state.json",) if sharded else _CHECKPOINT_FILES
    return all((checkpoint / name).is_file() for name in needed)


def _read_all(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        load_file(file)
    for name in ("optimizer.pt", "scheduler.pt"):
        if (checkpoint / name).is_file():
            torch.load(checkpoint / name, map_location="cpu", weights_only=True)
    for file in checkpoint.glob("rng_state*.pth"):  # Python's and NumPy's states among them; our own file
        torch.load(file, map_location="cpu", weights_only=False)
    for file in checkpoint.glob("*.json"):
        json.loads(file.read_text(encoding="utf-8"))
    _ = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]


def _load(what: str, load: Callable[[], Any]) -> Any:
    try:
        with quiet_transformers():
            return load()
    except Exception as error:  # the libraries beneath raise anything from OSError to SafetensorError
        raise ValueError(f"{what} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def _version() -> str:
    return rfa.version.__version__


def _commit() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
