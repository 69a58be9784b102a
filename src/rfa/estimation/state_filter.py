"""`RobustFilter` of a model's matrices or functions: several sensors, readings one by one, many tracks at once."""

import copy
import functools
import math
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from rfa.checks import check_choice, require, require_each

from .linear_model import FAULTS, Found, LinearKernel, Rows, check_model, fault_error, noise_name
from .linear_sde import DiscreteModel, LinearModel
from .nonlinear_filter import NonlinearKernel
from .nonlinear_model import NonlinearModel
from .parameter_search import LEAST_LOG, LONGEST_STEP, newton_maximum
from .robust_filter import RobustFilter
from .series import index_of
from .state_estimate import Kernel, Model, Shape, StateEstimate, read_control, read_rows, read_start, sensor_numbers
from .time_axis import TimeAxis, as_numbers, next_times

_FLOAT, _ARRAY = np.dtype(np.float64), np.ndarray
_MOST_ROUNDS = 4  # of a robust fit, which leaves out outliers
_MEDIAN_SQUARE = 0.4549  # of a normal error, in units of its variance


class StateFilter(RobustFilter):
    """`RobustFilter(model)` of matrices (`LinearSDE`, `LinearSDE.discrete`) or functions (`NonlinearModel`).

        dx = A x dt + B u dt + G dW,  G G^T = Q,    z = C x + e,  e ~ N(0, R)
        x_k = F x_k-1 + B u_k + q,  q ~ N(0, Q);    x_k = f(x_k-1, dt) + q,  z = h(x) + e

    No fit is needed: `filter(times, readings)` filters, and `update(time, reading)` goes on from what is there, the
    start or the last reading, in constant time and memory. Readings of `update` are not kept: `filter`, `smooth` and
    `predict` are of the readings of `fit`, `forecast` and `simulate` of all. All give `StateEstimate`s.

    Several sensors have names: `LinearSDE(A, Q, {"gps": C1, "radar": C2}, {"gps": R1, "radar": R2})`, or
    `NonlinearModel(f, Q, {"gps": Sensor(h1, R1), "radar": Sensor(h2, R2)})`.

    A `UserWarning` says where 20 readings in a row of a nonlinear model are beyond 99.9 % of what the filter expects.

    Args:
        model: the matrices or functions.
        robust: False: the (extended) Kalman filter and smoother, in which all readings have weight 1.
        time_unit: where times are dates: "second", "minute", "hour", "day", "week" or "year".
        start: mean `(n,)` and covariance `(n, n)`, or of each track. None: nothing is known (exact diffuse); a
            nonlinear model needs a start.
        start_at: where the start stands, needed with it. "reading": at the time of the first reading, which updates it
            (as in dynamax). "before": one step before (as filterpy's `predict`, then `update`), for discrete models.
            Or a time.
        control_matrix: B, `(n, inputs)`. The input of a row acts from the row before to this one. The f of a nonlinear
            model takes the input itself, `f(x, dt, u)`.
        state_names: by default x1, x2 and so on.
        weights: "reading": one weight for each reading of a sensor. "component": one for each component; R is diagonal.
            "auto": the one under which the readings so far are more probable, for nonlinear models. None: "auto" for
            these, else "reading".

    Example: filterpy's filter with `x` and `P` before its first `predict` is
    `RobustFilter(LinearSDE.discrete(F, Q, H, R), robust=False, start=(x, P), start_at="before")`.

    Raises:
        ValueError: naming the argument, for shapes that do not fit, a singular R, and a start without `start_at`.

    Warns:
        UserWarning: where no reading will tell some state of a diffuse start.
    """

    def __init__(
        self,
        model: Model,
        robust: bool = True,
        *,
        time_unit: str = "day",
        start: tuple[Any, Any] | None = None,
        start_at: Any = None,
        control_matrix: Any = None,
        state_names: Iterable[str] | None = None,
        weights: str | None = None,
    ):
        nonlinear = isinstance(model, NonlinearModel)
        require(nonlinear or isinstance(model, LinearModel), "model", type(model).__name__, "a LinearSDE")
        require(not nonlinear or start is not None, "start", None, "a mean and a covariance: the model is nonlinear")
        size = None if isinstance(model, NonlinearModel) else model.state_size
        self._start = read_start(start, start_at, size, isinstance(model, DiscreteModel))
        n = size or self._start[0].shape[1]  # type: ignore[index]
        names = tuple(f"x{k + 1}" for k in range(n)) if state_names is None else tuple(map(str, state_names))
        require(len(names) == n == len(set(names)), "state_names", names, f"{n} different names")
        TimeAxis.of([], time_unit)
        self._names, self._weights = names, weights or ("auto" if nonlinear else "reading")
        if isinstance(model, NonlinearModel):
            require(control_matrix is None, "control_matrix", "a matrix", "None: f(x, dt, u) takes the input itself")
        else:
            check_choice("weights", self._weights, ("reading", "component"))
            check_model(model, names, start is None)
            noise = model.observation_noise
            fits = self._weights == "reading" or torch.equal(noise, torch.diag(noise.diagonal()))
            require(fits, "weights", weights, "'reading' where R is not diagonal")
        control = np.zeros((n, 0)) if control_matrix is None else as_numbers("control_matrix", control_matrix)
        fits = control.ndim == 2 and len(control) == n and bool(np.isfinite(control).all())
        require(fits, "control_matrix", f"shape {control.shape}", f"finite numbers ({n}, inputs)")
        self._control = np.ascontiguousarray(control)
        self.model, self.robust, self.time_unit = model, robust, time_unit  # type: ignore[assignment]
        self.start, self.start_at, self.control_matrix = start, start_at, control_matrix
        self.state_names, self.weights = state_names, weights
        self._scales = {name: 1.0 for name in ("process_noise", *map(noise_name, model.sensors))}  # type: ignore[arg-type]
        self._axis: TimeAxis | None = None  # type: ignore[assignment]
        self._rows: Rows | None = None  # of `fit`, and what the filter has found there
        self._filtered_rows: Found | None = None
        self._shape, self._state = Shape(), np.zeros((0, 0))  # the state of each series after its last row
        self._steps: dict[Any, tuple[Any, ...]] = {}  # bound to the state, for each sensor that `update` has had
        self._lock = threading.RLock()
        _ = self._kernel  # its own checks

    @functools.cached_property
    def _kernel(self) -> Kernel:  # type: ignore[override]
        return self._new_kernel(self.robust, self._weights)

    def _new_kernel(self, robust: bool, weights: str, **scales: float) -> Kernel:
        if isinstance(self.model, NonlinearModel):
            return NonlinearKernel(self.model, self._names, robust, weights, self._scales | scales)
        given: Any = self.model, self._names, robust, weights == "component", self._control, self._scales | scales
        return LinearKernel(*given)

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock and compiled code."""
        with self._lock:
            kept = {name: x for name, x in vars(self).items() if name not in ("_lock", "_kernel")}
            return kept | {"_state": self._state.copy(), "_steps": {}}

    @property
    def parameters(self) -> dict[str, float]:
        """Factors of Q (`process_noise`) and R (`observation_noise`, `observation_noise.SENSOR`): 1 unless fitted."""
        return dict(self._scales)

    @property
    def log_likelihood(self) -> Any:  # type: ignore[override]
        """Of the readings of `fit`: see `StateEstimate`."""
        return self.filter().log_likelihood

    def fit(  # type: ignore[override]
        self,
        times: Any,
        readings: Any = None,
        *,
        sensor: Any = None,
        control: Any = None,
        mask: Any = None,
        noises: Iterable[str] = (),
        max_steps: int = 100,
    ) -> "StateFilter":
        """Take readings, filter them, and find the factors of noises by maximum likelihood where they are asked for.

        Args:
            times: `(T,)`, in order: numbers or dates; of tracks also `(tracks, T)`. Or a table of pandas alone.
            readings: `(T, m)`, or `(T,)` of one component: NaN, None or NA where a component is missing. Without
                `sensor` a row has the components of all sensors, one after another. `(tracks, T, m)` of many tracks.
            sensor: `(T,)` labels, or one: each row is of that sensor, in the first columns.
            control: `(T, inputs)`: u of each row, from the row before to it.
            mask: bool, `(..., T)` or as the readings: False where nothing was read, as after the end of a track.
            noises: names of `parameters` to be fitted, or "all". The given ones may all be off by one factor, as in
                other units than the readings. The robust fit leaves out outliers.
            max_steps: of that search.

        Returns:
            Itself.

        Raises:
            ValueError: naming the argument. The filter stays as it was.
        """
        found = copy.copy(self)
        found._state, given = np.zeros((0, 0)), (times, readings, sensor, control, mask)
        found._axis, found._rows, found._shape = read_rows(found._kernel, None, self.time_unit, *given)
        found._filter_again()
        if noises:
            found._fit_noises([*found._scales] if noises == "all" else [*noises], max_steps)
        with self._lock:
            vars(self).update({name: x for name, x in vars(found).items() if name != "_lock"})
        return self

    def filter(self, times: Any = None, readings: Any = None, **info: Any) -> StateEstimate:  # type: ignore[override]
        """The estimate at each row from it and earlier rows: of the readings of `fit`, or of these, as in `fit`."""
        with self._lock:
            if times is not None:
                self.fit(times, readings, **info)
            return self._estimate_rows(self._fitted_rows(), self._filtered_rows, self._shape)

    def smooth(self, times: Any = None, readings: Any = None, **info: Any) -> StateEstimate:  # type: ignore[override]
        """The estimate at each row from all rows: of the readings of `fit`, or of these, as in `fit`."""
        with self._lock:
            if times is not None:
                self.fit(times, readings, **info)
            rows, filtered = self._fitted_rows(), self._filtered_rows
            assert filtered is not None
            found = self._run_rows(rows, self._start_states(rows), smooth=True)
            return self._estimate_rows(rows, filtered.smoothed(found), self._shape)

    def forecast(  # type: ignore[override]
        self, query_times: Any, *, sensor: str | None = None, control: Any = None
    ) -> StateEstimate:
        """States and readings at later times, from all readings so far.

        Args:
            query_times: `(T,)`, in order. Or a number of steps: of a discrete model, or of the times of `fit`.
            sensor: whose readings; None: those of all sensors, one after another.
            control: as in `fit`.

        Raises:
            ValueError: for a time before the last reading, and where there is neither a reading nor a start.
        """
        with self._lock:
            started = len(self._state) > 0 or self._start is not None
            require(started, "forecast", "a state of which nothing is known", "readings, or a start, first")
            axis, rows, shape = self._query(query_times, sensor, control)
            found = self._run_rows(rows, self._present(rows, axis).copy(), "query_times", axis)
            return self._estimate_rows(rows, found, shape, axis)

    def predict(  # type: ignore[override]
        self, query_times: Any, return_std: bool = False, *, sensor: str | None = None
    ) -> Any:
        """Readings of one series at any times, in any order, from all readings of `fit`: smoothed or forecast.

        Returns:
            The means `(times, m)`, or they and the standard deviations.

        Raises:
            ValueError: for many tracks, and for a model with a control.
        """
        with self._lock:
            own = self._fitted_rows()
            require(not self._shape.tracks and own.control is None, "query_times", "tracks, or a control", "neither")
            _, asked, shape = self._query(query_times, sensor, None, in_order=False)
            times, count = np.concatenate([own.times[0], asked.times[0]]), own.times.shape[1]
            order = np.argsort(times, kind="stable")
            readings = np.full((1, len(times), own.readings.shape[2]), np.nan)
            readings[:, :count] = own.readings
            numbers = None if own.sensor is None else np.resize(own.sensor, (1, len(times)))[:, order]
            joined = Rows(times[None, order], readings[:, order], None, numbers)
            found = self._run_rows(joined, self._start_states(own), "query_times", smooth=True)
            found = Found(*(x[:, np.argsort(order)[count:]] for x in found))
            later = np.flatnonzero(asked.times[0] > own.times[0, -1])
            later = later[np.argsort(asked.times[0, later], kind="stable")]
            rows = Rows(*(None if x is None else x[:, later] for x in asked))  # type: ignore[arg-type]
            ahead = self._run_rows(rows, self._state.copy(), "query_times")
            found.mean[:, later], found.covariance[:, later] = ahead.mean, ahead.covariance
            estimate = self._estimate_rows(asked, found, shape)
            return (estimate.mean, estimate.variance**0.5) if return_std else estimate.mean

    def simulate(  # type: ignore[override]
        self,
        query_times: Any,
        paths: int = 1000,
        *,
        generator: torch.Generator | None = None,
        sensor: str | None = None,
        control: Any = None,
    ) -> Any:
        """Readings of one series at later times, drawn together from the present state on: `(times, paths, m)`.

        Args:
            query_times, sensor, control: as in `forecast`.
            paths: their number.
            generator: source of the random numbers.

        Raises:
            ValueError: as `forecast`, for fewer paths than one, for many tracks, and while a state is unknown.
        """
        require(isinstance(paths, int) and paths >= 1, "paths", paths, "a whole number >= 1")
        with self._lock:
            axis, rows, shape = self._query(query_times, sensor, control)
            kernel, state = self._known("simulate", self._present(rows, axis))
            self._run_rows(rows, state[None].copy(), "query_times", axis)  # its checks
            drawn = kernel.simulate(state, rows, paths, generator)
            return drawn[..., 0] if shape.single else drawn

    def update(  # type: ignore[override]
        self, time: Any, reading: Any, sensor: Any = None, *, control: Any = None
    ) -> StateEstimate:
        """One more reading, or several rows, without a look at earlier ones: as `filter` on all of them.

        Args:
            time: of the reading, not before the last one; or `(T,)`.
            reading: `(m,)`, NaN where missing; or `(T, m)`. Of many tracks `(tracks, m)`, or `(tracks, T, m)`.
            sensor: whose reading it is; None: of all sensors, one after another.
            control: `(inputs,)`, or `(T, inputs)`.

        Returns:
            The estimate at this reading, without a dimension of times; or at each row.

        Raises:
            ValueError: naming the argument. The filter stays as it was.
        """
        with self._lock:
            step = self._steps.get(sensor) if sensor is None or type(sensor) is str else None
            if step is not None and type(time) is float and type(reading) is _ARRAY and control is None:
                place, shape, head, run, handle, out, kernel, number = step
                if reading.shape == shape and reading.dtype is _FLOAT:
                    place[...] = reading
                    head[0] = time
                    fault = run(handle)
                    if fault:
                        raise fault_error(FAULTS[fault], "time", time, step=kernel.step)
                    return StateEstimate(kernel, number, time, out.tobytes())
            return self._update(time, reading, sensor, control)

    def _update(self, time: Any, reading: Any, sensor: Any, control: Any) -> StateEstimate:
        """Of arguments of any kind. Where readings are numbers of one series, the next one has a bound step."""
        one = np.ndim(time) == 0 and index_of(time) is None
        if one:
            row = np.atleast_1d(as_numbers("reading", reading))
            reading = row[:, None] if row.ndim > 1 else row[None]
            time, control = [time], None if control is None else np.atleast_1d(control)[None]
        given = time, reading, sensor, control, None, ("time", "reading")
        axis, rows, shape = read_rows(self._kernel, self._axis, self.time_unit, *given)
        state = self._present(rows, axis).copy()
        found = self._run_rows(rows, state, "time", axis)
        self._axis = axis
        self._state = self._state if len(self._state) else np.empty_like(state)
        self._state[...] = state
        if not one:
            return self._estimate_rows(rows, found, shape)
        number = -1 if rows.sensor is None else int(rows.sensor[0, 0])
        label = None if number < 0 else self._kernel.sensors[number]
        if self._kernel.bound_step and len(state) == 1 and axis.origin is None and label not in self._steps:
            self._steps[label] = self._kernel.bound_step(self._state[0], number)
        return self._estimate_rows(rows, found, replace(shape, single=False), one=True)

    def _step(self) -> tuple[Any, dict[str, Any], TimeAxis | None, np.ndarray]:
        from .onnx_filter import matrices_step

        starts = self._start and self._kernel.start(*self._start[:2], np.full(len(self._start[0]), np.nan))
        kernel, state = self._known("export", self._state if len(self._state) else starts)
        return *matrices_step(kernel, None if starts is None else starts[0], state), self._axis, state[-1:]

    def _known(self, method: str, states: np.ndarray | None) -> tuple[LinearKernel, np.ndarray]:
        """The kernel of a linear model, and the state of one series, no direction of which is unknown."""
        kernel, count = self._kernel, 1 if states is None else len(states)
        if not isinstance(kernel, LinearKernel):
            raise ValueError(f"model: got a nonlinear model, expected a linear one for `{method}`")
        require(count == 1, method, f"{count} tracks", "a filter of one series")
        known = states is not None and states[0, kernel.unknown] == 0
        require(known, method, "a state of which nothing is known", "readings, or a start, first")
        return kernel, states[0]  # type: ignore[index]

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("model: got a linear or nonlinear model, expected a sum of components for this method")

    diagnostics = rolling_forecast = _refuse  # type: ignore[assignment]
    standard_errors = sde = property(_refuse)  # type: ignore[assignment]

    def _query(
        self, query_times: Any, sensor: Any, control: Any, in_order: bool = True
    ) -> tuple[TimeAxis, Rows, Shape]:
        """Rows without readings at times that are asked for."""
        kernel, count = self._kernel, max(len(self._state), 1)
        if isinstance(query_times, int) and not isinstance(query_times, bool):
            known = self._axis is not None and (self._rows is not None or kernel.step > 0)
            require(known and query_times > 0, "query_times", query_times, "times, or a number of steps after others")
            assert self._axis is not None
            if kernel.step:
                query_times = self._axis.labels(self._state[0, -1] + kernel.step * np.arange(1, query_times + 1))
            else:
                query_times = next_times(self._axis, self._fitted_rows().times[0], query_times)
        axis = self._axis or TimeAxis.of(query_times, self.time_unit)
        numbers = axis.numbers("query_times", query_times)
        require(len(numbers) > 0, "query_times", "no times", "at least one")
        ordered = np.diff(numbers, prepend=-np.inf) >= 0
        require_each(ordered | (not in_order), "query_times", "times that decrease", numbers, "times in order")
        number = -1 if sensor is None else int(sensor_numbers(kernel, sensor)[0])
        own, width = (kernel.sizes[number], kernel.sizes.max()) if number >= 0 else (len(kernel.noise),) * 2
        which = None if number < 0 else np.full((1, len(numbers)), number, dtype=np.int64)
        shape, length = self._shape, len(numbers)
        index = None if index_of(shape.given) is None else axis.labels(numbers)
        columns = shape.columns if len(shape.columns) == own else ()
        single = own == 1 and (shape.single or self._rows is None)
        shape = replace(shape, single=single, width=own, index=index, columns=columns)
        readings = np.full((count, length, width), np.nan)
        return axis, Rows(numbers[None].copy(), readings, read_control(kernel, control, count, length), which), shape

    def _fitted_rows(self) -> Rows:  # type: ignore[override]
        require(self._rows is not None, "fit", None, "fit(times, readings) first")
        return self._rows  # type: ignore[return-value]

    def _start_states(self, rows: Rows, axis: TimeAxis | None = None) -> np.ndarray:
        """The state of each series before its first row."""
        kernel, count = self._kernel, len(rows.readings)
        if self._start is None:
            assert isinstance(kernel, LinearKernel)
            return kernel.diffuse_start(count, rows.times)
        (mean, covariance, at), given = self._start, len(self._start[0])
        require(given in (1, count), "start", f"{given} tracks", f"one start, or {count}")
        times = np.full(count, np.nan)
        if at == "before":
            times[:] = rows.times[:, 0] - kernel.step
        elif at != "reading":
            times[:] = (axis or self._axis).numbers("start_at", [at])[0]  # type: ignore[union-attr]
        means, covariances = (np.broadcast_to(x, (count, *x.shape[1:])) for x in (mean, covariance))
        return kernel.start(means, covariances, times)

    def _present(self, rows: Rows, axis: TimeAxis | None = None) -> np.ndarray:
        """The state of each series so far."""
        if not len(self._state):
            return self._start_states(rows, axis or self._axis or TimeAxis.of(rows.times[0], self.time_unit))
        count, given = len(self._state), len(rows.readings)
        require(given == count, "reading", f"{given} tracks", f"{count}, as before")
        return self._state

    def _filter_again(self) -> None:
        rows = self._fitted_rows()
        state = self._start_states(rows)
        self._filtered_rows, self._state, self._steps = self._run_rows(rows, state), state, {}

    def _run_rows(
        self, rows: Rows, state: np.ndarray, name: str = "times", axis: Any = None, smooth: bool = False
    ) -> Found:
        """What is found in rows from a state on, which changes. Raises `ValueError` for a fault there."""
        found, fault = self._kernel.run(rows, state, smooth)
        if fault is not None:
            what, series, row = fault
            axis = axis or self._axis or TimeAxis.of(rows.times[0], self.time_unit)
            time = axis.labels(rows.times[series % len(rows.times)])[row]
            raise fault_error(what, name, time, row if rows.times.shape[1] > 1 else None, self._kernel.step)
        return found

    def _estimate_rows(
        self, rows: Rows, found: Any, shape: Shape, axis: TimeAxis | None = None, one: bool = False
    ) -> StateEstimate:
        axis, sensor = axis or self._axis, np.array(-1) if rows.sensor is None else rows.sensor[0]
        times = axis.labels(rows.times[0]) if axis is not None and len(rows.times) == 1 else rows.times
        readings = rows.readings
        for place in [0] * (not shape.tracks) + [(slice(None), 0) if shape.tracks else 0] * one:  # no series; no times
            found, readings = Found(*(x[place] for x in found)), readings[place]
        if one:
            names = ("predicted", "variance") + ("weight", "spread") * self._kernel.by_component
            found = found._replace(**{name: getattr(found, name)[..., : shape.width] for name in names})
            readings = readings[..., : shape.width]
            shape, times, sensor = Shape(), times[0], sensor.reshape(-1)[0]
        return StateEstimate(self._kernel, sensor, times, found, readings, shape)

    def _fit_noises(self, names: list[str], max_steps: int) -> None:
        """The factors of some noises by maximum likelihood."""
        require({*names} <= {*self._scales}, "noises", names, f"some of {', '.join(self._scales)}")
        require(isinstance(max_steps, int) and max_steps >= 1, "max_steps", max_steps, "a whole number >= 1")
        rows, earlier = self._fitted_rows(), None
        require(not np.isnan(rows.readings).all(), "readings", "no reading", "some, by which noises are fitted")

        def scales(logs: np.ndarray) -> dict[str, float]:
            return dict(zip(names, np.exp(np.maximum(logs, LEAST_LOG)).tolist(), strict=True))

        def plain(logs: np.ndarray, kept: Rows) -> tuple[Found, Any]:
            return self._new_kernel(False, "reading", **scales(logs)).run(kept, self._start_states(kept))

        def total(logs: np.ndarray, kept: Rows = rows) -> float:
            found, fault = plain(logs, kept)
            return float(np.nansum(found.log_density)) if fault is None else -np.inf

        # First all by one factor, where that is more probable: noises in other units than the readings make outliers.
        origin = np.zeros(len(names))
        found, fault = plain(origin, rows)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = (rows.readings - found.predicted) ** 2 / found.variance
        squares = squares[(squares > 0) & (fault is None)]
        require(bool(np.isfinite(squares).all()), "readings", "numbers whose squares overflow", "other units")
        if len(squares):
            scaled = origin + math.log(np.median(squares) / _MEDIAN_SQUARE)
            origin = max(origin, scaled, key=total)
        logs = origin
        self._take(scales(logs))
        for _ in range(_MOST_ROUNDS if self.robust else 1):
            wrong = StateEstimate(self._kernel, -1, None, self._filtered_rows).outliers & self.robust
            wrong = wrong.reshape(*rows.readings.shape[:2], -1)
            stacked = rows.sensor is None and not self._kernel.by_component  # a weight of each sensor
            wrong = np.repeat(wrong, self._kernel.sizes, axis=-1) if stacked else wrong
            if earlier is not None and bool((wrong == earlier).all()):
                break
            earlier, kept = wrong, rows._replace(readings=np.where(wrong, np.nan, rows.readings))
            begin = np.maximum(logs, origin - LONGEST_STEP)
            logs, self.converged = newton_maximum(functools.partial(total, kept=kept), begin, max_steps)
            self._take(scales(logs))

    def _take(self, scales: dict[str, float]) -> None:
        """Filter again with these factors of noises."""
        self._scales = self._scales | scales
        self._kernel = self._new_kernel(self.robust, self._weights)
        self._filter_again()
