"""A report to look at."""

import matplotlib.pyplot as plt
import pytest

from rfa_lab.report.contents import THEORY
from rfa_lab.report.write import write_report

from .results import whole_result


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


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
