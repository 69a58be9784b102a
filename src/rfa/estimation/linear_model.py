"""A linear model with several sensors as the compiled filter takes it, and that filter (`kernels/linear.cpp`)."""

import ctypes
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from rfa.checks import require

from .compiled import _ROBUST_CONSTANTS, _fields, _integer, _number, _pointer, library, set_pointers, threads_for
from .linear_sde import DiscreteModel, LinearModel

_UNSEEN = 1e-9  # relative: a direction of the states that shows less in the readings shows nothing


class _Model(ctypes.Structure):
    """See kernels/linear.cpp."""

    _fields_ = (
        *_fields(_integer, "states inputs sensors robust by_component discrete"),
        ("step", _number),
        *_fields(_pointer, "sizes dynamics diffusion input observation noise constants"),
    )


class _Rows(ctypes.Structure):
    """See kernels/linear.cpp."""

    _fields_ = (
        *_fields(_integer, "series length width parts threads smooth time_stride input_stride"),
        *_fields(_pointer, "times readings input sensor observation noise state mean covariance"),
        *_fields(_pointer, "weight spread predicted variance log_density fault"),
    )


class Rows(NamedTuple):
    """Readings of some series, in order of time."""

    times: Float[np.ndarray, "#series length"]
    readings: Float[np.ndarray, "series length width"]  # NaN where nothing was read
    control: Float[np.ndarray, "#series length inputs"] | None
    sensor: np.ndarray | None  # `(1, length)`: which sensor each row is of. None: each row has all
    observation: Float[np.ndarray, "series length width n"] | None = None  # C of each row, beside a model of one sensor
    noise: Float[np.ndarray, "series length width width"] | None = None  # and its R


class Found(NamedTuple):
    """What the filter, or the smoother, finds at each row. Leading dimensions are `(series, length)`, or none."""

    mean: np.ndarray  # (..., n), of the states
    covariance: np.ndarray  # (..., n, n), infinite where nothing is known
    weight: np.ndarray  # (..., parts), NaN where nothing was read
    spread: np.ndarray  # (..., parts): mean variance of what was predicted, over the noise
    predicted: np.ndarray  # (..., width): of each component, before the row
    variance: np.ndarray  # (..., width): of that prediction, with the noise
    log_density: np.ndarray  # (...)

    def smoothed(self, found: "Found") -> "Found":
        """What a filter has found, with the states and weights by all rows, as the smoother has found them."""
        weight = np.where(np.isnan(self.weight), np.nan, found.weight)
        return self._replace(mean=found.mean, covariance=found.covariance, weight=weight)

    @property
    def gain_ratio(self) -> np.ndarray:
        """By how much a part of a reading moves its prediction, over what it would with weight 1."""
        return (self.spread + 1) / (self.spread + 1 / self.weight)


FAULTS = ("", "late", "steps", "infinite", "overflow")  # as numbered in kernels/linear.cpp


def compiled_library() -> ctypes.CDLL:
    """The compiled filters. Raises `RuntimeError` without a compiler."""
    if (loaded := library()) is None:
        raise RuntimeError("this RobustFilter needs compiled code: install a C++17 compiler")
    return loaded


class LinearKernel:
    """The compiled filter of one model. Its carried state is one array of numbers, which the caller keeps.

    Args:
        model: without batch dimensions.
        names: of the states.
        robust: whether readings are weighted.
        by_component: whether each component of a reading has a weight of its own, where R is diagonal.
        control: B, `(n, inputs)`. None: no inputs.
        scales: factors of Q ("process_noise") and of a sensor's R, 1 where there is none.
    """

    needs_control = False  # a row without one has u = 0

    def __init__(
        self, model: LinearModel, names: tuple[str, ...], robust: bool, by_component: bool,
        control: np.ndarray | None = None, scales: Mapping[str, float] = MappingProxyType({}),
    ):  # fmt: skip
        loaded = compiled_library()
        control = np.zeros((len(names), 0)) if control is None else control
        (self.states, self.inputs), self.names, self.sensors = control.shape, names, tuple(model.sensors)
        self.robust = robust
        self.sizes, self.by_component = np.array([*model.sensors.values()], dtype=np.int64), by_component
        ends, noise = np.cumsum(self.sizes), model.observation_noise.detach().numpy()
        self.blocks = [
            noise[end - size : end, end - size : end] * scales.get(noise_name(name), 1.0)
            for end, size, name in zip(ends, self.sizes, self.sensors, strict=True)
        ]
        self.noise = np.concatenate([np.diag(x) for x in self.blocks])
        self.control = control
        self.observation, self.dynamics = (x.detach().numpy().copy() for x in (model.observation, model.dynamics))
        self.diffusion = model.diffusion.detach().numpy() * scales.get("process_noise", 1.0)
        self.step = model.step if isinstance(model, DiscreteModel) else 0.0
        self.all_parts, self.one_parts = (int(ends[-1]), int(self.sizes.max())) if by_component else (len(ends), 1)
        width, n = len(self.noise), self.states
        self.ends = np.cumsum([n, n * n, self.all_parts, self.all_parts, width, width, 1])  # of what a step finds
        arrays = {"sizes": self.sizes, "dynamics": self.dynamics, "diffusion": self.diffusion, "input": control}
        arrays |= {"observation": self.observation, "noise": np.concatenate([x.ravel() for x in self.blocks])}
        self._kept = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        options = robust, by_component, self.step > 0, self.step
        self._model = _Model(n, self.inputs, len(ends), *options)
        set_pointers(self._model, **self._kept)
        self._model.constants = ctypes.addressof(_ROBUST_CONSTANTS)
        self._library = loaded
        for name, kind in (("new", _pointer), ("state_size", _integer)):
            getattr(loaded, f"rfa_linear_{name}").restype = kind
        sizes = (loaded.rfa_linear_model_size(), loaded.rfa_linear_rows_size())
        assert sizes == (ctypes.sizeof(_Model), ctypes.sizeof(_Rows)), "the library is of another version"
        self._handles, self._bound = [self._new()], list[np.ndarray]()
        self._handle = self._handles[0]
        self.state_size = int(loaded.rfa_linear_state_size(self._handle))
        self.carried = self.state_size - 4 * n * n - 4  # numbers of filter and challenger; diffuse directions follow
        self.unknown = self.carried + 2 * n * n  # the place of the number of directions of which nothing is known

    def _new(self) -> ctypes.c_void_p:
        handle = _pointer(self._library.rfa_linear_new(ctypes.byref(self._model)))
        if not handle:
            raise MemoryError("rfa: no memory for the linear filter")
        return handle

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", []):
            self._library.rfa_linear_free(handle)

    def rows_of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """C and R of all sensors (-1), or of one."""
        columns = slice(None) if number < 0 else slice(*(np.cumsum([0, *self.sizes])[number : number + 2]))
        blocks = self.blocks if number < 0 else [self.blocks[number]]
        return self.observation[columns], torch.block_diag(*map(torch.from_numpy, blocks)).numpy()

    def readings_of(self, number: int, mean: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances `(..., m)` of readings by moments of states: of all sensors (-1), or of one."""
        (rows, noise), columns = self.rows_of(number), []
        for row in rows:  # one by one: the pairs of all would need much memory
            pairs = np.outer(row, row)
            with np.errstate(invalid="ignore"):
                found = np.where(pairs != 0, pairs * covariance, 0.0).sum(axis=(-2, -1))
            columns.append(np.where(np.isnan(found), np.inf, found))  # infinities of both signs
        return mean @ rows.T, np.stack(columns, axis=-1) + noise.diagonal()

    def transition(self, gap: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Phi and V of a gap, and what an input adds over it: read off the filter of a state that starts at 0."""
        n, k = self.states, self.inputs
        means = np.eye(1 + n + k)[:, 1 : n + 1]  # all zeros, then one state, then one input
        state = self.start(means, np.zeros((1 + n + k, n, n)), np.zeros(1 + n + k))
        control = np.eye(1 + n + k)[:, None, n + 1 :].copy() if k else None
        readings = np.full((1 + n + k, 1, len(self.observation)), np.nan)
        found, _ = self.run(Rows(np.array([[gap]]), readings, control, None), state)
        mean = found.mean[:, 0]
        return mean[1 : n + 1].T.copy(), found.covariance[0, 0], mean[n + 1 :].T.copy()

    def simulate(self, state: np.ndarray, rows: Rows, paths: int, generator: torch.Generator | None) -> np.ndarray:
        """Readings at the times of rows of one series, drawn from its state before them, `(T, paths, m)`."""
        n, number = self.states, -1 if rows.sensor is None else int(rows.sensor[0, 0])
        observation, noise = self.rows_of(number)

        def normal(covariance: np.ndarray) -> np.ndarray:
            values, basis = np.linalg.eigh(covariance)
            drawn = torch.randn(paths, len(values), generator=generator, dtype=torch.float64).numpy()
            return drawn @ (basis * np.sqrt(np.maximum(values, 0.0))).T

        drawn = state[:n] + normal(state[n : n + n * n].reshape(n, n))
        out, last = [], rows.times[0, 0] if np.isnan(state[-1]) else state[-1]
        for k, gap in enumerate(np.diff(rows.times[0], prepend=last)):
            transition, variance, by_input = self.transition(gap)
            drawn = drawn @ transition.T + normal(variance)
            drawn = drawn if rows.control is None else drawn + by_input @ rows.control[0, k]
            out.append(drawn @ observation.T + normal(noise))
        return np.stack(out)

    def start(self, means: np.ndarray, covariances: np.ndarray, times: np.ndarray) -> np.ndarray:
        """The numbers `(series, size)` of series that start at times, NaN where at their first reading."""
        state = np.zeros((len(means), self.state_size))
        self._start(state, means, covariances)
        state[~np.isnan(times), -1] = times[~np.isnan(times)]
        return state

    def diffuse_start(self, count: int, times: np.ndarray) -> np.ndarray:
        """The same of series of which nothing is known. Readings at times give the unit of each state."""
        gaps, norm, n = np.diff(times, axis=1), float(np.abs(self.dynamics).sum(axis=0).max()), self.states
        gaps = gaps[gaps > 0]
        gap = self.step or (float(np.median(gaps)) if len(gaps) else 1 / norm if norm > 0 else 1.0)
        rows, shown = self.observation / np.sqrt(self.noise)[:, None], np.zeros(n)
        transition = self.transition(gap)[0]
        for _ in range(n):  # the change of each state that a few readings a gap apart would show
            shown, rows = shown + (rows**2).sum(axis=0), rows @ transition
        state = np.zeros(self.state_size)
        shown = np.where((shown > 0) & np.isfinite(shown), shown, 1.0)
        self._start(state[None], np.zeros((1, n)), np.zeros((1, n, n)), shown**-0.5)
        return np.tile(state, (count, 1))

    def _start(self, state: np.ndarray, *given: np.ndarray) -> None:
        """Write the numbers of series with means and covariances, and a unit of each state where it is diffuse."""
        arrays = [np.ascontiguousarray(x) for x in (*given, state)]
        *pointers, place = (_pointer(x.ctypes.data) for x in arrays)
        pointers += [None] * (3 - len(given))  # type: ignore[list-item]
        self._library.rfa_linear_start(self._handle, _integer(len(state)), *pointers, place)

    def bound_step(self, state: np.ndarray, sensor: int) -> tuple[Any, ...]:
        """A step that takes one reading of a sensor, -1 for all, with buffers bound once, and changes the state.

        Returns:
            The place of the reading and its shape; an array with the place of its time; a function and its argument,
            whose call takes the reading and returns the number of a fault, after which the state is as before; what
            is found, in the order of `Found`, then the reading; the kernel and the sensor.
        """
        out = np.full(self.ends[-1] + len(self.noise), np.nan)
        size = len(self.noise) if sensor < 0 else int(self.sizes[sensor])
        head, reading = np.array([0.0, sensor]), out[self.ends[-1] :][:size]
        self._handles.append(self._new())
        handle = self._handles[-1]
        pointers = [_pointer(x.ctypes.data) for x in (state, head, reading)]
        sizes = map(_integer, (self.states, self.all_parts, len(self.noise)))
        self._library.rfa_linear_bind(handle, *pointers, None, _pointer(out.ctypes.data), *sizes)
        run = ctypes.PyDLL(self._library._name).rfa_linear_step  # it is too short to let other threads run
        self._bound.append(state)
        return reading, reading.shape, head, run, handle, out, self, sensor

    def run(self, rows: Rows, state: np.ndarray, smooth: bool = False) -> tuple[Found, tuple[str, int, int] | None]:
        """Filter rows from the states `(series, size)` before them, which become those after. Or smooth from a start.

        Returns:
            What is found, and a fault with its series and row, or None.
        """
        (series, length, width), n = rows.readings.shape, self.states
        parts = self.all_parts if rows.sensor is None else self.one_parts
        shapes = [(n,), (n, n), (parts,), (parts,), (width,), (width,), ()]
        shared = [1 if x is None else len(x) for x in (rows.times, rows.control)]
        found = Found(*(np.empty((series, length, *shape)) for shape in shapes))
        strides = (length * (count > 1) * each for count, each in zip(shared, (1, self.inputs), strict=True))
        threads = threads_for(series, length * parts, n + 4)
        given = _Rows(series, length, width, parts, threads, smooth, *strides)
        fault = np.zeros((series, 2), dtype=np.int64)
        arrays = {"times": rows.times, "readings": rows.readings, "input": rows.control, "sensor": rows.sensor}
        arrays |= {"observation": rows.observation, "noise": rows.noise}
        arrays |= {"state": state, "fault": fault, **found._asdict()}
        set_pointers(given, **arrays)
        if self._library.rfa_linear_run(self._handle, ctypes.byref(given)):
            raise MemoryError("rfa: no memory for the linear filter")
        if not fault[:, 0].any():
            return found, None
        first = int(np.argmax(fault[:, 0] > 0))
        return found, (FAULTS[fault[first, 0]], first, int(fault[first, 1]))


def noise_name(sensor: str) -> str:
    """The name of the factor of a sensor's R."""
    return f"observation_noise.{sensor}" if sensor else "observation_noise"


def fault_error(fault: str, name: str, time: Any, row: int | None = None, step: float = 0.0) -> ValueError:
    """Of a fault of a kernel at a time. `name` is the argument with the times, `step` that of a discrete model."""
    if row is not None and name != "query_times":  # those of `predict` may be sorted by now
        time = f"{time} in row {row}"
    if fault == "infinite":
        name, time = name.replace("time", "reading"), f"an infinite value at {time}"
    expected = {
        "late": "a time not before the last one, or the start",
        "steps": f"gaps of whole steps of {step:g}",
        "overflow": "a shorter gap, or smaller numbers: the state overflows",
        "infinite": "finite numbers, NaN where missing",
    }
    if fault not in expected:  # of a function
        return ValueError(f"{fault}, at time {time}")
    return ValueError(f"{name}: got {time}, expected {expected[fault]}")


def check_model(model: LinearModel, names: tuple[str, ...], diffuse: bool) -> None:
    """Raise `ValueError` for a batch of models or a singular R; warn of states that no reading will ever show."""
    require(not len(model.batch_shape), "model", f"a batch of {tuple(model.batch_shape)} models", "one model")
    noise, end = model.observation_noise.detach(), 0
    for name, size in model.sensors.items():
        block, end = noise[end : end + size, end : end + size], end + size
        regular = bool(torch.linalg.cholesky_ex(block).info == 0)
        require(regular, "observation_noise", f"a singular R{f' of {name}' * bool(name)}", "a positive definite matrix")
    if not diffuse:
        return
    dynamics = model.dynamics.detach()
    dynamics = dynamics / (float(torch.linalg.matrix_norm(dynamics, 1)) or 1.0)
    rows = [model.observation.detach() / noise.diagonal().sqrt()[:, None]]
    for _ in range(model.state_size - 1):
        rows.append(rows[-1] @ dynamics)
    seen = torch.cat(rows)
    length = seen.square().sum(0).sqrt()
    _, values, basis = torch.linalg.svd(seen / torch.where(length > 0, length, 1.0), full_matrices=True)
    rank = int((values > _UNSEEN * values.max().clamp(min=1e-300)).sum())
    if rank < model.state_size:
        unseen = basis[rank:].abs().amax(0) > 1e-6
        which = ", ".join(name for name, hidden in zip(names, unseen.tolist(), strict=True) if hidden)
        warnings.warn(f"observation: no reading tells {which} of a diffuse start; their variance stays infinite",
                      UserWarning, stacklevel=4)  # fmt: skip
