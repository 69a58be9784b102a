"""`RobustFilter`: components of a series, fitted, filtered, smoothed and forecast, robustly or by the Kalman filter."""

import copy
import functools
import inspect
import numbers
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rfa.checks import needs, require
from rfa.files import check_writable, write_whole
from rfa.version import __version__

from .components import Component, StructuralModel, to_factors
from .linear_model import Found
from .linear_sde import LinearSDE
from .parameter_search import ParameterSearch, read_fixed, series_scale
from .readings_problem import (
    ReadingsKernel,
    ReadingsProblem,
    ReadingsTable,
    filter_readings,
    irregular_names,
    model_of,
    readings_kernel,
    run_readings,
)
from .series import ReadingInfo, Readings, RowLabels, by_name, like, read_later, read_one, read_series
from .series_estimate import Diagnostics, SeriesEstimate
from .time_axis import TimeAxis, next_times

F = TypeVar("F", bound=Callable[..., Any])


def _alone(method: F) -> F:
    """A method that no other thread's call interrupts: reading keeps what it has computed, as updating does."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked  # type: ignore[return-value]


class RobustFilter:
    """Filter, smoother and forecast of a series with gaps and wrong readings, by a sum of components.

        z_k = C_k x(t_k) + offset_k + e_k,    e_k ~ N(0, sigma2.irregular + noise_k)

    The robust filter gives each reading a weight by how well earlier readings predict it. The robust smoother uses
    later readings too. Both are recursive: time and memory are linear.

    Several threads may use one filter: a call waits for the one before. Copies and pickles share nothing that changes.

    Args:
        model: components joined by `+`, such as `Trend() + Season(period=365.25)`.
        robust: False: the Kalman filter and smoother, in which all readings have weight 1.
        time_unit: the unit of time where times are dates: "second", "minute", "hour", "day", "week" or "year".
            Periods and parameters of components are in this unit. Numbers are taken as they are.

    Attributes:
        log_likelihood: of the readings that `fit` has used, by the Kalman filter, with the exact diffuse start.
        converged: whether the search of `fit` has ended at a maximum.

    Raises:
        ValueError: for something else than components, and an unknown unit.
    """

    log_likelihood: float
    converged: bool

    of_model: "type[RobustFilter]"  # of matrices or functions, which this package sets

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> "RobustFilter":
        """Of a `LinearSDE` or a `NonlinearModel` it is the filter of `state_filter.py`."""
        of_model = cls is RobustFilter and (hasattr(model, "dynamics") or hasattr(model, "process_noise"))
        return super().__new__(cls.of_model if of_model else cls)

    def __init__(self, model: Component | StructuralModel, robust: bool = True, *, time_unit: str = "day"):
        self.model = StructuralModel.of(model)
        self.robust = robust
        self.time_unit = time_unit
        TimeAxis.of([], time_unit)
        self._fitted: Readings | None = None
        self._later: list[Readings] = []  # by `update`
        self._run: tuple[ReadingsProblem, Found] | None = None
        self._state = np.zeros((0, 0))  # what the filter knows after the last reading, once it has run
        self._lock = threading.RLock()

    @_alone
    def __getstate__(self) -> dict[str, Any]:
        """All but the lock, and what the kernel of this machine has found. Only the list of later readings changes."""
        kept = {name: x for name, x in vars(self).items() if name not in ("_lock", "_kernel")}
        return kept | {"_later": [*self._later], "_run": None, "_state": np.zeros((0, 0))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments by name. `deep` is there for scikit-learn, whose `clone` calls this."""
        return {name: getattr(self, name) for name in inspect.signature(self.__init__).parameters}  # type: ignore[misc]

    @_alone
    def set_params(self, **params: Any) -> "RobustFilter":
        """Change arguments. What `fit` has found is forgotten.

        Raises:
            ValueError: as for a new filter, and for an unknown name.
        """
        given = self.get_params()
        for name in params:
            require(name in given, "params", name, f"one of {', '.join(given)}")
        changed = type(self)(**(given | params))
        for name in vars(self).keys() - vars(changed).keys():
            delattr(self, name)
        vars(self).update(changed.__getstate__())
        return self

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks: `cross_val_score` and `GridSearchCV` take a filter as a regressor of times."""
        from sklearn.utils import InputTags, Tags, TargetTags

        given = InputTags(one_d_array=True, two_d_array=False)
        return Tags(estimator_type="regressor", target_tags=TargetTags(required=True), input_tags=given)

    def fit(
        self,
        times: Any,
        values: Any = None,
        *,
        sensor: Any = None,
        exog: Any = None,
        offset: Any = None,
        noise: Any = None,
        observation: Any = None,
        fixed: Mapping[str, float | int] | None = None,
        max_steps: int = 200,
    ) -> "RobustFilter":
        """Take a series, and find the parameters by maximum likelihood.

        NumPy arrays, pandas objects, lists and tensors are taken. Rows of pandas objects are matched by their index to
        the values, or to the times, and columns by their names. NaN, a mask of NumPy, None and the NA of pandas are
        missing values. What is known of a reading, from `exog` to `observation`, may be missing where the reading is.

        The robust fit leaves out readings that are more than four standard deviations from the robust filter's
        prediction, and fits again until these stay the same. Where most innovations are smaller than predicted, their
        deviation counts, unless that leaves out a quarter of the readings, all noise, or what is not far beyond.

        Args:
            times: `(T,)`, in order: numbers or dates. Or a pandas Series or DataFrame alone, whose index is the times.
            values: `(T,)`, or `(T, sensors)`: each column is a sensor that sees the same states with noise of its own.
                NaN where nothing was read. Of a DataFrame with several columns `sensor` must say so.
            sensor: `(T,)` labels, for readings in one column. Several sensors may read at one time. Or `(sensors,)`, a
                label for each column of a table.
            exog: `(T, k)` regressors. Their coefficients are states with a diffuse start, `beta.NAME`, as in
                statsmodels' `mle_regression=False`.
            offset: `(T,)`, a known part of each value.
            noise: `(T,)`, a known variance of each reading's error, which is added to `sigma2.irregular`.
            observation: `(T, n)`, the row of C of each reading, in the place of the model's.
            fixed: values of parameters that are not searched for. The name of a component ("season") stands for all its
                variances.
            max_steps: of the search.

        Returns:
            Itself.

        Raises:
            ValueError: naming the argument, for times that decrease or occur twice for a sensor, text, infinite values,
                no rows, no reading at all or of a sensor, a season longer than the series, unknown or impossible fixed
                values, and shapes, an index or names that do not fit.

        Warns:
            UserWarning: for a period that looks like a number of readings, where times are dates.
        """
        found = copy.copy(self)  # a refused series leaves the filter of the one before
        found._fit(times, values, ReadingInfo(sensor, exog, offset, noise, observation), fixed or {}, max_steps)
        with self._lock:
            vars(self).pop("_kernel", None)
            vars(self).update(found.__getstate__())
        return self

    def _fit(
        self, times: Any, values: Any, info: ReadingInfo, fixed: Mapping[str, float | int], max_steps: int
    ) -> None:
        whole = isinstance(max_steps, numbers.Integral) and max_steps >= 1
        require(whole, "max_steps", max_steps, "a whole number >= 1")
        require(isinstance(fixed, Mapping), "fixed", fixed, "values of parameters by name")
        if values is None:
            require(hasattr(times, "index") and hasattr(times, "to_numpy"), "values", None, "values beside the times")
            times, values = times.index, times
        self._given, self._axis = values, TimeAxis.of(times, self.time_unit)
        readings, self._index = read_series(self._axis, times, values, info, self.model.states)
        model = model_of(self.model, readings, None if self._axis.origin is None else self.time_unit)
        self._all, self._fitted, self._kept, self._later = model, readings, readings, []
        self._run, self._state, self._scale = None, np.zeros((0, 0)), series_scale(readings, self.robust)
        values_given = read_fixed(model, readings.sensors, fixed)
        self._search = ParameterSearch(model, readings, self._scale, values_given, max_steps)
        if self.robust:
            found, self._fitted, self._kept = self._search.robust_fit()
        else:
            found = self._search.maximum(readings, self._search.start)
        self._values, self.log_likelihood, self.converged = found
        self._base = ReadingsTable.of(model, self._fitted).problem(self._values)
        last = self._fitted.selected(slice(-len(readings.sensors), None))
        self._last = last.selected(last.times == last.times[-1])  # the readings of the last time

    @property
    @_alone
    def parameters(self) -> dict[str, float]:
        """The values of all parameters by name, after `fit`.

        A factor too near to 0 or 1 for a float, as where the unit of time is far from the time between readings, is
        there as `NAME.rate`, its decay rate `-log f`. `fixed` takes it so too.
        """
        return to_factors(self._all.parameters, self._values)

    @property
    @_alone
    def sde(self) -> LinearSDE:
        """The model with its parameters; C and R are those of a reading of the first sensor without regressors."""
        names = irregular_names(self._readings.sensors)
        return self._all.sde_of_rates(self._values, self._values[names[0]])

    @property
    @_alone
    def standard_errors(self) -> dict[str, float]:
        """Of each fitted parameter, from the curvature of the log-likelihood of the readings that `fit` has used.

        Infinite for a variance of 0, and all of them where the likelihood has no maximum along one. They are those of
        statsmodels with `cov_type="approx"`.
        """
        self._fitted_readings()
        return self._search.standard_errors(self._kept, self._values)

    @_alone
    def filter(self) -> SeriesEstimate:
        """The estimate at each reading from it and earlier readings."""
        return self._estimate(*self._filtered())

    @_alone
    def smooth(self) -> SeriesEstimate:
        """The estimate at each reading from all readings."""
        problem, filtered = self._filtered()
        found = filter_readings(problem, self._scale, self.robust, smooth=True)
        return self._estimate(problem, filtered.smoothed(found))

    @_alone
    def forecast(self, query_times: Any, **info: Any) -> SeriesEstimate:
        """Readings at later times, from all readings so far.

        Args:
            query_times: numbers or dates, as the series', in order. Or a number of steps: of its index's frequency, of
                the calendar (months, quarters, years, business days), or equal ones. A moment before the last reading
                can be asked for by a missing value in the series.
            sensor: of which a reading is forecast. Columns without labels are "1", "2" and so on, by default the first.
            exog, offset, noise, observation: as in `fit`, for each query time, none missing. What `fit` had is needed
                here too; 0.0 says that there is no offset or noise. So it is with `sensor`, where there are several.

        Raises:
            ValueError: for a time before the last reading, a number of steps where there is no frequency, and without
                an argument that `fit` had.
        """
        state = self._last_state.copy()
        problem = self._ahead(query_times, ReadingInfo(**info))
        return self._estimate(problem, run_readings(self._kernel, problem, state, name="query_times"))

    @_alone
    def predict(self, query_times: Any, return_std: bool = False, **info: Any) -> Any:
        """Readings at any times, in any order: forecasts after the last reading, and smoothed estimates before.

        Args:
            query_times: numbers or dates, as the series'.
            return_std: whether to give the standard deviations of the readings too, as regressors of scikit-learn do.
            sensor, exog, offset, noise, observation: as in `forecast`.

        Returns:
            The means `(times,)`, or they and the standard deviations, in the kind of the values. Those of pandas have
            the times as their index.

        Raises:
            ValueError: as `fit`, for times that are none, and without an argument that `fit` had.
        """
        readings = self._readings
        given = self._axis, readings, "query_times", query_times, None, ReadingInfo(**info), self.model.states
        asked = read_later(*given, in_order=False)
        order = np.argsort(asked.times, kind="stable")
        past = asked.times[order] <= readings.times[-1]
        mean, variance = np.empty(len(asked)), np.empty(len(asked))
        if past.any():
            every = readings.followed_by([asked.selected(order[past])])
            by_time = np.argsort(every.times, kind="stable")
            problem = self._base.with_readings(every.selected(by_time))
            run = filter_readings(problem, self._scale, self.robust, smooth=True)
            rows, found = np.argsort(by_time)[len(readings) :], problem.of_readings(run)
            mean[order[past]], variance[order[past]] = (x[rows] for x in found)
        if not past.all():
            problem = self._base.with_readings(asked.selected(order[~past]))
            run = run_readings(self._kernel, problem, self._last_state.copy(), name="query_times")
            mean[order[~past]], variance[order[~past]] = problem.of_readings(run)
        times = self._axis.labels(asked.times)
        mean, deviation = (like(self._given, x, times) for x in (mean + asked.offset, np.sqrt(variance)))
        return (mean, deviation) if return_std else mean

    @_alone
    def rolling_forecast(self, origins: Any, targets: Any) -> tuple[np.ndarray, np.ndarray]:
        """Forecasts of readings from earlier ones: what the filter would have said, with the parameters of `fit`.

        Args:
            origins: `(pairs,)`, the number, in order of time, of the reading after which each forecast is made.
            targets: `(pairs,)`, the number of the reading that is forecast, later than its origin.

        Returns:
            Mean and variance of each reading, `(pairs,)`.

        Raises:
            ValueError: for numbers that are no readings, or a target that is not later.
        """
        problem, run = self._filtered()
        return problem.ahead(self.sde, run, origins, targets)

    @_alone
    def simulate(
        self, query_times: Any, paths: int = 1000, *, generator: torch.Generator | None = None, **info: Any
    ) -> Any:
        """Readings at later times, drawn together: each path is one possible future.

        The state at the last reading is drawn from its estimate, then the model moves it. A sum over times, or the
        largest of them, has the distribution of the paths' sums: `simulate(30).sum(axis=0)`. The parameters are taken
        as known.

        Args:
            query_times, sensor, exog, offset, noise, observation: as in `forecast`.
            paths: their number.
            generator: source of the random numbers.

        Returns:
            `(times, paths)`, in the kind of the values; of pandas a DataFrame whose index is the times.

        Raises:
            ValueError: as `forecast`, and for fewer paths than one.
        """
        require(isinstance(paths, numbers.Integral) and paths >= 1, "paths", paths, "a whole number >= 1")
        drawn = generator is None or isinstance(generator, torch.Generator)
        require(drawn, "generator", generator, "a torch.Generator, or None")
        state = self._last_state
        problem = self._ahead(query_times, ReadingInfo(**info))
        readings = problem.table.readings
        found = problem.drawn(self.sde, state, int(paths), generator) + readings.offset[:, None]
        return like(self._given, found, self._axis.labels(readings.times))

    @_alone
    def update(self, time: Any, value: float | int, **info: Any) -> SeriesEstimate:
        """One more reading, without a look at the earlier ones. The parameters stay.

        `exog` and `observation` are a row, or a pandas Series with their names as its index. What `fit` had is needed.

        Returns:
            The estimate at this reading, one row. It is that of `filter` on the whole series.

        Raises:
            ValueError: as `fit`, and for a time before the last reading.
        """
        state = self._last_state.copy()
        new = read_one(self._axis, self._last, time, value, ReadingInfo(**info), self.model.states)
        problem = self._base.with_readings(new)
        found = run_readings(self._kernel, problem, state, name="time")
        self._run, self._state = None, state
        self._last = self._last.followed_by([new]) if new.times[0] == self._last.times[0] else new
        self._later.append(new)
        # few long parts need little memory
        while len(self._later) > 1 and len(self._later[-1]) >= len(self._later[-2]):
            part = self._later.pop()
            self._later[-1] = self._later[-1].followed_by([part])
        return self._estimate(problem, found)

    @_alone
    def export(self, path: str | Path) -> None:
        """Write the step of `update` as a file of ONNX. It runs in onnxruntime, in float64, without this library.

        One run takes one reading:

        | input | what |
        | --- | --- |
        | `state` | what earlier readings have left: `new_state` of the run before |
        | `gap` | the time since the reading before, >= 0, in `time_unit`. Of a discrete model `steps`, int64 |
        | `value` | the reading, NaN where nothing was read: the estimate is a forecast then |
        | `reading` | of matrices in its place, `(m,)`: of all sensors, one after another, NaN where nothing was read |
        | `control` | from the reading before to this one, where matrices have a `control_matrix` |
        | `sensor` | the number of its sensor in `sensors`, int64. This and the next ones where `fit` had them |
        | `exog`, `offset`, `noise`, `observation` | as in `update`. With NaN in them the value counts as missing |

        | output | what |
        | --- | --- |
        | `mean`, `standard_error` | of the reading, as `mean` and the root of `variance` of the estimate of `update` |
        | `weight`, `outlier` | as `weights` and `outliers` there |
        | `states`, `state_errors` | mean and standard error of each state |
        | `new_state` | for the next run. A forecast is run beside, from the same `state`, for each of its gaps |

        The metadata of the file are texts, most of them JSON: `state` after the last reading so far, which was at
        `last_time`; `start`, the state before any reading, for a series that begins; the names of `states`, `sensors`
        (of matrices with their numbers of components) and `regressors`; `parameters`; `time_unit`; `robust`;
        `rfa_version`. With matrices `start` is there where the filter has one, and gaps go from it on.

        Args:
            path: of the file, which is written whole.

        Raises:
            ValueError: for components before `fit`, for matrices while a direction of their states is unknown or for
                many tracks, for functions, and for a place that cannot be written.
            MissingExtra: without the package `onnx`.
        """
        needs("onnx")
        from .onnx_filter import step_file

        step, known, axis, last = self._step()
        path, dates = Path(path), axis is not None and axis.origin is not None
        check_writable("path", path)
        known |= {"time_unit": self.time_unit if dates else "that of the times given"}
        known |= {"parameters": self.parameters, "robust": self.robust, "rfa_version": __version__}
        known |= {"last_time": "none" if axis is None else str(axis.labels(last)[0])}
        write_whole(path, lambda temporary: temporary.write_bytes(step_file(step, known)))

    def _step(self) -> tuple[Any, dict[str, Any], TimeAxis | None, np.ndarray]:
        """What `export` writes, what it says of that, and the last time `(1,)` on its axis."""
        from .onnx_filter import series_step

        problem, _ = self._filtered()
        states = problem.first(self._kernel, self._scale)[0], self._last_state[0]
        step, known = series_step(problem, self.sde, list(self.model.states.values()), self._kernel, *states)
        return step, known, self._axis, self._readings.times[-1:]

    @_alone
    def diagnostics(self, true_states: Any = None, lags: int | None = None) -> Diagnostics:
        """Tests of the standardised innovations of the filter: mean, variance, correlation, normality, NIS and NEES.

        Args:
            true_states: `(T, n)`, where they are known, as in a simulation: for the NEES.
            lags: of the test of correlation. By default 10, or a fifth of the readings where that is less.
        """
        found, states = self.filter(), self._filtered()[1]
        if true_states is not None:
            rows = RowLabels(self._axis, self._readings.times, self._index)
            true_states = rows.aligned("true_states", by_name("true_states", true_states, list(found.states)))
        return Diagnostics.of(found, states, true_states, lags)

    @property
    def _readings(self) -> Readings:
        """All readings so far."""
        self._fitted, self._later = self._fitted_readings().followed_by(self._later), []
        return self._fitted

    def _fitted_readings(self) -> Readings:
        if self._fitted is None:
            raise ValueError("fit: got no series yet, expected fit(times, values) first")
        return self._fitted

    @functools.cached_property
    def _kernel(self) -> ReadingsKernel:
        return readings_kernel(self._base.sde, self._base.names, self.robust)

    def _estimate(self, problem: ReadingsProblem, run: Found) -> SeriesEstimate:
        fits = problem.table.readings is self._fitted and self._index is not None and len(self._index) == len(problem)
        return SeriesEstimate(self._given, self._axis, self._scale, problem, run, self._index if fits else None)

    def _ahead(self, query_times: Any, info: ReadingInfo) -> ReadingsProblem:
        """Later times."""
        if isinstance(query_times, numbers.Integral) and not isinstance(query_times, bool):
            query_times = next_times(self._axis, self._readings.times, int(query_times))
        given = self._axis, self._last, "query_times", query_times, None, info, self.model.states
        return self._base.with_readings(read_later(*given))

    def _filtered(self) -> tuple[ReadingsProblem, Found]:
        """All readings so far, and the filter of them."""
        readings = self._readings
        if self._run is None:
            problem = self._base.with_readings(readings)
            state = problem.first(self._kernel, self._scale)
            self._run = problem, run_readings(self._kernel, problem, state)
            self._state = state
        return self._run

    @property
    def _last_state(self) -> np.ndarray:
        """What the filter knows after the last reading."""
        if not len(self._state):
            self._filtered()
        return self._state
