"""Speed of `RobustFilter` with a tracker's matrices, as ratios to filterpy and to dynamax's filter under jit(vmap).

    python benchmarks/tracks.py --peer /path/to/a/python/with/dynamax

In turns with the peers, which must find the same: 10,000 updates (filterpy, in this process), and 1,000 tracks of 1,000
readings (dynamax, compiled before, in processes of their own). The least time of each counts.
"""

import argparse
import subprocess
import sys
import time

import numpy as np

TRANSITION = np.eye(4) + 0.5 * np.eye(4, k=2)
NOISE, OBSERVATION, READING_NOISE = 0.1 * np.eye(4), np.eye(2, 4), np.eye(2)
START = np.zeros(4), 10.0 * np.eye(4)


def tracks(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, length, 2)).cumsum(1)


def rfa_filter(robust: bool, place: str):
    from rfa.estimation import LinearSDE, RobustFilter

    model = LinearSDE.discrete(TRANSITION, NOISE, OBSERVATION, READING_NOISE)
    return RobustFilter(model, robust=robust, start=START, start_at=place)


def online(rounds: int, count: int = 10_000) -> None:
    from filterpy.kalman import KalmanFilter

    readings, times = tracks(1, count)[0], [float(k) for k in range(count)]
    seconds: dict[str, list[float]] = {"filterpy": [], "Kalman": [], "robust": []}
    for _ in range(rounds):
        peer = KalmanFilter(4, 2)
        peer.F, peer.Q, peer.H, peer.R, peer.x, peer.P = TRANSITION, NOISE, OBSERVATION, READING_NOISE, *START
        begin = time.perf_counter()
        for k in range(count):
            peer.predict()
            peer.update(readings[k])
        seconds["filterpy"].append(time.perf_counter() - begin)
        for name in ("robust", "Kalman"):
            ours = rfa_filter(name == "robust", "before")
            begin = time.perf_counter()
            for k in range(count):
                found = ours.update(times[k], readings[k])
            seconds[name].append(time.perf_counter() - begin)
        np.testing.assert_allclose(found.states, peer.x, atol=1e-8)
    for name in ("Kalman", "robust"):
        ratio, each = min(seconds[name]) / min(seconds["filterpy"]), min(seconds[name]) / count * 1e6
        print(f"{count} updates, {name}: {each:.2f} us each, {ratio:.3f} of filterpy's predict and update")


def serve(digits: str) -> None:
    """In the peer's process: filter at each line of stdin, and print the seconds and a sum of the result."""
    import jax
    import jax.numpy as jnp
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM, lgssm_filter

    jax.config.update("jax_enable_x64", digits == "64")
    names = "dynamics_weights dynamics_covariance emission_weights emission_covariance initial_mean initial_covariance"
    arrays = TRANSITION, NOISE, OBSERVATION, READING_NOISE, *START
    given = {name: jnp.array(x) for name, x in zip(names.split(), arrays, strict=True)}
    parameters, _ = LinearGaussianSSM(4, 2).initialize(jax.random.PRNGKey(0), **given)
    run = jax.jit(jax.vmap(lambda z: lgssm_filter(parameters, z)))
    readings = jnp.array(tracks(1000, 1000))
    jax.block_until_ready(run(readings))
    for _ in sys.stdin:
        begin = time.perf_counter()
        found = jax.block_until_ready(run(readings))
        print(time.perf_counter() - begin, float(found.filtered_means[:, -1].sum()), flush=True)


def many(rounds: int, python: str) -> None:
    readings, times, pipe = tracks(1000, 1000), np.arange(1000.0), subprocess.PIPE
    command, digits = [python, __file__, "--serve"], ("32", "64")
    peers = [subprocess.Popen([*command, each], stdin=pipe, stdout=pipe, text=True) for each in digits]
    seconds: dict[str, list[float]] = {name: [] for name in (*digits, "robust", "Kalman")}
    for _ in range(rounds):
        for name, peer in zip(digits, peers, strict=True):
            print(file=peer.stdin, flush=True)
            taken, total = map(float, peer.stdout.readline().split())
            seconds[name].append(taken)
        for name in ("robust", "Kalman"):
            ours = rfa_filter(name == "robust", "reading")
            begin = time.perf_counter()
            found = ours.filter(times, readings)
            seconds[name].append(time.perf_counter() - begin)
        assert abs(found.states[:, -1].sum() / total - 1) < 1e-6, "dynamax finds something else"
    for peer in peers:
        peer.communicate()
    for name in ("Kalman", "robust"):
        ratios = " and ".join(f"{min(seconds[name]) / min(seconds[x]):.2f} (float{x})" for x in digits)
        print(f"1,000 tracks of 1,000 readings, {name}: {min(seconds[name]):.3f} s, {ratios} of dynamax")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="a Python with dynamax")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        sys.exit()
    online(given.rounds)
    if given.peer:
        many(given.rounds, given.peer)
