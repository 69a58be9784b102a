"""The dense estimator: every observation is transported to every query. Any linear SDE, in float64, quadratic in T.

Along the grid, time index by time index,
- the recursive robust filter gives the state where the first weights are taken (`start="recursive"`),
- observations and contributions are carried to the next time,
- the consensus reweights them at each query.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .consensus import Consensus, LyapunovConsensus, RiccatiConsensus, reweighted_estimate
from .contributions import Contributions, TransportedObservations
from .gaussian import AffineUpdate, Gaussian, Information
from .grid import ForwardTransitions, ObservationGrid, Transitions, inverse_transitions
from .kalman import backward_information, combined, initial_gaussian
from .problem import EstimationProblem, QueryEstimate
from .recursive_filter import FilterPass, kalman_pass, robust_filter, robust_smoother


def dense_estimate(problem: EstimationProblem) -> QueryEstimate:
    """The estimate at every query, `(b, queries, ...)`."""
    options = problem.options
    if not options.robust_weight.gaussian:
        problem = replace(problem, grid=problem.grid.bounded())
    grid = problem.grid
    transitions, forward = Transitions.of(problem.sde, grid), ForwardTransitions.of(problem.sde, grid)
    first = initial_gaussian(problem.initial, grid, transitions)
    filtered, states, riccati = None, None, None
    if options.start == "recursive" and not options.robust_weight.gaussian:
        filtered = (robust_smoother if options.smooth else robust_filter)(grid, transitions, first)
        states = _means(filtered, options.smooth)
    if options.riccati:
        filtered = filtered or kalman_pass(grid, transitions, first)
        unobserved = None if problem.initial is None else _without_observations(first, transitions, grid.length)
        riccati = _riccati(problem, filtered, unobserved)
        grid = filtered.with_median_noise(grid)
    later = _later_observations(grid, transitions) if options.smooth else None
    initial = grid.information.zero() if problem.initial is None else problem.initial.information()
    earlier, estimates = TransportedObservations.none(grid), []
    indices = grid.query_index.unique()
    wanted = set(indices.tolist())
    for k in range(grid.length):
        if k:
            earlier, initial = forward.forward(k - 1, earlier), forward.forward(k - 1, initial)
        earlier = earlier.with_observation(grid, k)
        consensus: Consensus | None = None if riccati is None else next(riccati)
        if k in wanted:
            observations = earlier if later is None else earlier.concatenated(later[k])
            consensus = consensus or LyapunovConsensus(initial, observations, k, problem.stationary)
            state = None if states is None else states[k]
            estimate = reweighted_estimate(consensus, observations, grid, k, options, state)
            weights = _by_observation(estimate.weights, observations, grid) if options.with_weights else None
            estimates.append(estimate._replace(weights=weights))
    return QueryEstimate.stacked(estimates).gathered(torch.searchsorted(indices, grid.query_index.contiguous()))


def _later_observations(grid: ObservationGrid, transitions: Transitions) -> list[TransportedObservations]:
    """All later observations, transported back to each time index."""
    later = TransportedObservations.none(grid)
    found = [later]
    for k in reversed(range(grid.length - 1)):
        later = transitions.backward(k, later.with_observation(grid, k + 1))
        found.append(later)
    return found[::-1]


def _means(filtered: FilterPass, smooth: bool) -> list[Tensor]:
    """The robust filter's or smoother's mean at each time index, `(b, n)`."""
    states = [filtered.without_challengers(state.posterior) for state in filtered.states]
    if smooth:
        backward = backward_information(filtered.grid, filtered.transitions)
        states = [combined(state, later)[0] for state, later in zip(states, backward, strict=True)]
    return [state.mean for state in states]


def _without_observations(state: Gaussian, transitions: Transitions, length: int) -> list[Gaussian]:
    """The state at each time index, if nothing were observed."""
    states = [state]
    for k in range(length - 1):
        states.append(states[-1].predicted(*transitions[k]))
    return states


def _riccati(
    problem: EstimationProblem, filtered: FilterPass, unobserved: list[Gaussian] | None
) -> Iterator[RiccatiConsensus]:
    """The consensus at each time index, with the contributions to the Kalman filter or to the robust one."""
    grid, weighted, transitions = problem.grid, filtered.grid, filtered.transitions
    inverse = inverse_transitions(problem.sde, grid)
    inverse = inverse.repeat(len(transitions.transition) // len(inverse), 1, 1, 1)
    later = _later_contributions(filtered) if problem.options.smooth else None
    counts = problem.observation_counts()
    contributions = Contributions.none(weighted)
    for k, state in enumerate(filtered.states):
        if k:
            contributions = contributions.predicted(
                transitions[k - 1][0], inverse[:, k - 1], state.predicted.covariance
            )
        contributions = filtered.inherited(contributions, k)
        update = AffineUpdate.of_components(weighted.rows[:, k], state.gains)
        contributions = contributions.updated(weighted, k, update, filtered.gain_ratio[:, k])
        predicted = filtered.without_challengers(state.predicted)
        posterior = filtered.without_challengers(state.posterior)
        all_contributions = filtered.without_challengers(contributions)
        if later is not None:
            information, later_contributions = later[k]
            predicted = combined(predicted, information)[0]
            posterior, update = combined(posterior, information)
            all_contributions = contributions.multiplied(update.factor).concatenated(
                later_contributions.multiplied(update.gain)
            )
        yield RiccatiConsensus(
            predicted,
            posterior,
            all_contributions.with_kalman_gains(),
            all_contributions.remainder(posterior),
            problem.stationary,
            counts[:, k],
            counts[:, k] - grid.present[:, k].to(counts.dtype),
            None if unobserved is None else unobserved[k],
        )


def _later_contributions(filtered: FilterPass) -> list[tuple[Information, Contributions]]:
    """The backward information at each time index, and the part of each later observation in it."""
    grid, transitions = filtered.grid, filtered.transitions
    totals = backward_information(grid, transitions)
    contributions = Contributions.none(grid)
    found = [(totals[-1], contributions)]
    for k in reversed(range(grid.length - 1)):
        contributions = contributions.with_later_observation(grid, k + 1, filtered.gain_ratio[:, k + 1])
        contributions = contributions.backward(transitions, k, totals[k + 1] + grid.information.at(k + 1))
        found.append((totals[k], contributions))
    return found[::-1]


def _by_observation(weights: Tensor | None, observations: TransportedObservations, grid: ObservationGrid) -> Tensor:
    """`(b, T)`: the weights in the order of the observations as given."""
    assert weights is not None
    indices = torch.tensor(observations.indices, device=weights.device, dtype=torch.long)
    column, count = grid.observation_index[:, indices], grid.observation_count
    at = torch.where(grid.present[:, indices] & (column >= 0), column, count)  # the last column is cut off
    return weights.new_zeros(len(column), count + 1).scatter(1, at, weights)[:, :count]
