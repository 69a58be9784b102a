"""Random shapes, parameters and options, and the errors of a float32 computation against the float64 reference."""

import torch

from rfa.ops import robust_filter_attention

BLOCKS = (96, 128, 192, 256)  # of queries and of keys, and their multiples


class Chance:
    """Draws from one generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, n):
        return int(torch.randint(n, (), generator=self.generator))

    def once_in(self, n):
        return self.below(n) == 0

    def choice(self, *of):
        return of[self.below(len(of))]

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def log_uniform(self, low, high, *shape):
        """As many small numbers as large ones, and 0 once in six."""
        drawn = 10.0 ** self.uniform(low, high, *shape)
        return drawn.masked_fill(self.uniform(0, 6, *shape) < 1, 0.0)

    def length(self):
        return self.choice(1 + self.below(20), 1 + self.below(300), self.choice(*BLOCKS) - 1 + self.below(3))


def random_problem(seed):
    """`(inputs, options, learned)`: `learned` are the names whose gradients are asked for."""
    chance = Chance(seed)
    batch, heads, keys = 1 + chance.below(3), 1 + chance.below(3), chance.length()
    modes = chance.choice(1 + chance.below(10), 16, 20, 32, 40, 64)
    options, queries = _times(chance, batch, keys)
    options["causal"], options["weight"] = not chance.once_in(3), chance.choice("student_t", "exponential")
    options["prior"], options["gate"] = chance.choice("lyapunov", "riccati"), not chance.once_in(4)
    options["rotate_values"] = not chance.once_in(3)
    options["query_noise_in_bias"] = options["prior"] == "lyapunov" and chance.once_in(4)
    if chance.once_in(3):
        options["key_mask"] = chance.uniform(0, 1, batch, keys) < chance.choice(0.1, 0.5, 0.95)
    if chance.once_in(4) and queries <= keys:
        ids = torch.randint(0, chance.choice(2, 8), (batch, keys), generator=chance.generator)
        options["segment_ids"] = ids if chance.once_in(2) else ids.sort(-1).values
    value_modes = modes if options["rotate_values"] else chance.choice(modes, 1 + chance.below(50))
    size = 10.0 ** chance.choice(0.0, 0.0, 0.0, 1.0, 3.0)
    inputs = {
        "query": size * chance.normal(batch, heads, queries, 2 * modes),
        "key": size * chance.normal(batch, heads, keys, 2 * modes),
        "value": chance.choice(1.0, size) * chance.normal(batch, heads, keys, 2 * value_modes),
        "decay": chance.log_uniform(-4, 0.7, heads),
        "frequency": chance.normal(heads, modes) * chance.log_uniform(-3, 0.5, heads, modes),
        "process_noise": chance.log_uniform(-3, 2, heads),
        "key_noise": chance.log_uniform(-3, 2, heads),
        "query_noise": chance.log_uniform(-3, 2, heads),
        "noise_floor": chance.log_uniform(-4, 0, heads),
        "robustness": 10.0 ** chance.uniform(-1, 6, heads),
        "inverse_temperature": 10.0 ** chance.uniform(-2, 1, heads),
    }
    # log Sigma at lag 0 without noise, and the log gain without process noise, are what a dtype's smallest number makes
    # of them: there is no common value to compare.
    inputs["noise_floor"] += 1e-3 * (inputs["key_noise"] + inputs["noise_floor"] == 0)
    if options["prior"] == "riccati":
        inputs["process_noise"] += 1e-3 * (inputs["process_noise"] == 0)
    if chance.once_in(4):
        inputs["horizon"] = chance.log_uniform(-1, 1, heads)
    learned = list(inputs)
    if chance.once_in(2):
        learned.remove("frequency")  # then the kernel turns the states, and else autograd
    else:
        learned += [name for name in ("times", "query_times") if name in options]
    inputs = {name: x.float() for name, x in inputs.items()}
    if "key_mask" in options:  # what takes no part may hold anything
        absent = ~options["key_mask"][:, None, :, None]
        for name in ("key", "value"):
            inputs[name] = inputs[name].masked_fill(absent, torch.nan)
    return inputs, options, learned


def _times(chance, batch, keys):
    """Uniform, or irregular, of all samples or of each; queries at the last keys, or anywhere."""
    kind = chance.choice("uniform", "irregular", "queried")
    queries = chance.choice(keys, 1 + chance.below(keys))
    if kind == "uniform":
        return {}, queries
    lead = chance.choice((), (batch,))
    options = {"times": 10.0 ** chance.choice(-1, 0, 1) * chance.uniform(0.1, 2.0, *lead, keys).cumsum(-1)}
    if kind == "queried":  # between the keys, before the first and far beyond the last, in no order
        queries, lead, end = chance.length(), chance.choice((), (batch,)), float(options["times"].max())
        options["query_times"] = chance.uniform(-0.2 * end, chance.choice(1.2, 3.0) * end, *lead, queries)
    return options, queries


def run(inputs, options, learned, backend, dtype):
    """Output, log precision and every gradient by name, in float64; -inf and its gradient are left out.

    With them, in float64, the size of each gradient of the scores if its terms did not cancel.
    """
    given = {n: x for n, x in {**inputs, **options}.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    given = {n: x.to(dtype) if n in inputs else x for n, x in given.items()}
    given = {n: x.detach().clone().requires_grad_(n in learned) for n, x in given.items()}
    results = robust_filter_attention(**{**options, **given}, return_log_precision=True, backend=backend)
    g = torch.Generator().manual_seed(0)
    left, right = (torch.randn(x.shape, generator=g) for x in results)
    output, log_precision = results
    seen = log_precision > -torch.inf
    total = (left.double() * output).sum() + (right.double() * log_precision)[seen].sum()
    leaves = {n: given[n] for n in learned}
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True, retain_graph=True)
    found = {"output": output, "log_precision": log_precision, **dict(zip(leaves, gradients, strict=True))}
    found = {n: x.detach().double() for n, x in found.items()}
    if dtype == torch.float32:
        return found, None
    reach = left.double().abs().sum(-1) * inputs["value"].nan_to_num().abs().max() + right.double().abs()
    gradients = torch.autograd.grad((reach * log_precision)[seen].sum(), list(leaves.values()), materialize_grads=True)
    return found, {n: _largest(x) for n, x in zip(leaves, gradients, strict=True)}


def _largest(x):
    return float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0


def errors(inputs, options, learned, backend):
    """By name: (the backend's error, the float32 reference's, the largest number, the size that cancels)."""
    expected, uncancelled = run(inputs, options, learned, "reference", torch.float64)
    dense, _ = run(inputs, options, learned, "reference", torch.float32)
    actual, _ = run(inputs, options, learned, backend, torch.float32)
    found = {}
    for name, wanted in expected.items():
        known = wanted.isfinite()  # the log precision of a row without keys is -inf
        assert torch.equal(actual[name][~known], wanted[~known]), name
        error, of_dense = (_largest(torch.where(known, x[name] - wanted, 0.0)) for x in (actual, dense))
        assert bool(actual[name][known].isfinite().all()), name
        found[name] = error, of_dense, _largest(wanted), uncancelled.get(name, 0.0)
    return found
