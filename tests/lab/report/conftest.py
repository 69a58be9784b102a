"""A browser that reaches no network, and a report to look at."""

import shutil

import matplotlib.pyplot as plt
import pytest

from rfa_lab.report.contents import THEORY
from rfa_lab.report.write import write_report

from .results import whole_result

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


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


@pytest.fixture(scope="session")
def one_of_theory():
    """Does what it is given with one figure that no result has a part in, where it is not they that are tested."""

    def doing(do, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rfa_lab.report.contents.THEORY", THEORY[:1])
            return do(*arguments)

    return doing


@pytest.fixture(scope="session")
def report(tmp_path_factory, one_of_theory):
    """Of two models."""
    runs = [whole_result("b1-rope"), whole_result("m2-sc-rfa", loss=3.9)]
    missing = {"x1-riccati-seed0": "begun, no result yet"}
    return one_of_theory(write_report, runs, tmp_path_factory.mktemp("report"), missing)
