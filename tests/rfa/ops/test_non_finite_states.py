"""What is no number reaches the queries that see it, and nothing else: no other estimate and no other gradient."""

import torch
from cover import cover

from .problems import attend, irregular_times, problem

LENGTH, AT = 140, 130  # the key that is not finite shares its block with keys of other queries
BAD = [torch.nan, torch.inf]


def found(inputs, rows, backend, **options):
    """Estimates and log precisions of some rows, and all gradients of a loss of them alone."""
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    output, log_precision = (x[0, 0, rows] for x in attend(leaves, backend, **options))
    g = torch.Generator().manual_seed(0)
    total = sum((x * torch.randn(x.shape, generator=g)).sum() for x in (output, log_precision))
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {"output": output, "log_precision": log_precision, **dict(zip(leaves, gradients, strict=True))}


def assert_untouched(clean, found, place):
    for name, wanted in clean.items():
        actual = found[name]
        if name == place:
            actual, wanted = (torch.cat([x[:, :, :AT], x[:, :, AT + 1 :]], 2) for x in (actual, wanted))
        scale = float(wanted.abs().max())
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5 * max(scale, 1e-6), msg=name)


@cover(1, turned=["by the kernel", "by autograd"], timed=[False, True], bad=BAD, name=["query", "key", "value"])
def test_earlier_queries(name, bad, timed, turned, backend):
    """Causality holds for what is no number too."""
    inputs = problem(0, batch=1, heads=1, keys=LENGTH, dtype=torch.float32)
    options = {"times": irregular_times(0, LENGTH)} if timed else {}
    if turned == "by the kernel":
        options["frequency"] = inputs.pop("frequency")
    clean = found(inputs, slice(0, AT), backend, **options)
    inputs[name] = inputs[name].clone()
    inputs[name][0, 0, AT, 1] = bad
    assert_untouched(clean, found(inputs, slice(0, AT), backend, **options), name)
    output, log_precision = attend({**inputs, **options}, backend)
    seeing = slice(AT, AT + 1 if name == "query" else None)
    assert not output[0, 0, seeing].isfinite().all(-1).any()
    if name != "value":
        assert bool(log_precision[0, 0, seeing].isnan().all())


def dense_operators():
    """By name, estimates of a query, keys and values `(1, 2, length, 8)` of one length, causal, in float64."""
    from rfa.appendix.coupled import Observations, PredictionWeights, Process, coupled_filter_attention
    from rfa.appendix.tensor import tensor_filter_attention
    from rfa.ops.content import Noises, TokenDynamics, content_filter_attention
    from rfa.ops.dot_product import decayed_dot_product_attention
    from rfa.ops.positions import checked_positions
    from rfa.ops.routing import gaussian_parameters, located_posterior_routing

    one, modes = torch.ones(2, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    noises = {n: 0.3 * one for n in ("process_noise", "key_noise", "query_noise", "noise_floor")}
    weights = {"robustness": 4 * one, "inverse_temperature": one}

    def at(x):
        return checked_positions(1, x.shape[2], x.shape[2], x.device, None)

    def content(q, k, v):
        decay = torch.full(q.shape[:3], 0.2, dtype=torch.float64)
        frequency = modes[None, :, :, None].expand(1, 2, 4, q.shape[2])
        dynamics = TokenDynamics(decay, decay, frequency)
        given = {"positions": at(q), "noises": Noises(*[one] * 5), "dynamics": dynamics}
        return content_filter_attention(q, k, v, **given, backend="reference")

    def coupled(q, k, v):
        times = torch.arange(q.shape[2], dtype=torch.float64)[None]
        process, seen = Process(0.2 * one, modes, one, one, one), Observations(k, v, times, None)
        return coupled_filter_attention(
            q,
            seen,
            seen,
            target_process=process,
            auxiliary_process=process,
            coupling=one,
            prediction_weights=PredictionWeights(*[one] * 4),
        )

    def tensor(q, k, v):
        per_mode = {n: modes + 0.1 for n in ("decay", "frequency", "process_noise", "key_noise", "query_noise")}
        return tensor_filter_attention(q, k, v, **per_mode, noise_floor=one, **weights)

    def dot_product(q, k, v):
        turned = {"frequency": modes, "rotate_values": True}
        return decayed_dot_product_attention(q, k, v, positions=at(q), decay=one, **turned, backend="reference")

    def routing(q, k, v):
        parameters = gaussian_parameters(decay=one, frequency=modes, **noises)
        return located_posterior_routing(at(q), q, k, v, torch.ones_like(v), parameters)

    return {f.__name__: f for f in (content, coupled, tensor, dot_product, routing)}


@cover(1, name=["query", "key", "value"], operator=["content", "coupled", "tensor", "dot_product", "routing"])
def test_earlier_queries_of_the_other_operators(operator, name):
    torch.manual_seed(0)
    attend_dense = dense_operators()[operator]
    states = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, 9, 8, dtype=torch.float64), strict=True))

    def early():
        leaves = [x.clone().requires_grad_() for x in states.values()]
        output = attend_dense(*leaves)
        return output, [output[:, :, :6].detach(), *torch.autograd.grad(output[:, :, :6].square().sum(), leaves)]

    _, clean = early()
    states[name] = states[name].clone()
    states[name][0, 1, 6, 2] = torch.nan
    output, found = early()
    for wanted, actual in zip(clean, found, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert bool(output[0, 1, 6].isnan().any())
    assert bool(output[0, 0].isfinite().all())
