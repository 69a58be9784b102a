"""Speed of `RobustFilter` with a tracker's matrices, beside filterpy, and dynamax and cuthbert under jit(vmap).

    python benchmarks/tracks.py --peer /path/to/a/python/with/dynamax/and/cuthbert

In turns with the peers, which must find the same: 10,000 updates (filterpy, in this process), and 1,000 tracks of 1,000
readings (the others, in processes of their own, which say how long they compile). The least time of each counts.
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


def dynamax_filter():
    import jax
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM, lgssm_filter

    names = "dynamics_weights dynamics_covariance emission_weights emission_covariance initial_mean initial_covariance"
    arrays = TRANSITION, NOISE, OBSERVATION, READING_NOISE, *START
    given = {name: jax.numpy.array(x) for name, x in zip(names.split(), arrays, strict=True)}
    parameters, _ = LinearGaussianSSM(4, 2).initialize(jax.random.PRNGKey(0), **given)

    return lambda z: lgssm_filter(parameters, z), lambda found: found.filtered_means


def cuthbert_filter():
    import jax.numpy as jnp
    from cuthbert import filter
    from cuthbert.gaussian import kalman

    roots = [jnp.array(np.linalg.cholesky(x)) for x in (NOISE, READING_NOISE, START[1])]
    transition, observation, zero = jnp.array(TRANSITION), jnp.array(OBSERVATION), jnp.zeros(4)

    def move(given):  # the first reading updates the start
        first = given[0] == 0
        return jnp.where(first, jnp.eye(4), transition), zero, jnp.where(first, 0.0, roots[0])

    def run(z):
        built = kalman.build_filter(zero, roots[2], move, lambda given: (observation, zero[:2], roots[1], given[1]))
        return filter(built, (jnp.arange(len(z)), z), built.init_prepare())

    return run, lambda found: found.mean


def serve(peer: str) -> None:
    """In the peer's process: filter at each line of stdin, and print the seconds and a sum of the result."""
    import jax

    name, digits = peer.split()
    jax.config.update("jax_enable_x64", digits == "float64")
    one, means_of = {"dynamax": dynamax_filter, "cuthbert": cuthbert_filter}[name]()
    run = jax.jit(jax.vmap(one))
    readings, begin = jax.numpy.array(tracks(1000, 1000)), time.perf_counter()
    compiled = run.lower(readings).compile()
    print(time.perf_counter() - begin, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        found = jax.block_until_ready(compiled(readings))
        print(time.perf_counter() - begin, float(means_of(found)[:, -1].sum()), flush=True)


def many(rounds: int, python: str) -> None:
    readings, times, pipe = tracks(1000, 1000), np.arange(1000.0), subprocess.PIPE
    names, totals = [f"{peer} float{digits}" for peer in ("dynamax", "cuthbert") for digits in (32, 64)], {}
    command = [python, __file__, "--serve"]
    peers = {name: subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, text=True) for name in names}
    compiled = {name: float(peer.stdout.readline()) for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in (*names, "robust", "Kalman")}
    for number in range(rounds):
        for name, peer in peers.items():
            if number and name.startswith("cuthbert"):
                continue  # it takes seconds
            print(file=peer.stdin, flush=True)
            taken, totals[name] = map(float, peer.stdout.readline().split())
            seconds[name].append(taken)
        for name in ("robust", "Kalman"):
            ours = rfa_filter(name == "robust", "reading")
            time.sleep(0.2)  # until the threads of the others are idle
            begin = time.perf_counter()
            found = ours.filter(times, readings)
            seconds[name].append(time.perf_counter() - begin)
        for name, total in totals.items():
            error = abs(found.states[:, -1].sum() / total - 1)
            assert error < (1e-9 if name.endswith("64") else 1e-3), f"{name} finds something else: {error}"
    for peer in peers.values():
        peer.communicate()
    for name, taken in seconds.items():
        print(f"1,000 tracks of 1,000 readings, {name}: {min(taken):.3f} s", end="")
        print(f", compiled in {compiled[name]:.1f} s" if name in names else "")
    for name in ("Kalman", "robust"):
        print(f"{name}:", ", ".join(f"{min(seconds[name]) / min(seconds[x]):.2f} of {x}" for x in names))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="a Python with dynamax and cuthbert")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        sys.exit()
    online(given.rounds)
    if given.peer:
        many(given.rounds, given.peer)
