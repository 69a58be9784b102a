"""Small faults of the library, each of which some test must find: a sign, a bound, an index, a dtype, a term.

`old` occurs exactly once in its file (`test_mutations.py` sees to it), and `new` takes its place. `tests` are the files
and tests that are the first to notice. `run.py` applies the faults and runs the tests.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: in `file`, below `src/rfa`, the text `old` becomes `new`; `breaks` says what is wrong then."""

    file: str
    old: str
    new: str
    breaks: str
    tests: str


DYNAMICS = [
    Mutation("dynamics/covariance.py", "    rate = 2 * decay\n", "    rate = 1 * decay\n",
             "variance accumulates at half the rate", "dynamics/test_covariance.py"),
    Mutation("dynamics/covariance.py", "torch.exp(-2 * decay * lag)", "torch.exp(-1 * decay * lag)",
             "the key's own noise fades at half the rate", "dynamics/test_covariance.py"),
    Mutation("dynamics/covariance.py", "0.5 * (contraction - root.square())", "0.5 * (contraction + root.square())",
             "a sign in the Riccati root", "dynamics/test_riccati_gain.py"),
    Mutation("dynamics/covariance.py", "contraction * root.square())", "root.square())",
             "the contraction is missing where the process noise is large", "dynamics/test_riccati_gain.py"),
    Mutation("dynamics/integrals.py", "_SERIES_TERMS = 0.5, 15", "_SERIES_TERMS = 0.5, 4",
             "the series near zero is cut off", "dynamics/test_covariance.py"),
    Mutation("dynamics/integrals.py", "closed = (n * closed - decayed) / large", "closed = (closed - decayed) / large",
             "the recursion of second derivatives", "dynamics/test_covariance.py"),
    Mutation("dynamics/transition.py", "sin * real + cos * imaginary", "cos * imaginary - sin * real",
             "imaginary parts turn the other way", "dynamics/test_transition.py"),
    Mutation("dynamics/transition.py", '"mps" else torch.float64', '"mps" else torch.float32',
             "phases in single precision", "dynamics/test_transition.py"),
    Mutation("dynamics/regimes.py", "rises = (alpha > beta)", "rises = (alpha > 0)",
             "a peak lag where the response falls from the start", "dynamics/test_regimes.py"),
    Mutation("dynamics/integrals.py", "(slow[1] - fast[1]) * lag", "(fast[1] - slow[1]) * lag",
             "the sign of a difference of frequencies", "dynamics/test_coupling.py"),
    Mutation("dynamics/covariance.py", "torch.minimum(2 * mu, kappa)", "torch.minimum(mu, kappa)",
             "the slower of two rates", "dynamics/test_time_dependent_noise.py"),
    Mutation("dynamics/spectrum.py", "frequency.abs().amax(dim=-1)", "frequency.amax(dim=-1)",
             "negative frequencies do not count for the damping", "dynamics/test_spectrum.py"),
]  # fmt: skip

OPERATOR = [
    Mutation("ops/reference.py", "squares - 2 * decay * (query @ key.mT)", "squares - decay * (query @ key.mT)",
             "the residual's cross term", "ops/test_filter_attention_values.py"),
    Mutation("ops/dense.py", "robustness + 1 if weight", "robustness if weight",
             "the exponent of the Student-t weight", "ops/test_filter_attention_values.py"),
    Mutation("ops/reference.py", "options.dropout) * decay @ value,\n        poisoned[0] |",
             "options.dropout) @ value,\n        poisoned[0] |",
             "values are not decayed", "ops/test_filter_attention_values.py"),
    Mutation("ops/dense.py", "return estimate.masked_fill(empty, 0.0)", "return estimate + 0.0",
             "a query without keys has an estimate", "ops/test_filter_attention_robustness.py"),
    Mutation("ops/reference.py", "ahead = frequency * parameters.horizon[:, None]",
             "ahead = -frequency * parameters.horizon[:, None]",
             "values turn back over the horizon", "ops/test_filter_attention_values.py"),
    Mutation("ops/reference.py", "variance + head.query_noise if options.query_noise_in_bias else variance",
             "variance", "the query's noise is missing in the bias", "ops/test_filter_attention_values.py"),
    Mutation("ops/positions.py", "lag >= 0 if causal", "lag > 0 if causal",
             "a token does not see itself", "ops/test_filter_attention_values.py"),
    Mutation("ops/positions.py", "absent.int().argmin(-1, keepdim=True)", "absent.int().argmax(-1, keepdim=True)",
             "times count from padding", "ops/test_filter_attention_invariances.py nn/test_cache.py"),
    Mutation("ops/prior.py", "F.pad(follows[:, 1:], (0, 1))", "F.pad(follows[:, :-1], (1, 0))",
             "a first key does not know the interval behind it", "ops/test_filter_attention_values.py"),
    Mutation("ops/prior.py", ".masked_fill(~(follows | leads)[:, None, :], 0.0)",
             ".masked_fill(~follows[:, None, :], 0.0)",
             "every first key has gain one", "ops/test_filter_attention_values.py"),
    Mutation("ops/prior.py", "for candidate in (after, before):", "for candidate in (before, after):",
             "a query takes the gains up to the next key", "ops/test_filter_attention_values.py"),
    Mutation("ops/dense.py", "torch.log1p(near) + torch.log(torch.maximum(residual, ceiling) / ceiling)",
             "torch.log1p(near)", "large residuals all cost the same", "ops/test_fuzz.py"),
    Mutation("ops/dense.py", "poisoned = ~states.isfinite().all(-1)", "poisoned = states.isnan().any(-1)",
             "an infinite state reaches queries that do not see it", "ops/test_poison.py"),
    Mutation("ops/cumulative.py", "remaining = torch.exp(-2 * decay)", "remaining = torch.exp(-decay)",
             "variance along a path of tokens", "nn/test_content.py"),
    Mutation("ops/tensor.py", "weighed = evidence(scaled.sum(2, keepdim=True), (robustness * modes, least)",
             "weighed = evidence(scaled.sum(2, keepdim=True), (robustness, least)",
             "the number of modes in the anisotropic score", "ops/test_tensor.py"),
    Mutation("ops/routing.py", "- modes * total.log()", "- total.log()",
             "the normaliser of a Gaussian of several modes", "ops/test_routing.py"),
    Mutation("ops/coupled.py", "variance = remaining * x_noise + cross_power * driver_variance + added",
             "variance = remaining * x_noise + added", "the driver's uncertainty is left out", "nn/test_coupled.py"),
]  # fmt: skip

KERNELS = [
    Mutation("ops/cpu/kernels/score.h", "/ (d.weighted + ONE)", "/ (d.weighted + 2.0f * ONE)",
             "the slope of the Student-t weight", "ops/test_filter_attention_gradients.py"),
    Mutation("ops/cpu/kernels/score.h", "weight * value * BITS", "weight * value",
             "nats and bits in the gradient of the decay", "ops/test_filter_attention_gradients.py"),
    Mutation("ops/cpu/kernels/score.h", "slope * decay * -0.5f", "slope * decay * -1.0f",
             "the gradient of a key's norm", "ops/test_filter_attention_gradients.py"),
    Mutation("ops/cpu/kernels/forward.h", "SAFE_LOW = 8.6736174e-19f", "SAFE_LOW = 0.0f",
             "rows far below the bound underflow", "ops/cpu/test_random.py"),
    Mutation("ops/cpu/kernels/forward.h", "if (!safe[i]) rows_[i].offset", "rows_[i].offset",
             "an outlier changes its neighbours' digits", "ops/cpu/test_underflow.py"),
    Mutation("ops/cpu/kernels/visibility.h", "times_[start + j] <= time);", "times_[start + j] < time);",
             "a query does not see the key of its own time", "ops/test_filter_attention_values.py"),
    Mutation("ops/cpu/kernels/visibility.h", "block.last <= earliest", "block.last <= latest",
             "a whole block is seen though its last keys lie ahead",
             "ops/test_filter_attention_shapes.py ops/cpu/test_random.py"),
    Mutation("ops/cpu/kernels/lag_tables.h", ": n - middle_, task_.p.lags - 1)", ": n - middle_, task_.p.lags - 2)",
             "the longest lag of a table", "ops/test_filter_attention_values.py"),
    Mutation("ops/cpu/kernels/backward.h", "add_multiple(2.0f * norm_sums_[i], query, sums)",
             "add_multiple(1.0f * norm_sums_[i], query, sums)",
             "the gradient of a query's norm", "ops/test_filter_attention_gradients.py"),
    Mutation("ops/cpu/kernels/decode.h", "if (j >= seen.clear) z = choose(", "if (j > seen.clear) z = choose(",
             "decoding reads keys that are masked", "models/test_generation.py nn/test_cache.py"),
    Mutation("ops/triton/kernels/pairs.py", "grad_dot = -2.0 * grad_residual * decay",
             "grad_dot = -1.0 * grad_residual * decay",
             "the gradient of a product of query and key", "ops/triton/test_accuracy.py"),
    Mutation("ops/triton/kernels/pairs.py", "band = (row - column + COLUMNS) // COLUMNS",
             "band = (row - column + COLUMNS + 1) // COLUMNS",
             "diagonals of a tile fall into the wrong window", "ops/triton/test_accuracy.py"),
    Mutation("ops/triton/kernels/prior.py", "complement = _one_less_exponential(2.0 * decay_sum",
             "complement = _one_less_exponential(1.0 * decay_sum",
             "the variance of short lags", "ops/triton/test_accuracy.py"),
    Mutation("ops/triton/kernels/forward.py", "visible &= lag >= 0", "visible &= lag > 0",
             "a token does not see itself", "ops/triton/test_accuracy.py"),
]  # fmt: skip

ESTIMATION = [
    Mutation("estimation/linear_sde.py", "decay[..., None, :]) / 2", "decay[..., None, :])",
             "the mean of two decays", "estimation/test_linear_sde.py"),
    Mutation("estimation/linear_sde.py", "variance = variance + phi @ variance @ phi.mT",
             "variance = variance + phi @ variance", "doubling a step of the covariance",
             "estimation/test_linear_sde.py"),
    Mutation("estimation/gaussian.py", "(row * spread).sum(-1, keepdim=True) + 1",
             "(row * spread).sum(-1, keepdim=True)", "the measurement noise in the Kalman gain",
             "estimation/test_compiled.py"),
    Mutation("estimation/gaussian.py", "symmetric(transition @ self.covariance @ transition.mT) + variance",
             "symmetric(transition @ self.covariance @ transition.mT)", "a prediction without process noise",
             "estimation/test_compiled.py"),
    Mutation("estimation/gaussian.py", "self.constant - lost", "self.constant + lost",
             "the objective of a state that moves", "estimation/test_compiled.py"),
    Mutation("estimation/noise_scale.py", "weight = ratio.sum(-1) / (ratio * scale).sum(-1)",
             "weight = ratio.sum(-1) / (probability * scale).sum(-1)", "the weight of a row over its scales",
             "estimation/test_recursion.py"),
    Mutation("estimation/recursive_filter.py", "log_odds = log_odds + change", "log_odds = log_odds - change",
             "a jump is never believed", "estimation/test_recursion.py"),
    Mutation("estimation/recursive_filter.py", "covariance=updated.covariance + across",
             "covariance=updated.covariance - across",
             "scales that are left open narrow the band", "estimation/test_recursion.py"),
]  # fmt: skip

READINGS = [
    Mutation("estimation/kernels/likelihood.cpp", "right[j] = c * x + s * residual", "right[j] = c * x",
             "a diffuse direction is not fitted", "estimation/test_readings.py"),
    Mutation("estimation/kernels/likelihood.cpp", "total += std::log(p.units[i]);", "total += 0;",
             "the likelihood depends on the unit of a diffuse state", "estimation/test_readings.py"),
    Mutation("estimation/kernels/likelihood.cpp", "mean[i] += line[j] * right[j];", "mean[i] += line[j] * 0;",
             "the state that a triangle determines", "estimation/test_readings.py"),
    Mutation("estimation/kernels/gaussian.h", "(noise * gain[i] - y[i]) * gain[j]", "(gain[i] - y[i]) * gain[j]",
             "a noise other than 1 in Joseph's form", "estimation/test_readings.py"),
    Mutation("estimation/kernels/smoother.h", "row[pivots[earlier]] = 0;", "row[pivots[earlier]] += 1e-3;",
             "later information is counted twice", "estimation/test_readings.py"),
    Mutation("estimation/kernels/robust.cpp", "trusted = int64_t(from[0]), log_odds = from[1];",
             "trusted = int64_t(from[0]);", "an update forgets the challenger", "estimation/test_readings.py"),
    Mutation("estimation/readings_problem.py", "] + table.noise.numpy()", "]",
             "known noises do not count", "estimation/test_robust_filter.py"),
    Mutation("estimation/parameter_search.py", "if not total > best.total + _GAIN:", "if total:",
             "a variance that has gone to zero stays there", "estimation/test_components.py"),
    Mutation("estimation/parameter_search.py", "(4 * _HESSIAN_STEP**2)", "(2 * _HESSIAN_STEP**2)",
             "standard errors by a factor of the root of 2", "estimation/test_components.py"),
]  # fmt: skip

PIPELINE = [
    Mutation("training/trainer.py", '"lr": learning_rate / 2', '"lr": learning_rate',
             "the rate of the SDE's parameters", "training/test_optimization.py"),
    Mutation("training/trainer.py", "DYNAMICS_CLIP = 1e-4", "DYNAMICS_CLIP = 1e-3",
             "the clip of the SDE's gradients", "training/test_optimization.py"),
    Mutation("training/trainer.py", "top = warmup * total - 1", "top = warmup * total",
             "the schedule's peak is a step late", "training/test_optimization.py"),
    Mutation("training/trainer.py", "self.args.dataloader_drop_last = False", "self.args.dataloader_drop_last = True",
             "validation leaves out the last blocks", "training/test_metrics.py"),
    Mutation("data/stream.py", "return len(self.stream) // self.length", "return (len(self.stream) - 1) // self.length",
             "the last whole block is lost", "data/test_stream.py"),
    Mutation("data/fragments.py", 'and left != right and text[position] != "\'"', "and left != right",
             "a text is cut inside a token", "data/test_fragments.py"),
    Mutation("evaluation/windows.py", "max(1, min(lengths) // 2)", "max(1, min(lengths))",
             "targets of the matched protocol with too little context", "evaluation/test_windows.py"),
    Mutation("evaluation/perplexity.py", "np.arange(-targets, 0)", "np.arange(-targets, 0) - 1",
             "a loss counts for the document of the token before", "evaluation/test_observers.py"),
    Mutation("evaluation/perplexity.py", "/ max(windows_count - 1, 1) * windows_count", "* 1",
             "the standard error over windows", "evaluation/test_perplexity.py"),
]  # fmt: skip

MUTATIONS = [*DYNAMICS, *OPERATOR, *KERNELS, *ESTIMATION, *READINGS, *PIPELINE]
