"""The explorer of one head, in a browser: its numbers and its SVG against `rfa.dynamics` in float64."""

import math
import shutil

import pytest
import torch
from cover import slow

from rfa import dynamics

pytestmark = slow  # it starts a browser

# Places of the sliders; 0 is zero for decay and lag, 1000 is beyond every right end.
DEFAULT, END = {}, 1000
BALANCED = {"decay": 240, "process_noise": 318, "key_noise": 240}  # mu 0.1, sigma^2 0.2, eta^2 1
SETTINGS = {
    "default": DEFAULT,
    "brownian": {"decay": 0},
    "slowest": {"decay": 1, "longest": END},
    "diffusive": {"process_noise": 300, "key_noise": 60},
    "no future": {"decay": END, "longest": END, "at": END},
    "loud": {"process_noise": END, "key_noise": END, "query_noise": END, "noise_floor": END, "robustness": END},
    "quiet": {"process_noise": 0, "key_noise": 0, "query_noise": 0, "noise_floor": 0, "robustness": 0, "at": 0},
    "late peak": {"decay": 30, "process_noise": 0, "key_noise": END, "noise_floor": 0},
    "balanced": BALANCED,
}
PRIOR = ("decay", "process_noise", "key_noise", "noise_floor")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Open a page; whatever it says on the console, throws or asks for besides itself fails the test at its end."""
    opened, faults = [], []

    def go(path, **options):
        page = browser.new_page(**options)
        opened.append(page)
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: request.url == path.as_uri() or faults.append(f"asked: {request.url[:99]}"))
        page.goto(path.as_uri())
        return page

    yield go
    for page in opened:
        page.close()
    assert faults == []


def move(page, places):
    for name, place in places.items():
        slider = page.locator(f"#{name}")
        slider.fill(str(min(place, int(slider.get_attribute("max")))))


@pytest.fixture
def page(visit, report):
    return visit(report.page)


def expected(values):
    """The curves by `rfa.dynamics`, over 257 lags and 257 residuals of equal factors."""
    of = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    prior = [of[name] for name in PRIOR]
    lag = torch.arange(257, dtype=torch.float64) / 256 * of["longest"]
    residual = 10 ** torch.linspace(-2, 2, 257, dtype=torch.float64)
    judged = 1 / dynamics.gate(*prior, of["query_noise"], of["at"])
    nu = of["robustness"]
    return {
        "lag": lag,
        "bias": dynamics.bias(*prior, lag),
        "gate": dynamics.gate(*prior, of["query_noise"], lag),
        "response": dynamics.prior_response(*prior, lag),
        "residual": residual,
        "student_t": (1 + residual**2 / (nu * judged)) ** -(nu + 1),
        "exponential": torch.exp(-(residual**2) / (nu * judged)),
        "gaussian": torch.exp(-(residual**2) / judged),
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_curves_are_the_closed_forms(page, name):
    move(page, SETTINGS[name])
    values, curves = page.evaluate("[explorer.values(), explorer.curves()]")
    if name == "brownian":
        assert values["decay"] == 0
    for curve, wanted in expected(values).items():
        # 1e-11: powers with exponents of 1000; 1e-14 absolute: a bias that passes through zero
        torch.testing.assert_close(torch.tensor(curves[curve], dtype=torch.float64), wanted, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", SETTINGS)
def test_svg_is_the_curves(page, name):
    """Each path, read back through the axes' ranges, to half of the hundredth of a pixel it is written with."""
    move(page, SETTINGS[name])
    wanted = expected(page.evaluate("explorer.values()"))
    paths = page.eval_on_selector_all(
        "path.curve",
        """paths => paths.map(path => {
          const svg = path.closest("svg"), rect = svg.querySelector("rect");
          const frame = ["x", "y", "width", "height"].map(of => Number(rect.getAttribute(of)));
          return {name: path.dataset.curve, d: path.getAttribute("d"), ...svg.dataset, frame};
        })""",
    )
    assert [path["name"] for path in paths] == ["bias", "gate", "response", "student_t", "exponential", "gaussian"]
    for path in paths:
        left, top, width, height = path["frame"]
        (x0, x1), (y0, y1) = (map(float, path[axis].split()) for axis in "xy")
        pixels = torch.tensor([[float(at) for at in pair.split(",")] for pair in path["d"][1:].split("L")])
        over = path["name"] in ("student_t", "exponential", "gaussian")
        x = wanted["residual"].log() if over else wanted["lag"]
        if over:
            x0, x1 = math.log(x0), math.log(x1)
        shares = (x - x0) / (x1 - x0), 1 - (wanted[path["name"]] - y0) / (y1 - y0)
        torch.testing.assert_close(pixels[:, 0].double(), left + width * shares[0], rtol=0, atol=0.0051)
        torch.testing.assert_close(pixels[:, 1].double(), top + height * shares[1], rtol=0, atol=0.0051)
        assert ((pixels[:, 1] >= top) & (pixels[:, 1] <= top + height)).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_regime_and_peak(page, name):
    move(page, SETTINGS[name])
    values, head = page.evaluate("[explorer.values(), explorer.head()]")
    of = [torch.tensor(values[each], dtype=torch.float64) for each in PRIOR]
    alpha, peak = dynamics.regime(*of[:3]).item(), dynamics.peak_lag(*of).item()
    regime = "diffusive" if alpha < 0 else "integrative" if alpha > 0 else "balanced"
    assert head["alpha"] == pytest.approx(alpha, rel=1e-12)
    assert head["peak"] == pytest.approx(peak, rel=1e-12)
    assert head["regime"] == regime
    assert (regime == "balanced") == (name == "balanced")
    said = page.inner_text("#regime")
    assert said.startswith(f"Regime: {regime}, ")
    assert ("Brownian" in said) == (values["decay"] == 0)
    assert ("beyond the lags shown" in said) == (peak > values["longest"])
    mark = page.locator(".peak")
    assert (mark.get_attribute("visibility") == "visible") == (peak <= values["longest"])
    at = 48 + 300 * min(peak / values["longest"], 1)
    assert float(mark.get_attribute("x1")) == float(mark.get_attribute("x2")) == pytest.approx(at, abs=0.0051)
