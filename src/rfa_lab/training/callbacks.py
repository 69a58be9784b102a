"""Callbacks of training: metrics on disk and for TensorBoard, the stop on Ctrl-C, progress."""

import json
import logging
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainerState

from rfa.dynamics import regime
from rfa.files import named_errors, write_text_whole
from rfa.models.decoder import RFAPreTrainedModel
from rfa.progress import TrainingProgress

from .run_folder import RunFolder

REPEATED = 1.0  # seconds; a second signal within them is the same one, passed on by a launcher
_log = logging.getLogger(__name__)
_LOGGED_VALUES = ("loss", "grad_norm", "learning_rate", "eval_loss")


class Diverged(ValueError):
    """A loss or a gradient of training is not finite."""


class Stopped(Exception):
    """The run was saved and stopped at `step`, because of Ctrl-C or SIGTERM."""

    def __init__(self, step: int, steps: int):
        super().__init__(f"stopped at step {step} of {steps}")
        self.step, self.steps = step, steps


class MetricsLogger(TrainerCallback):
    """Write `metrics.jsonl` and TensorBoard files: losses, learning rates, and the dynamics of each layer and head.

    `tokens_at` says how many tokens training reads up to a step; `progress` is as for `train`.
    """

    def __init__(
        self,
        run: RunFolder,
        model: RFAPreTrainedModel,
        tokens_at: Callable[[int], int],
        progress: TrainingProgress | None,
    ):
        self.run, self.model, self.progress = run, model, progress
        self._tokens_at = tokens_at  # the Trainer's own count would wait for the device at each step
        self._seconds, self._mark, self._tokens_at_start = 0.0, 0.0, 0
        self.tokens = 0
        self._validated = 0  # batches
        self._board: SummaryWriter | None = None
        self._latest: dict[str, float] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Remove lines that were logged after the checkpoint from which a resumed run starts."""
        self._mark = time.perf_counter()
        self._tokens_at_start = self.tokens = self._tokens_at(state.global_step)
        if state.is_world_process_zero:
            lines = [line for line in read_metrics(self.run) if line["step"] <= state.global_step]
            write_text_whole(self.run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
            # TensorBoard hides what a stopped process wrote after its last checkpoint
            self._board = SummaryWriter(str(self.run.tensorboard), purge_step=state.global_step + 1)

    def on_step_end(self, args, state, control, **kwargs):
        """Measure the time of the step, and report progress."""
        self._seconds += time.perf_counter() - self._mark
        self._mark, self._validated = time.perf_counter(), 0
        self.tokens = self._tokens_at(state.global_step)
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps, self._latest)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write a line of `metrics.jsonl` and TensorBoard's scalars."""
        figures = {name: logs[name] for name in _LOGGED_VALUES if name in (logs or {})}
        if not figures or not state.is_world_process_zero:
            return
        if not all(math.isfinite(value) for value in figures.values()):
            raise Diverged(f"training: got {figures} at step {state.global_step}, expected finite numbers")
        if "eval_loss" in figures:
            figures = {"valid_loss": figures["eval_loss"], "valid_perplexity": math.exp(min(figures["eval_loss"], 700))}
        self._latest = {**self._latest, **figures}
        dynamics = {str(layer): _per_head(module()) for layer, module in self.model.head_dynamics().items()}
        line: dict[str, Any] = {
            "step": state.global_step,
            "epoch": round(state.epoch or 0.0, 6),
            "tokens": self.tokens,
            **figures,
        }
        with named_errors(self.run.metrics), self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "dynamics": dynamics} if dynamics else line) + "\n")
        by_head = {
            f"layer {layer}/{name}/head {head}": value
            for layer, parameters in dynamics.items()
            for name, heads in parameters.items()
            for head, value in enumerate(heads)
            if value is not None
        }
        if self._board is not None:
            for name, value in (figures | by_head).items():
                self._board.add_scalar(name, value, state.global_step)

    def on_prediction_step(self, args, state, control, **kwargs):
        """Report the progress of a validation."""
        self._validated += 1
        if self.progress is not None:
            share = self._validated / len(kwargs["eval_dataloader"])
            self.progress(state.global_step, state.max_steps, {**self._latest, "validated": share})

    def on_evaluate(self, args, state, control, **kwargs):
        """Exclude validation and saving from the training speed."""
        self._mark = time.perf_counter()

    on_save = on_evaluate

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._board is not None:
            with suppress(OSError):  # an error of the run says more
                self._board.close()

    @property
    def tokens_per_second(self) -> float | None:
        """Training speed over all devices; None before the first step.

        Loading data counts; validation and saving do not.
        """
        return round((self.tokens - self._tokens_at_start) / self._seconds, 1) if self._seconds else None


class StopOnSignal(TrainerCallback):
    """On Ctrl-C or SIGTERM, finish the step, save and stop. A later second signal stops immediately.

    Launchers pass the terminal's signal on, so each process gets it twice. Therefore a signal within one second of the
    first one does not count.
    """

    def __init__(self):
        self.stopped = self._announced = False
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self, state: TrainerState) -> None:
        """Raise `Stopped` where the run was stopped."""
        if self.stopped:
            raise Stopped(state.global_step, state.max_steps)

    def _handle(self, number, frame):
        if self.stopped and time.monotonic() - self._since > REPEATED:
            raise KeyboardInterrupt
        if not self.stopped:
            self.stopped, self._since = True, time.monotonic()

    def _announce(self, state):
        """Tell the user that the signal was received. A callback does this, because a signal handler must not write."""
        if self.stopped and not self._announced and state.is_world_process_zero:
            self._announced = True
            _log.warning("stopping when this step is done and saved; a second signal stops at once, unsaved")

    def on_substep_end(self, args, state, control, **kwargs):
        """Tell the user that the signal was received."""
        self._announce(state)

    on_step_begin = on_prediction_step = on_substep_end

    def on_step_end(self, args, state, control, **kwargs):
        """Ask the Trainer to save and stop."""
        stopped = self.stopped
        if args.world_size > 1:  # the signal can reach processes at different steps, but they must stop at the same one
            flag = torch.tensor(int(stopped), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            stopped = bool(flag)
            if stopped and not self.stopped:  # another process got the signal; this one will get it soon
                self.stopped, self._since = True, time.monotonic()
        if stopped:
            self._announce(state)  # now, because saving may take long
            # the Trainer logs before it saves: a loss that is not finite raises before such weights are saved
            control.should_log = control.should_save = control.should_training_stop = True

    on_evaluate = on_step_end  # a stop during validation saves after the validation


def read_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`. A line that was not written to its end is left out."""
    if not run.metrics.is_file():
        return []
    lines = []
    for line in run.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            read = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(read, dict) and isinstance(read.get("step"), int):
            lines.append(read)
    return lines


def _per_head(parameters: dict[str, Any]) -> dict[str, list[float | None]]:
    """The logged dynamics by name, each a list over heads: decay, noises, robustness, temperature, the regime's alpha.

    Alpha is None for a head without decay.
    """
    noise = parameters.get("noise")
    parts = [] if noise is None else [dict(zip(noise._fields, part, strict=True)) for part in noise.parts()]
    parameters = parameters | {f"{name}_{index}": x for index, part in enumerate(parts) for name, x in part.items()}
    values = {name: given.detach() for name, given in parameters.items() if name not in ("frequency", "noise")}
    values["alpha"] = regime(values["decay"], values["process_noise"], values["key_noise"])
    return {
        name: [float(f"{number:.6g}") if math.isfinite(number) else None for number in value.tolist()]
        for name, value in values.items()
    }
