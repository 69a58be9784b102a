"""The cross-transport against 120-digit arithmetic, the joint system's matrix exponential and the integral itself."""

import cmath
import itertools

import mpmath
import pytest
import torch

from rfa.dynamics import cross_transport

# Rates of two modes: far apart, equal, and ever closer.
X = -0.3 + 1.2j
PAIRS = {
    "apart": (X, -1.1 - 0.4j),
    "swapped": (-1.1 - 0.4j, X),
    "equal": (X, X),
    "no decay": (1.2j, -0.7j),
    "no dynamics": (0j, 0j),
    "one stands still": (0j, X),
    **{f"{gap:g} apart": (X, X + gap * cmath.exp(0.7j)) for gap in (1e-16, 1e-12, 1e-8, 1e-4, 1e-2, 0.3, 0.6)},
}
LAGS = [0.0, 1e-6, 0.1, 1.0, 5.0]


def ours(x, y, lag):
    given = [torch.tensor(v, dtype=torch.float64) for v in (-x.real, x.imag, -y.real, y.imag, lag)]
    return complex(cross_transport(*given))


def exact(x, y, lag):
    x, y, lag = mpmath.mpc(x), mpmath.mpc(y), mpmath.mpf(lag)
    return lag * mpmath.exp(x * lag) if x == y else (mpmath.exp(y * lag) - mpmath.exp(x * lag)) / (y - x)


@pytest.fixture(autouse=True)
def _many_digits():
    with mpmath.workdps(120):
        yield


def test_value():
    for (name, (x, y)), lag in itertools.product(PAIRS.items(), LAGS):
        expected = complex(exact(x, y, lag))
        assert abs(ours(x, y, lag) - expected) <= 4e-15 * abs(expected), (name, lag)  # some ten roundings


def test_gradients():
    """In each rate and the lag, by differences of 120-digit values: exact also where rates are equal."""
    step = mpmath.mpf(10) ** -20
    for name in ("apart", "equal", "1e-12 apart", "0.3 apart", "no dynamics"):
        x, y = PAIRS[name]
        point = [-x.real, x.imag, -y.real, y.imag, 1.3]
        given = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in point]
        value = cross_transport(*given)
        real = torch.autograd.grad(value.real, given, retain_graph=True, create_graph=True)
        imaginary = torch.autograd.grad(value.imag, given, retain_graph=True)

        def moved(k, by, point=point):
            at = [mpmath.mpf(v) + (by if k == n else 0) for n, v in enumerate(point)]
            return exact(mpmath.mpc(-at[0], at[1]), mpmath.mpc(-at[2], at[3]), at[4])

        for k in range(5):
            expected = complex((moved(k, step) - moved(k, -step)) / (2 * step))
            assert abs(complex(float(real[k].detach()), float(imaginary[k])) - expected) < 1e-13, name
        second = torch.autograd.grad(real[0], given[0])[0]
        expected = (moved(0, step) - 2 * moved(0, 0) + moved(0, -step)) / step**2
        assert abs(float(second) - float(expected.real)) < 1e-12, name


ALL_MODES = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(2, 3, generator=generator, dtype=torch.float64) for _ in range(5)]
    given[2][:, 0], given[3][:, 0] = given[0][:, 0], given[1][:, 0]  # equal rates
    given = [x.requires_grad_() for x in given]
    assert torch.autograd.gradcheck(cross_transport, given, **ALL_MODES)
    assert torch.autograd.gradgradcheck(cross_transport, given, check_fwd_over_rev=True)


def test_nothing_overflows():
    """Rates a thousand apart over lags of a million: e^(z) of the faster less the slower would be 0 * inf."""
    for decays in ((1e3, 0.0), (0.0, 1e3), (1e3, 1e-3), (1e3, 1e3)):
        given = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (decays[0], 2.0, decays[1], -3.0)]
        for lag in (1.0, 1e6):
            value = cross_transport(*given, torch.tensor(lag, dtype=torch.float64))
            assert torch.isfinite(torch.view_as_real(value)).all()
            assert all(g.isfinite() for g in torch.autograd.grad(value.abs() + value.real, given))
