#!/usr/bin/env bash
# filterpy's `update(None)` takes a step without a reading, yet `log_likelihood` after it is not 0: it is the density of a
# reading exactly as predicted, with the variance of the reading before. A sum over a series with gaps is wrong by that.
# Exits with 0 while this is seen, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'filterpy==2.0.0' 'numpy==2.3.5' 'scipy==1.16.3'
"$folder/venv/bin/python" - <<'PY'
import sys

import filterpy
import numpy as np
from filterpy.kalman import KalmanFilter

print("filterpy", filterpy.__version__)
readings = [0.5, None, None, None, 0.2]


def summed(skip: bool) -> float:
    """Of a random walk with noises of 1. `skip`: steps without a reading do not count."""
    walk, total = KalmanFilter(dim_x=1, dim_z=1), 0.0
    walk.F = walk.H = walk.Q = walk.R = walk.P = np.eye(1)
    for z in readings:
        walk.predict()
        walk.update(z)
        total += 0.0 if skip and z is None else walk.log_likelihood
    return total


# Of the first reading P + Q + R = 3. It leaves mean 1 / 3 and P = 2 / 3, and four steps later the last reading has + 5.
errors, variances = np.array([0.5, 0.2 - 1 / 3]), np.array([3.0, 2 / 3 + 5])
by_hand = float(-0.5 * (np.log(2 * np.pi * variances) + errors**2 / variances).sum())
with_gaps, without = summed(False), summed(True)
print(f"log likelihood of {readings}, by hand: {by_hand:.4f}")
print(f"expected of filterpy: {by_hand:.4f}; seen: {with_gaps:.4f}, without the three gaps {without:.4f}")
assert abs(without - by_hand) < 1e-9
sys.exit(0 if abs(with_gaps - by_hand) > 1 else 1)
PY
