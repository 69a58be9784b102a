"""An updater of Stone Soup: wrong readings of a track get a small weight."""

from typing import Any

import numpy as np

from rfa.checks import needs, require

needs("stonesoup")

from stonesoup.types.state import State
from stonesoup.updater.kalman import ExtendedKalmanUpdater

from rfa.estimation.nonlinear_filter import Candidate, FilterState, NonlinearKernel, Reading
from rfa.estimation.nonlinear_model import NonlinearModel, Sensor


class RobustUpdater(ExtendedKalmanUpdater):
    """`ExtendedKalmanUpdater` with noise `R / w`, `0 < w <= 1`, and challengers: `RobustFilter(NonlinearModel(...))`.

    A posterior has `weights`, `(m,)`: one of its reading, or one of each component, whichever makes the readings so far
    more probable. In `learned` it carries what they said of the noise: of measurement models of one class, mapping and
    size together. The next update finds it through the `prior` of predictions, so one updater serves many tracks. A
    mixture of hypotheses (PDA), and a prediction without `prior`, start anew. Covariances are always in Joseph's form.

    Raises:
        ValueError: in `update`, for NaN, an R that is not positive definite, and roots of covariances.
    """

    def update(self, hypothesis: Any, **kwargs: Any) -> Any:
        """As `KalmanUpdater.update`."""
        prediction = hypothesis.prediction
        require(not hasattr(prediction, "sqrt_covar"), "prediction", "the root of a covariance", "a covariance")
        posterior = super().update(hypothesis, **kwargs)
        reading, n = hypothesis.measurement.state_vector, prediction.ndim
        model = self._check_measurement_model(hypothesis.measurement.measurement_model)

        def at(offset: np.ndarray) -> State:
            return State(prediction.state_vector + offset[:, None], timestamp=prediction.timestamp)

        sensor = Sensor(
            lambda x: (model.function(at(x), **kwargs) - reading)[:, 0],  # Stone Soup wraps the differences of angles
            np.asarray(model.covar(**kwargs), dtype=float),
            jacobian=lambda x: self._measurement_matrix(at(x), model, **kwargs),
        )
        name = f"{type(model).__name__} {(*map(int, model.mapping),)} of {len(reading)}"
        functions = NonlinearModel(lambda x, dt: x, np.zeros((n, n)), {name: sensor})  # the predictor has made the step
        kernel = NonlinearKernel(functions, ("",) * n, robust=True, weights="auto")
        posterior.learned, step = kernel.used(_before(prediction), Reading(0.0, name, np.zeros(len(reading))))
        posterior.state_vector = prediction.state_vector + step.after.mean[:, None]
        posterior.covar[...], posterior.weights = step.after.covariance, step.posterior.weights  # type: ignore[union-attr]
        return posterior


def _before(prediction: Any) -> FilterState:
    """What the last posterior of a track knows, at a prediction. Means are offsets from it."""
    state, steps, covariance = prediction, list[Any](), np.asarray(prediction.covar, dtype=float)
    while state is not None and not hasattr(state, "learned"):
        steps.append(state)
        state = getattr(state, "prior", None)
    if state is None:
        return FilterState(None, Candidate(np.zeros(len(covariance)), covariance, {}, {}))
    _, was, rival, *rest = state.learned
    own, shift = was._replace(mean=0 * was.mean, covariance=covariance), np.eye(len(covariance))
    if None in (rival, *(step.transition_model for step in steps)):
        return FilterState(None, own)
    for step in reversed(steps):
        gap = None if None in (step.timestamp, step.prior.timestamp) else step.timestamp - step.prior.timestamp
        shift = step.transition_model.jacobian(step.prior, time_interval=gap) @ shift
    spread = covariance + shift @ (rival.covariance - was.covariance) @ shift.T  # F and Q act on it as on the filter
    return FilterState(None, own, rival._replace(mean=shift @ (rival.mean - was.mean), covariance=spread), *rest)
