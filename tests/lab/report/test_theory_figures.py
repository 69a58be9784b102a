"""What the artists of the theory's figures hold, against the paper's closed forms, scipy, and print's demands."""

import itertools
import random
import string

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.linalg
import scipy.special
from cover import slow
from experiments.recipes import TRAINING, write_recipe
from matplotlib.text import Text
from training.runs import MODEL

from rfa.models import PRESETS
from rfa_lab.recipes import load_recipe, run_recipe
from rfa_lab.report import figures
from rfa_lab.report.write import write_report
from rfa_lab.results import read_results

from .results import result, whole_result
from .test_comparison_figures import probed
from .test_dynamics_figures import learned
from .test_maps import maps

RUNS = [result(label, seed, 4.0 + 0.1 * seed) for label in ("b1-rope", "b2-alibi", "x") for seed in range(2)]
EVERY = [probed(label, seed) for label in PRESETS for seed in range(2)]
LONG = [*EVERY, *(probed(f"{label} rope-no-innovation") for label in PRESETS if label[0] in "xc")]
DRAWN = {
    "transported_measurements": (),
    "transport_factorization": (),
    "rotate_aggregate_counter_rotate": (),
    "diffusive_and_integrative": (),
    "bias_and_gate_over_decay": (),
    "eigenvalue_spectra": (),
    "temporal_scale_separation": (),
    "training_curves": (RUNS,),
    "perplexity_over_length": (RUNS,),
    "loss_over_position": ([whole_result(label) for label in ("b1-rope", "x")],),
    "damping_sweep": (RUNS, {"x": 0.05}),
    "noises_over_training": ([learned()],),
    "robustness_over_training": ([learned()],),
    "regimes_over_training": ([learned()],),
    "attention_maps": ({label: maps(8, 16) for label in ("b1-rope", "b2-alibi", "m1-rfa", "m2-sc-rfa")}, 512),
    "differences": (EVERY,),
    "retrieval": (LONG,),
}
LARGE = {"perplexity_over_length": (LONG,), "training_curves": (EVERY,), "attention_maps": ({"m": maps(8, 16)}, 512)}


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def curves(axes):
    return [np.array(line.get_xydata(), dtype=float) for line in axes.lines]


@slow
@pytest.mark.parametrize(("name", "given"), [*DRAWN.items(), *LARGE.items()])
def test_fit_for_print(name, given):
    with plt.rc_context({"font.size": 3, "xtick.labelsize": 3, "axes.labelsize": 3}):  # the caller's style is not ours
        figure = getattr(figures, name)(*given)
        figure.draw_without_rendering()
        figure.draw_without_rendering()  # two passes, as `save` makes
    width, height = figure.get_size_inches()
    assert width in (figures.COLUMN, figures.PAGE)
    assert height <= (9.0 if EVERY in given or LONG in given else 5.0)  # of a page, or of half
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 7
    box = figure.get_tightbbox()
    assert box.x0 >= -0.01  # of an inch: half a line's width
    assert box.y0 >= -0.01
    assert box.x1 <= width + 0.01
    assert box.y1 <= height + 0.01
    legends = [each.get_window_extent() for axes in figure.axes if (each := axes.get_legend()) is not None]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(legends, 2))
    for axes in figure.axes:
        place = axes.get_subplotspec()
        if axes.axison and place is not None:  # a colour bar has none
            assert axes.get_xlabel() or figure.get_supxlabel() or not place.is_last_row()
            assert axes.get_ylabel() or figure.get_supylabel() or name == "differences" or not place.is_first_col()


def test_regimes_are_the_papers_closed_forms():
    """Appendix C.2: a logarithm in the diffusive regime, mirrored softplus and sigmoid in the integrative one."""
    mu, high, floor, gamma2 = 0.02, 1.0, 0.01, 0.1
    low = (0.05, 0.1, 0.2, 0.4)
    figure = figures.diffusive_and_integrative(mu, low, high, floor, gamma2)
    bias_above, gate_above, bias_below, gate_below = map(curves, figure.axes)
    for k, value in enumerate(low):
        tau = bias_above[k][:, 0]
        beta, alpha = floor + high, high - value  # diffusive: alpha' = sigma~^2 - eta^2
        np.testing.assert_allclose(
            bias_above[k][:, 1], -np.log(beta) - np.log1p(-alpha / beta * np.exp(-2 * mu * tau)), atol=1e-9
        )
        np.testing.assert_allclose(gate_above[k][:, 1], 1 / (beta + gamma2 - alpha * np.exp(-2 * mu * tau)), atol=1e-9)
        beta = floor + value
        softplus = np.logaddexp(0, np.log(alpha / beta) - 2 * mu * tau)
        np.testing.assert_allclose(bias_below[k][:, 1], -np.log(beta) - softplus, atol=1e-9)
        opening = scipy.special.expit(2 * mu * tau - np.log(alpha / (beta + gamma2)))
        np.testing.assert_allclose(gate_below[k][:, 1], opening / (beta + gamma2), atol=1e-9)


def test_brownian_limit_and_settled_end():
    figure = figures.bias_and_gate_over_decay((0.0, 0.1), 0.02, 0.05, 0.01, 0.1)
    (brownian, settled), (gate, _) = map(curves, figure.axes)
    np.testing.assert_allclose(brownian[:, 1], -np.log(0.02 * brownian[:, 0] + 0.06), atol=1e-9)
    np.testing.assert_allclose(gate[:, 1], 1 / (0.02 * gate[:, 0] + 0.16), atol=1e-9)
    assert settled[-1, 1] == pytest.approx(-np.log(0.02 / 0.2 + 0.01), abs=1e-9)


def test_spectra():
    heads, modes = 4, 8
    figure = figures.eigenvalue_spectra(heads, modes, damping=1.0)
    rfa, coupled = (curves(axes)[:heads] for axes in figure.axes)
    bands = np.sort(10000.0 ** -(np.arange(16) / 16)).reshape(4, 4)
    bank = 10000.0 ** -(np.arange(4) / 4)
    for head in range(heads):
        for drawn, positive in ((rfa[head], bank), (coupled[head], bands[head])):
            np.testing.assert_allclose(drawn[:, 0], -bands[head].max(), rtol=1e-6)  # frequencies are float32
            np.testing.assert_allclose(np.sort(drawn[:, 1]), np.sort([*positive, *-positive]), rtol=1e-6)


def test_measurements_are_transported_by_the_matrix_exponential():
    figure = figures.transported_measurements(0.05, 0.5, length=12, duration=11.0, targets=3)
    path, transported = figure.axes
    measured = curves(path)[1]
    dynamics = np.array([[-0.05, -0.5], [0.5, -0.05]])
    later, past = curves(transported)[1::3], curves(transported)[2::3]
    for place, target in enumerate((3, 7, 11)):
        expected = [scipy.linalg.expm(dynamics * (target - j)) @ z for j, z in enumerate(measured)]
        np.testing.assert_allclose(past[place], expected[: target + 1], atol=1e-9)
        np.testing.assert_allclose(later[place].reshape(-1, 2), np.reshape(expected[target + 1 :], (-1, 2)), atol=1e-9)


EVALUATION = {"lengths": [16, 128], "protocols": {"blocks": 300, "matched": 128}, "by_position": True, "passkey": True}


@slow
def test_a_tiny_experiment_is_reported_whole(tmp_path, one_of_theory):
    letters = random.Random(0)
    for split in ("train", "valid", "test"):
        (tmp_path / "corpus" / split).mkdir(parents=True)
        text = "".join(letters.choices(string.ascii_lowercase + " ", k=800))
        (tmp_path / "corpus" / split / "a.txt").write_text(text)
    path = write_recipe(
        tmp_path,
        training={**TRAINING, "length": 16, "data": "corpus", "model": MODEL},
        evaluation={**EVALUATION, "attention": ["m2-sc-rfa"]},
    )
    assert run_recipe(load_recipe(path), tmp_path / "out").failed == {}
    found = read_results(tmp_path / "out")
    assert found.missing == {}
    assert [run["maps"] is None for run in found.runs] == [True, False, True]
    written = one_of_theory(write_report, found.runs, tmp_path / "report", found.missing)
    assert written.missing == {}
    tables = {"table1", "differences"}
    assert {f"{name}-{protocol}" for name in tables for protocol in ("blocks", "matched")} < set(written.tables)
    assert {"probe-passkey", "probe-repeat", "probe-accuracy", "runs"} < set(written.tables)
    assert "m2-sc-rfa b=0.5" in (tmp_path / "report" / "tables" / "table1-blocks.md").read_text()
