"""The equal steps on which times lie, where they are rounded or some are missing."""

from typing import NamedTuple

import numpy as np

_ON_GRID = 0.9  # share of the times that equal steps must fit
PATTERN, _FEW_MISSING, _MANY_MISSING = 8, 0.08, 0.35  # gaps of two ticks that rounding makes, and their share
_ROUNDED_DATES = 1e-6  # share of the usual gap by which dates as numbers may differ from their steps
_START = 32  # times whose steps are counted by the usual gap


class TimeGrid(NamedTuple):
    """Equal steps on which times lie, but for what rounding has changed.

    Fields:
        last: where the last time lies on them.
        step: the simplest number, or the inverse of one, that all times agree with.
        rounding: of the times; 0 where they are exact.
        steps: of each time from the first, `(T,)`.
    """

    last: float
    step: float
    rounding: float
    steps: np.ndarray


def time_grid(times: np.ndarray) -> TimeGrid | None:
    """The equal steps of increasing times, some of which may be missing, or rounded.

    The step comes from a robust line through the times: gaps of rounded times are wrong by the rounding, the line by
    that over the number of times.

    Args:
        times: `(T,)`.

    Returns:
        None where no steps fit.
    """
    gaps = np.diff(times)
    if not len(gaps):
        return None
    exact, usual = 4 * float(np.spacing(np.abs(times).max())), float(np.median(gaps))
    near = (10.0**-d for d in range(10) if bool((np.abs(times - np.round(times, d)) <= exact / 2).all()))
    tick = next(near, 0.0)  # to which they are rounded
    if tick == 0.0 and bool((times.astype(np.float32) == times).all()):
        exact = 4 * float(np.spacing(np.float32(np.abs(times).max())))
    single = int((gaps < 1.5 * tick).sum())
    widths = [exact, *([tick] if tick > exact else [])]
    if single and len(widths) > 1 and single < len(gaps):  # gaps of one tick and of more: rounded, or some are missing
        odd, share = len(gaps) - single, _FEW_MISSING if tick < 1 else _MANY_MISSING
        if odd > single:  # mostly more: few readings alone are near their neighbour
            odd, share = single, 0.0
        widths = [tick, exact] if odd >= max(PATTERN, share * len(gaps)) else [exact]
    if max(widths) < _ROUNDED_DATES * usual:
        widths.append(_ROUNDED_DATES * usual)
    found = (_grid_within(times, width, exact) for width in widths)
    return next((grid for grid in found if grid is not None), None)


def _grid_within(times: np.ndarray, width: float, exact: float) -> TimeGrid | None:
    """The equal steps from which nine of ten times differ by less than a rounding to `width`."""
    gaps = np.diff(times)
    alike = gaps[np.abs(gaps - np.median(gaps)) <= width + exact]
    if not len(alike) or (step := float(alike.mean())) <= width / 2:
        return None
    if np.ptp(gaps) <= width + exact:  # none is missing
        steps, step = np.arange(float(len(times))), (times[-1] - times[0]) / len(gaps)
    elif (counted := _counted_steps(times, step, width + exact)) is not None:
        steps, step = counted
    else:
        return None
    offset = times - step * steps
    kept = np.abs(offset - np.median(offset)) <= width + exact
    if kept.mean() < _ON_GRID or not (np.diff(steps[kept]) > 0).all():
        return None
    at, on_grid = steps[kept], times[kept] - times[0]
    least, most = _least_slope(at, on_grid, width + exact, exact), _least_slope(at, -on_grid, width + exact, exact)
    if least is None or most is None or not least <= -most:
        return None
    step = _simplest(least, -most)
    offset = times[kept] - step * at
    if width <= exact:
        return TimeGrid(float(times[-1]), step, 0.0, steps)
    low, high = offset.max() - width / 2, offset.min() + width / 2
    first = next((x for d in range(16) if low <= (x := round((low + high) / 2, d)) <= high), (low + high) / 2)
    return TimeGrid(float(first + step * steps[-1]), step, width, steps)


def _counted_steps(times: np.ndarray, step: float, width: float) -> tuple[np.ndarray, float] | None:
    """The number of steps to each time, and the step of a line through them, from a step that is known roughly."""
    phase = np.exp(2j * np.pi * (times[:_START] - times[0]) / step).mean()
    first = float(times[0] + step * np.angle(phase) / (2 * np.pi))
    counts = [min(_START << k, len(times)) for k in range((len(times) // _START).bit_length() + 1)]
    for count in [*counts, len(times)]:  # a line through twice as many times is surer
        steps, half = np.rint((times[:count] - first) / step), (count + 1) // 2
        ahead = steps[half:] - steps[: count - half]
        if not (ahead > 0).all():
            return None
        slopes = (times[half:count] - times[: count - half]) / ahead
        near = slopes[np.abs(slopes - np.median(slopes)) <= 2 * width / ahead]
        if not len(near):
            return None
        step = float(near.mean())
        first = float(np.median(times[:count] - step * steps))
    return steps - steps[0], step


def _least_slope(at: np.ndarray, values: np.ndarray, width: float, error: float) -> float | None:
    """The least slope with which `values - slope * at` spread by no more than `width`, by Newton's method."""
    slope = float((values[-1] - values[0] - width) / (at[-1] - at[0])) if len(at) > 1 else 0.0
    for _ in range(100):
        left = values - slope * at
        low, high = int(left.argmin()), int(left.argmax())
        if left[high] - left[low] <= width + error:
            return slope
        if high < low:
            return None
        slope = float((values[high] - values[low] - width) / (at[high] - at[low]))
    return None


def _simplest(least: float, most: float) -> float:
    """The number in an interval that has the fewest digits, itself or its inverse."""
    middle = (least + most) / 2
    for digits in range(1, 17):
        for candidate in (float(f"{middle:.{digits}g}"), 1 / float(f"{1 / middle:.{digits}g}")):
            if least <= candidate <= most:
                return candidate
    return middle
