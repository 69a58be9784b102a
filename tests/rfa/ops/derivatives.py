"""Two losses of the operator, their gradients in float64, and the ways that PyTorch has to differentiate them."""

import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from rfa.ops import robust_filter_attention

from .problems import STATES, irregular_times, problem

PRESENT = torch.arange(10).view(2, 5) % 4 > 0
PROBLEMS = {
    "uniform": {},
    "riccati, masked": {"prior": "riccati", "key_mask": PRESENT},
    "times, not causal": {"times": irregular_times(0, 5), "causal": False, "weight": "exponential"},
    "times a row, riccati": {"times": irregular_times(0, 2, 5), "prior": "riccati"},
}


def made(modes=3, dtype=torch.float32, device="cpu"):
    """States in `dtype`, parameters in float32 or better; every decay is positive, where gradients have two sides."""
    inputs = problem(0, modes=modes)
    inputs["decay"] = inputs["decay"] + 0.1
    wide = torch.promote_types(dtype, torch.float32)
    return {n: x.to(dtype if n in STATES else wide).to(device) for n, x in inputs.items()}


def moved(inputs, seed=1):
    """Another problem like it, and so a direction from one to the other."""
    g = torch.Generator().manual_seed(seed)
    factors = {n: 1 + 0.3 * torch.rand(x.shape, generator=g, dtype=torch.float64) for n, x in inputs.items()}
    return {n: x * factors[n].to(x) for n, x in inputs.items()}


def losses_of(backend, **options):
    """A function of the inputs: `(2,)`, sums of the estimates and log precisions with two sets of weights."""

    def losses(inputs):
        results = robust_filter_attention(**inputs, **options, return_log_precision=True, backend=backend)
        total = 0.0
        for x in results:
            weights = torch.arange(2 * x.numel(), device=x.device).cos().view(2, *x.shape)
            seen = torch.where(x.isfinite(), x, 0.0)  # a query without keys has a log precision of -inf
            total = total + (weights * seen).flatten(1).sum(1)
        return total

    return losses


def gradients(inputs, **options):
    """Of both losses, in float64 by the reference and plain reverse mode: `(2, ...)` by name."""
    leaves = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    total = losses_of("reference", **options)(leaves)
    rows = [torch.autograd.grad(part, list(leaves.values()), retain_graph=True) for part in total]
    return {n: torch.stack(parts) for n, parts in zip(leaves, zip(*rows, strict=True), strict=True)}


def _grad(f, x):
    parts = [grad(lambda y, i=i: f(y)[i])(x) for i in range(2)]
    return {n: torch.stack([part[n] for part in parts]) for n in x}


def _vjp(f, x):
    value, back = vjp(f, x)
    return vmap(lambda row: back(row)[0])(torch.eye(2, dtype=value.dtype, device=value.device))


def _is_grads_batched(f, x):
    leaves = {n: y.clone().requires_grad_() for n, y in x.items()}
    value = f(leaves)
    rows = torch.eye(2, dtype=value.dtype, device=value.device)
    return dict(
        zip(leaves, torch.autograd.grad(value, list(leaves.values()), rows, is_grads_batched=True), strict=True)
    )


def _jacobian(f, x):
    rows = torch.autograd.functional.jacobian(
        lambda *y: f(dict(zip(x, y, strict=True))), (*x.values(),), vectorize=True
    )
    return dict(zip(x, rows, strict=True))


def _of_a_sample(f, x):
    other = moved(x)
    return {n: rows[0] for n, rows in vmap(jacrev(f))({n: torch.stack([x[n], other[n]]) for n in x}).items()}


REVERSE = {
    "grad": _grad,
    "vjp": _vjp,
    "jacrev": lambda f, x: jacrev(f)(x),
    "is_grads_batched": _is_grads_batched,
    "functional.jacobian": _jacobian,
    "vmap of jacrev": _of_a_sample,
}


def _dual(f, x, direction):
    with forward_ad.dual_level():
        value = f({n: forward_ad.make_dual(x[n], direction[n]) for n in x})
        return forward_ad.unpack_dual(value).tangent


def _jacfwd(f, x, direction):
    rows = jacfwd(f)(x)
    return sum((rows[n] * direction[n]).flatten(1).sum(1) for n in x)


FORWARD = {
    "jvp": lambda f, x, direction: jvp(f, (x,), (direction,))[1],
    "jacfwd": _jacfwd,
    "dual": _dual,
    "dual without gradients": lambda f, x, direction: torch.no_grad()(_dual)(f, x, direction),
}


def along(rows, direction):
    """The derivative in a direction, `(2,)`."""
    return sum((rows[n] * direction[n].double()).flatten(1).sum(1) for n in rows)


def errors(found, expected):
    """Of each gradient, relative to its largest entry."""
    return {n: float((found[n].cpu().double() - x.cpu()).abs().max() / x.abs().max()) for n, x in expected.items()}
