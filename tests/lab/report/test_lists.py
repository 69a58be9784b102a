"""Which tables and figures belong to results, and what is said where one is not there."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.stats

from rfa_lab.report.contents import THEORY, listed_figures
from rfa_lab.report.layout import markdown, text_of
from rfa_lab.report.summary import facts
from rfa_lab.report.table_contents import listed_tables

from .results import whole_result


def names(planned):
    return [each.name for each in planned]


def table(runs, name):
    return next(each for each in listed_tables(runs) if each.name == name).make()


def swept(b, **changes):
    run = whole_result(f"m2-sc-rfa b={b}", preset="m2-sc-rfa", **changes)
    run["config"]["damping"] = b
    return {**run, "spec": {**run["spec"], "preset": "m2-sc-rfa", "model": {"damping": b}}}


RUNS = [whole_result("b1-rope"), whole_result("m2-sc-rfa")]
HEADS = ["noises-m2-sc-rfa", "robustness-m2-sc-rfa", "regime-m2-sc-rfa"]
PROBES = ["probe-passkey", "probe-repeat", "probe-accuracy", "runs"]


def test_models():
    assert names(listed_tables(RUNS)) == [
        "table1-blocks",
        "differences-blocks",
        "table1-matched",
        "differences-matched",
        "paper-table1",
        *PROBES,
    ]
    evaluated = ["length-blocks", "length-matched", "differences-blocks", "differences-matched"]
    assert names(listed_figures(RUNS))[: -len(THEORY)] == [*evaluated, "training", "position", "retrieval"]


@pytest.mark.parametrize(("recipe", "data"), [("table3-babylm", "../mine"), ("mine", "babylm-2025")])
def test_babylm_stands_beside_table_3(recipe, data):
    runs = [whole_result("b1-rope", recipe=recipe, data=data)]
    assert names(listed_tables(runs))[:2] == ["table3-blocks", "differences-blocks"]
    assert "17.70" in markdown(table(runs, "paper-table3"))


def test_the_protocol_is_said():
    assert table(RUNS, "differences-matched").caption.endswith("Protocol matched.")
    assert table(RUNS, "paper-table1").notes[0].startswith("Protocol blocks")


def test_an_appendix_has_all_models_if_they_are_many():
    assert not [name for name in names(listed_figures(RUNS)) if name.endswith("-all")]
    many = [whole_result(f"m{k}") for k in range(7)]
    appendix = [each for each in listed_figures(many) if each.name.endswith("-all")]
    assert names(appendix) == names(listed_figures(many))[-5:]
    assert names(appendix) == [
        f"{name}-all" for name in ("length-blocks", "length-matched", "training", "position", "retrieval")
    ]
    (training,) = [each for each in appendix if each.name == "training-all"]
    figure = training.draw(many)
    drawn = [line.get_label() for axes in figure.axes for line in axes.lines]
    plt.close(figure)
    assert sorted(drawn) == [f"m{k}" for k in range(7)]
    captions = {each.name: each.caption for each in listed_figures(many)}
    assert "At most six lines" in captions["training"]
    assert "At most six lines" not in captions["training-all"]


def test_tables_say_what_was_trained_on_what():
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 128}
    runs = [{**run, "config": {**run["config"], **config}} for run in RUNS]
    runs[1]["training"] = {**runs[1]["training"], "tokens": 4_096_000}
    assert table(runs, "table1-blocks").notes[0] == (
        "Here: text corpus, tokenizer bytes, sizes 4 layers of 128, 8 heads, "
        "training tokens a run 192 (1 run); 4,096,000 (1 run)."
    )


def test_a_sweep_beside_models_has_both():
    runs = [*RUNS, swept(0.5), swept(0.005)]
    assert names(listed_tables(runs))[:3] == ["table1-blocks", "table2-blocks", "differences-blocks"]
    rows = {row[0]: row[1] for row in table(runs, "table1-blocks").rows}
    assert rows["m2-sc-rfa"] == "1"
    assert "m2-sc-rfa b=0.5" not in rows
    made = [row[0] for row in table(runs, "table2-blocks").rows if row[1] == "1"]
    assert made == ["b1-rope", "b = 0.005", "b = 0.05", "b = 0.5"]


def test_heads_of_the_papers_models_and_of_another_start():
    runs = []
    for label, alpha in (("m2-sc-rfa", 0.9), ("m2-sc-rfa wide", -1.0), ("m2-sc-rfa b=0.5", 0.9)):
        layers = {"0": {"alpha": [[None, alpha], [None, -alpha]]}}  # the first head does not decay
        runs.append({**RUNS[1], "label": label, "dynamics": {"steps": [1, 2], "tokens": [1, 2], "layers": layers}})
    riccati = {
        **runs[1],
        "label": "m2-sc-rfa riccati",
        "config": {**runs[1]["config"], "prior": "riccati"},
    }  # whose bias knows no alpha
    runs.append(riccati)
    found = [name for name in names(listed_figures(runs)) if "m2-sc-rfa" in name]
    assert found == [*HEADS, "regime-m2-sc-rfa-wide"]
    assert not [name for name in names(listed_figures(RUNS)) if "m2-sc-rfa" in name]


def test_maps_of_the_first_seed():
    mapped = [{**run, "maps": np.full((2, 4, 4), 0.1 * place)} for place, run in enumerate(RUNS)]
    again = {**mapped[0], "seed": 1, "maps": np.full((2, 4, 4), 0.9)}
    (attention,) = [each for each in listed_figures([*mapped, again]) if each.name == "attention"]
    figure = attention.draw([*mapped, again])
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert [round(float(image[3, 0]), 6) for image in images] == [1e-5, 1e-5, 0.1, 0.1]
    plt.close(figure)
    assert "attention" not in names(listed_figures(RUNS))


def test_maps_before_decay_have_rows_of_their_own():
    """As the paper draws its models with decay; a run whose file is older has one row."""
    whole, before = np.full((2, 4, 4), 0.1), np.full((2, 4, 4), 0.3)
    mapped = [{**RUNS[0], "maps": whole}, {**RUNS[1], "maps": whole, "undecayed": before, "undecayed_near": None}]
    (attention,) = [each for each in listed_figures(mapped) if each.name == "attention"]
    assert "rows before decay: the softmax weight alone" in attention.caption
    figure = attention.draw(mapped)
    images = [round(float(axes.images[0].get_array()[3, 0]), 6) for axes in figure.axes if axes.images]
    assert images == [0.1, 0.1, 0.1, 0.1, 0.3, 0.3]
    plt.close(figure)


def test_probes():
    other = whole_result("b2-alibi")
    other["passkey"]["passkey"]["rows"].pop()
    bare = {**whole_result("c1-nope"), "passkey": None}
    made = table([*RUNS, other, bare], "probe-passkey")
    assert made.columns == ("run", "seed", "D = 8", "D = 16", "D = 32")
    assert [row[0] for row in made.rows] == ["b1-rope", "m2-sc-rfa", "b2-alibi"]
    assert made.rows[0][2].value == 0.25
    assert made.rows[0][2].error == pytest.approx(12.7062 * 0.125, rel=1e-5)  # two trials, each 0.125 from their mean
    loss = {"rows": [{"distance": 8, "loss_by_token": [9.0, 3.0]}]}
    with_trigram = [{**run, "trigram": {"passkey": {"passkey": loss, "repeat": loss}}} for run in RUNS]
    ceilings = {kind: table(with_trigram, f"probe-{kind}").rows[-1][:3] for kind in ("passkey", "repeat")}
    assert {kind: (name, cell.value) for kind, (name, _, cell) in ceilings.items()} == {
        "passkey": ("perfect copying", 6.0),
        "repeat": ("perfect copying", 1.5),  # not the first of two tokens
    }
    assert made.rows[2][4] is None
    accuracy = table([*RUNS, bare], "probe-accuracy")
    assert accuracy.rows[0][2].value == 0.5
    wilson = scipy.stats.binomtest(1, 2).proportion_ci(0.95, method="wilson")
    assert accuracy.rows[0][2].interval == pytest.approx((wilson.low, wilson.high))
    assert accuracy.notes[0].startswith("By chance: 0.062. In brackets Wilson's 95 % interval over 2 trials")
    for name in PROBES[:3]:
        with pytest.raises(ValueError, match="got none with the probe"):
            table([bare], name)


def test_where_heads_look():
    one, two = whole_result("b1-rope", maps=True), whole_result("m2-sc-rfa", maps=True)
    two["attention_summary"]["heads"] = [{"kept": 0.5, "mean_lag": 7.0, "beyond_training": 0.125}]
    rows = table([one, two, RUNS[0]], "attention").rows
    assert [text_of(cell) for cell in rows[0]] == ["b1-rope", "0", "share beyond", "0.500", "0.500"]
    assert [text_of(cell) for cell in rows[1]] == ["m2-sc-rfa", "0", "share beyond", "0.125", text_of(None)]
    assert [[text_of(cell) for cell in row[2:4]] for row in rows[3::2]] == [["mean lag", "7"], ["kept", "0.500"]]
    assert "attention" not in names(listed_tables(RUNS))


def test_how_much_context_is_used():
    loss = {"rows": [{"distance": 8, "loss_by_token": [9.0, 3.0, 2.0]}]}
    trigram = {"valid_perplexity": 80.0, "passkey": {"repeat": loss}}
    runs = [{**run, "trigram": trigram} for run in (*RUNS, whole_result("b1-rope", 1))]
    runs[1]["training"] = {**runs[1]["training"], "valid_perplexity": 50.3}
    found = dict(facts(runs))["context used"]
    below = np.log(80 / 50.3)  # m2 is ahead of b1, whose seeds have 50 and 51
    assert found.startswith(f"on validation m2-sc-rfa, the best, is {below:.3f} nats a token below a trigram")
    assert found.endswith(
        "a passage 8 tokens before gains at most 15.0% of what perfect copying would (b1-rope)"
    )  # 0.25
    assert "context used" not in dict(facts([{**RUNS[0], "passkey": None}]))


def test_runs():
    """A speed that no process measured from its first step to its last is no time."""
    resumed, unmeasured = whole_result("b2-alibi", 1), whole_result("m1-rfa")
    resumed["resumed"] = [{"step": 1}]
    unmeasured["training"] |= {"tokens_per_second": None, "seconds": None}
    unmeasured["spec"] = {**unmeasured["spec"], "one_group": True}
    made = table([RUNS[0], resumed, unmeasured], "runs")
    assert [list(map(text_of, row)) for row in made.rows] == [
        ["b1-rope", "0", "98,765", "192", "1,234", "1.5", "50.00"],
        ["b2-alibi", "1", "98,765", "192", "1,234", text_of(None), "51.00"],
        ["m1-rfa", "0", "98,765", "192", text_of(None), text_of(None), "50.00"],
    ]
    assert "not of the models" in made.notes[0]
    assert "like all others (one parameter group): m1-rfa." in made.notes[1]
    assert dict(facts([RUNS[0], resumed, unmeasured]))["trained on"] == "576 tokens in all, 1.5 minutes for 1 of 3 runs"
