"""Imputation by `RFAForTimeSeries` with the interface of PyPOTS: dictionaries of windows in, filled windows out."""

from rfa.checks import needs

needs("transformers")

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import check_range, require
from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig
from rfa.models.saved_files import read_model
from rfa.models.time_series_data import numbers

_CLIP = 1.0  # of the norm of all gradients
_FEWEST = 2  # readings of a window of training: one is hidden, one is seen


class RFANetworkImputer:
    """Imputer by a network that sees the readings on both sides of a gap, at any times.

    It is used as the imputers of PyPOTS are, which need not be installed. A set is a dictionary with "X", the windows
    `(samples, steps, features)` with NaN where nothing was read. It may have "times", `(steps,)` or `(samples, steps)`,
    increasing; else they are 0, 1, 2 and so on. In training a part of the readings of each window is hidden: single
    ones, or one block of rows. The loss is their negative log likelihood.

    Args:
        epochs: passes over the training windows.
        batch_size: windows of a step.
        learning_rate: the peak of a one-cycle schedule.
        hold_out: the share of the readings that is hidden.
        patience: epochs without a smaller error on `val_set`, after which training ends. None: all epochs.
        seed: of weights, order and hidden readings.
        device: of the network; by default a CUDA device where there is one.
        **config: fields of `RFATimeSeriesConfig`, such as `hidden_size` and `preset`.

    Attributes:
        model: the `RFAForTimeSeries`, after `fit`.
        losses: of training, the mean of each epoch.

    Raises:
        ValueError: for a number out of range. Each method raises it for sets that are none.
    """

    model: RFAForTimeSeries
    losses: list[float]

    def __init__(
        self,
        *,
        epochs: int = 100,
        batch_size: int = 32,
        learning_rate: float = 3e-3,
        hold_out: float = 0.2,
        patience: int | None = None,
        seed: int = 0,
        device: str | None = None,
        **config: Any,
    ):
        check_range("epochs", epochs, 1, 1_000_000)
        check_range("batch_size", batch_size, 1, 1_000_000)
        check_range("patience", 1 if patience is None else patience, 1, 1_000_000)
        for name, share in (("learning_rate", learning_rate), ("hold_out", hold_out)):
            require(0 < share < 1, name, share, "a number between 0 and 1")
        self.epochs, self.batch_size, self.learning_rate = epochs, batch_size, learning_rate
        self.hold_out, self.patience, self.seed, self.config = hold_out, patience, seed, config
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def fit(self, train_set: Mapping[str, Any], val_set: Mapping[str, Any] | None = None) -> Self:
        """Train a new network. With `val_set` the weights of the epoch with the smallest error on it are kept.

        Args:
            train_set: the windows. Those with fewer than two readings are left out.
            val_set: windows of which "X_ori" has the readings that "X" lacks. Their mean squared error is compared.

        Raises:
            ValueError: for sets that are none, no window with two readings, or a training that diverges.
        """
        values, times = _windows("train_set", train_set)
        kept = (~values.isnan()).sum((1, 2)) >= _FEWEST
        require(bool(kept.any()), "train_set", "windows without readings", "one with two readings at least")
        values, times = values[kept], times[kept]
        expected = "val_set with it, whose error is compared"
        require(self.patience is None or val_set is not None, "patience", self.patience, expected)
        truth = torch.empty(0) if val_set is None else _hidden_readings(val_set)
        best, waited, steps = math.inf, 0, math.ceil(len(values) / self.batch_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            fields = {"causal": False, **self.config}
            config = RFATimeSeriesConfig.from_data(list(zip(times, values, strict=True)), **fields)
            self.model, self.losses = RFAForTimeSeries(config), []
            cast(Any, self.model).to(self.device)
            weights = self.model.state_dict()
            optimizer = torch.optim.Adam(self.model.parameters(), self.learning_rate)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, self.learning_rate, total_steps=self.epochs * steps, cycle_momentum=False
            )
            for _ in range(self.epochs):
                self.losses.append(self._train_epoch(values, times, optimizer, schedule))
                if val_set is None:
                    continue
                error = float((torch.from_numpy(self.impute(val_set)) - truth).square().nanmean())
                waited = 0 if error < best else waited + 1
                if waited == 0:
                    best, weights = error, copy.deepcopy(self.model.state_dict())
                if waited == self.patience:
                    break
        if val_set is not None:
            self.model.load_state_dict(weights)
        self.model.eval()
        return self

    def _train_epoch(self, values: Tensor, times: Tensor, optimizer: Any, schedule: Any) -> float:
        """The mean loss of one pass."""
        self.model.train()
        losses = []
        for rows in torch.randperm(len(values)).split(self.batch_size):
            hidden = _hidden(values[rows], self.hold_out)
            parts = (
                times[rows],
                values[rows].masked_fill(hidden, torch.nan),
                values[rows].masked_fill(~hidden, torch.nan),
            )
            of_rows, seen, targets = (part.to(self.device) for part in parts)
            loss = self.model(of_rows, seen, targets=targets).loss
            require(bool(loss.isfinite()), "learning_rate", self.learning_rate, "a smaller one: training diverges")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return float(np.mean(losses))

    @torch.no_grad()
    def predict(self, test_set: Mapping[str, Any]) -> dict[str, Float[np.ndarray, "samples steps features"]]:
        """Fill windows.

        Returns:
            "imputation": X with the mean at each missing reading; "deviation": the standard deviation of what was
            filled in, 0 where a reading was kept.

        Raises:
            ValueError: before `fit`, for other features than those of training, and a window without any reading.
        """
        require(hasattr(self, "model"), "fit", "no training yet", "fit(train_set), or from_pretrained(folder)")
        values, times = _windows("test_set", test_set)
        empty = values.isnan().flatten(1).all(1).nonzero().flatten().tolist()
        require(not empty, "X", f"no reading in the windows {empty[:5]}", "a reading in each window")
        self.model.eval()
        parts = []
        for one, of_one in zip(values.split(self.batch_size), times.split(self.batch_size), strict=True):
            found = self.model(of_one.to(self.device), one.to(self.device)).distribution
            parts.append(torch.stack([found.mean, found.stddev]).to("cpu", torch.float64))
        mean, deviation = torch.cat(parts, dim=1)
        missing = values.isnan()
        filled = {"imputation": torch.where(missing, mean, values.double()), "deviation": deviation * missing}
        return {name: x.to(values.dtype).numpy() for name, x in filled.items()}

    def impute(self, test_set: Mapping[str, Any]) -> Float[np.ndarray, "samples steps features"]:
        """The windows without gaps: `predict(test_set)["imputation"]`."""
        return self.predict(test_set)["imputation"]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the network, as models of transformers do."""
        require(hasattr(self, "model"), "fit", "no training yet", "fit(train_set) first")
        self.model.save_pretrained(str(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Self:
        """An imputer with the network of `save_pretrained`. `options` are those of a new imputer."""
        found = cls(**options)
        found.model = read_model(Path(folder), RFAForTimeSeries)  # in evaluation mode
        cast(Any, found.model).to(found.device)
        return found


def _windows(name: str, given: Any) -> tuple[Tensor, Tensor]:
    """Values `(samples, steps, features)` and times `(samples, steps)` of a set."""
    expected = "a dictionary with X (samples, steps, features), and times where they are not 0, 1, 2, ..."
    require(isinstance(given, Mapping) and "X" in given, name, type(given).__name__, expected)
    values = numbers("X", given["X"])
    require(values.ndim == 3 and values.numel() > 0, "X", tuple(values.shape), "(samples, steps, features)")
    values = values if values.is_floating_point() else values.double()
    require(not bool(values.isinf().any()), "X", "infinite values", "finite ones, NaN where nothing was read")
    samples, steps, _ = values.shape
    times = torch.arange(steps, dtype=torch.float64) if given.get("times") is None else numbers("times", given["times"])
    fits = tuple(times.shape) in ((steps,), (samples, steps))
    require(fits, "times", tuple(times.shape), f"({steps},) or ({samples}, {steps})")
    return values, times.expand(samples, steps)


def _hidden_readings(given: Mapping[str, Any]) -> Tensor:
    """What a validation set knows of the readings that its windows lack, NaN elsewhere."""
    values, _ = _windows("val_set", given)
    require("X_ori" in given, "val_set", sorted(given), "X_ori too, with readings that X lacks")
    truth = numbers("X_ori", given["X_ori"])
    require(truth.shape == values.shape, "X_ori", tuple(truth.shape), f"{tuple(values.shape)}, as X")
    truth = truth.masked_fill(~values.isnan(), torch.nan)
    require(not bool(truth.isnan().all()), "X_ori", "no reading that X lacks", "some, whose error is compared")
    return truth


def _hidden(values: Tensor, share: float) -> Tensor:
    """Which readings of each window are hidden, `(batch, steps, features)`: at least one, and not all.

    In half of the windows single readings, in half a block of rows.
    """
    batch, steps, _ = values.shape
    seen = ~values.isnan()
    length = max(1, round(share * steps))
    first = torch.randint(steps - length + 1, (batch, 1))
    block = (torch.arange(steps) >= first) & (torch.arange(steps) < first + length)
    by_row = torch.rand(batch, 1, 1) < 0.5
    drawn = torch.rand(values.shape)
    hidden = seen & torch.where(by_row, block[..., None], drawn < share)
    order = drawn.masked_fill(~seen, math.inf).flatten(1)
    count, readings = hidden.flatten(1).sum(1), seen.flatten(1).sum(1)
    one = torch.zeros_like(order, dtype=torch.bool).scatter(1, order.argmin(1, keepdim=True), True).view_as(seen)
    unfit = ((count == 0) | (count == readings))[:, None, None]
    return torch.where(unfit, one, hidden)
