"""A report to look at."""

import matplotlib.pyplot as plt
import pytest

from rfa_lab.report.write import write_report

from .results import whole_result


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """Of two models."""
    runs = [whole_result("b1-rope"), whole_result("m2-sc-rfa", loss=3.9)]
    missing = {"x1-riccati-seed0": "begun, no result yet"}
    return write_report(runs, tmp_path_factory.mktemp("report"), missing)
