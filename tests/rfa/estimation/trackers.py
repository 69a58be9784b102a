"""A tracker in the plane, and one of two sensors, that the tests share."""

import numpy as np
from filterpy.common import Q_discrete_white_noise

from rfa.estimation import LinearSDE, RobustFilter

F = np.array([[1, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.5], [0, 0, 0, 1]])
Q = Q_discrete_white_noise(2, 0.5, 0.8, block_size=2)
H = np.eye(4)[[0, 2]]
R = np.array([[1.0, 0.3], [0.3, 2.0]])
START = np.array([1.0, 0.0, -1.0, 0.5]), np.diag([10.0, 4.0, 10.0, 4.0])
A = np.kron(np.eye(2), [[0.0, 1.0], [0.0, 0.0]])
DIFFUSION = np.kron(np.eye(2), [[0.0, 0.0], [0.0, 0.3]])
ALONE = np.array(
    [[0.0, 0.0, 1.0, 0.0], [0.0, 0.2, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
)  # of a sensor with three components
SENSORS = {"gps": H, "radar": ALONE}, {"gps": R, "radar": np.diag([0.5, 1.0, 2.0])}


def tracker(**options):
    options = {"start": START, "start_at": "before", "robust": False} | options
    return RobustFilter(LinearSDE.discrete(F, Q, H, R, 0.5), **options)


def two_sensors(**options):
    return RobustFilter(LinearSDE(A, DIFFUSION, *SENSORS), **options)


def readings_of(length, seed=0, outliers=0.0):
    """Positions of a track `(length, 2)`, some of them far off."""
    rng = np.random.default_rng(seed)
    state, found = START[0].copy(), []
    for _ in range(length):
        state = F @ state + rng.multivariate_normal(np.zeros(4), Q)
        wrong = 30.0 if rng.random() < outliers else 1.0
        found.append(H @ state + wrong * rng.multivariate_normal(np.zeros(2), R))
    return np.array(found)
