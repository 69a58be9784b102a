"""Tables of language models: which belong to results, what is in them, and what is said of what is missing."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml
from cover import slow
from experiments.recipes import TRAINING
from training.runs import write_corpus

from rfa.models import preset as build
from rfa.models.flat import flat_record
from rfa_lab.recipes import load_recipe, run_recipe
from rfa_lab.report.contents import listed_tables
from rfa_lab.report.layout import comma_separated, markdown, text_of
from rfa_lab.report.runs import damping_by_label, damping_of
from rfa_lab.report.summary import facts
from rfa_lab.report.tables import damping_table, difference_table, models_table, published_results
from rfa_lab.results import read_results

from .results import LENGTHS, SIZES, near, result, whole_result

RUNS = [result("b1-rope", seed, 4.0 + 0.1 * seed) for seed in range(3)] + [result("x2", 1, 3.5, -0.1)]
WHOLE = [whole_result("b1-rope"), whole_result("m2-sc-rfa")]
RECIPES = Path(__file__).parents[3] / "recipes"


def row(table, label):
    return dict(zip(table.columns, next(row for row in table.rows if row[0] == label), strict=True))


def names(planned):
    return [each.name for each in planned]


def made(runs, name):
    return next(each for each in listed_tables(runs) if each.name == name).make()


def test_ours_in_the_papers_order():
    table = models_table("table1", RUNS)
    assert table.columns == ("model", "seeds", *(f"L = {n}" for n in LENGTHS))
    assert [each[0] for each in table.rows] == [
        *published_results()["wikitext-103"],
        "x2",
    ]  # the paper's order, then our own
    rope = row(table, "b1-rope")
    perplexities = [math.exp(4.3 + 0.1 * seed) for seed in range(3)]
    assert rope["seeds"] == "3"
    assert (rope["L = 128"].value, rope["L = 128"].error) == near(
        sum(perplexities) / 3, float(scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem(perplexities))
    )
    assert rope["L = 128"].best is False
    own = row(table, "x2")
    assert (own["L = 128"].value, own["L = 128"].error) == (pytest.approx(math.exp(3.2)), None)
    assert own["L = 128"].best


def test_the_trigram_and_the_repeated_passage_stand_in_the_table():
    trigram = {
        "tokens": 192,
        "seed": 0,
        "evaluations": {"blocks": {"rows": [{"length": n, "perplexity": 50.0 + n} for n in LENGTHS]}},
        "passkey": {"repeat": {"rows": [{"distance": 8, "loss_by_token": [9.0, 1.0, 2.0]}]}},
    }
    runs = [{**whole_result(label), "trigram": trigram} for label in ("b1-rope", "x2")]
    table = models_table("table1", runs)
    assert table.columns[-1] == "repeat, D = 8"  # half of the training length of 16
    ours = row(table, "x2")["repeat, D = 8"]
    assert (ours.value, ours.error) == (0.25, pytest.approx(12.7062 * 0.125, rel=1e-5))  # of two trials, 0.125 away
    found = row(table, "trigram")
    assert [found[f"L = {n}"].value for n in LENGTHS] == [50.0 + n for n in LENGTHS]
    assert found["repeat, D = 8"].value == 0
    assert not found["L = 16"].best  # a reference is no model of the table
    assert row(table, "perfect copying")["repeat, D = 8"].value == pytest.approx(1.0)  # (1 + 2) / 3
    said = "Trigram: modified Kneser-Ney, on the 192 tokens of the text that the longest runs of seed 0 read."
    assert said in table.notes
    runs[1]["training"] = {**runs[1]["training"], "tokens": 48}
    assert f"{said} Shorter runs: x2." in models_table("table1", runs).notes
    assert "repeat" not in "".join(models_table("table1", RUNS).columns)
    assert "No trigram of the same tokens: rfa experiment makes it." in models_table("table1", RUNS).notes


def test_missing_runs_and_seeds_are_named():
    partial = result("m1-rfa", 0)
    partial["evaluations"]["blocks"]["rows"].pop()
    unfinished = {**result("m1-rfa", 1), "evaluations": {}}
    table = models_table("table1", [*RUNS, partial, unfinished])
    notes = "\n".join(table.notes)
    assert "Not run here: b2-alibi, b3" in notes
    assert "x2: no run of seed 0, 2." in notes
    assert "m1-rfa, seed 0: not evaluated at L = 128." in notes
    assert "m1-rfa, seed 1: not evaluated by blocks." in notes
    assert row(table, "m1-rfa")["L = 128"] is None
    assert row(table, "m1-rfa")["seeds"] == "1"
    assert all(cell is None for name, cell in row(table, "b2-alibi").items() if name.startswith("L ="))


def test_differences():
    table = difference_table(RUNS)
    assert table.columns == ("model", "against", "seeds", *(f"L = {n}" for n in LENGTHS))
    assert [each[:3] for each in table.rows] == [("x2", "b1-rope", "1")]
    for place, cell in enumerate(table.rows[0][3:]):
        expected = 3.5 - 0.1 * place - (4.1 + 0.1 * place)  # seed 1 of both
        assert (cell.value, *cell.interval) == near(expected, expected, expected)  # the same in every book
        assert (cell.error, cell.remark) == (None, "one seed")  # no two models have three seeds
    uneven = result("x3", 1, loss=3.5)
    uneven["evaluations"]["blocks"]["books"]["emma"]["16"] = [40 * 9.0, 40]
    (cell,) = [each[3] for each in difference_table([*RUNS, uneven]).rows if each[0] == "x3"]
    assert cell.interval[0] < cell.value - 0.5 < cell.value + 0.5 < cell.interval[1]  # Emma is drawn or is not
    assert "No run of b2-alibi" in "\n".join(table.notes)


def test_differences_that_decide_nothing_are_said():
    """Of b1 three seeds 0.1 apart; one model lies always 0.3 below, one 0.3 below or level, one has a single seed."""
    always = [result("always", seed, 3.7 + 0.11 * seed) for seed in range(3)]
    level = [result("level", seed, 4.0 - 0.15 * seed) for seed in range(3)]
    table = difference_table([*RUNS, *always, *level, result("once", 0, 3.99)], ("b1-rope",))
    cells = {each[0]: each[3] for each in table.rows}
    assert {label: cell.remark for label, cell in cells.items()} == {
        "always": "",
        "level": "open",
        "once": "within a seed",
        "x2": "",
    }
    apart = np.array([0.0, -0.25, -0.5])
    interval = scipy.stats.ttest_1samp(apart, 0).confidence_interval(0.95)
    assert cells["level"].value + cells["level"].error == pytest.approx(interval.high)
    assert "open" in markdown(table)
    assert ",open," in comma_separated(table)


def test_differences_of_partial_results():
    one = result("m1-rfa", 1)
    del one["evaluations"]["blocks"]["books"]["emma"]
    two = result("m2", 1, books={"emma": 41, "persuasion": 10, "ulysses": 25})
    three = {**result("m3", 1), "evaluations": {"blocks": {"rows": []}}}
    table = difference_table([*RUNS, one, two, three, result("m4", 7)], ("b1-rope",))
    notes = "\n".join(table.notes)
    assert "m1-rfa against b1-rope at L = 16: without emma, not in every run." in notes
    assert "m2 against b1-rope at L = 16: books: got different numbers of targets" in notes
    assert "m3 against b1-rope at L = 16: no book in common." in notes
    assert "m4 and b1-rope have no seed in common." in notes
    assert row(table, "m1-rfa")["L = 16"].value == pytest.approx(-0.1)
    for label in ("m2", "m3", "m4"):
        assert all(cell is None for name, cell in row(table, label).items() if name.startswith("L ="))


def test_two_runs_of_one_seed_are_refused():
    with pytest.raises(ValueError, match="b1-rope-seed0, b1-rope-seed0 both of label b1-rope and seed 0"):
        models_table("table1", [*RUNS, RUNS[0]])


def swept(label, preset, loss=4.0, **model):
    written = {"spec": {"preset": preset, "model": {"hidden_size": 256, **model}}}
    return {**result(label, loss=loss), **written, "config": flat_record(build(preset, **model).to_dict())}


PAPER = json.loads((RECIPES.parent / "src/rfa_lab/report/published.json").read_text("utf-8"))
PAPERS_ROWS = {
    "table1-wikitext103": [*PAPER["wikitext-103"], "b1-rope-as-released"],
    "table2-damping": ["b1-rope", "b2-alibi", *(f"b = {float(b):g}" for b in PAPER["wikitext-103-damping"])],
    "table3-babylm": [*PAPER["babylm-2025-strict"]],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[slow] * ("1" in name[:6])) for name in PAPERS_ROWS])
def test_each_row_and_column_of_a_table_of_the_paper(name, tmp_path):
    """Four steps of each run of its recipe, of one seed of a tiny model on a tiny text at a 32nd of its lengths."""
    given = yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8"))
    assert given["evaluation"]["lengths"] == PAPER["lengths"]
    text = str(write_corpus(tmp_path / "corpus", 300, 64, 300))
    given["training"] = {
        **TRAINING,
        "eval_steps": 4,
        "length": 16,
        "data": text,
        "model": {**SIZES, "num_hidden_layers": 1},
    }
    given["runs"] = [{**entry, "seeds": entry["seeds"][:1]} for entry in given["runs"]]
    plan = {"lengths": [16, 32, 64, 128], "protocols": dict.fromkeys(given["evaluation"]["protocols"])}
    given["evaluation"] = {**plan, "by_position": given["evaluation"].get("by_position", False)}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(given), "utf-8")
    assert not run_recipe(load_recipe(recipe), tmp_path / "out").failed
    runs = read_results(tmp_path / "out").runs
    of, listed = name[:6], [table.name for table in listed_tables(runs)]
    assert [each for each in listed if each.startswith(("table", "paper"))] == [
        *(f"{of}-{protocol}" for protocol in ("blocks", "matched")),
        f"paper-{of}",
    ]
    for protocol in ("blocks", "matched"):
        table = made(runs, f"{of}-{protocol}")
        rows = {each[0]: each[1:] for each in table.rows if each[0] != "trigram"}
        assert list(rows) == PAPERS_ROWS[name]
        assert table.columns[:6] == ("model", "seeds", "L = 16", "L = 32", "L = 64", "L = 128")
        assert all(row[0] == "1" and all(cell.value > 1 for cell in row[1:5]) for row in rows.values())
        differences = made(runs, f"differences-{protocol}").rows
        assert len(differences) == 2 * (len(rows) - 1)  # of all others, to B1 and to B2
        assert all(cell is not None for row in differences for cell in row)
    assert all(None not in row for row in made(runs, f"paper-{of}").rows)
    strong = [run["config"] for run in runs if run["preset"] == "m3-sc-rfa"]  # one model, whichever the table
    assert [(one["damping"], one["zero_heads"], one["steady_state"]) for one in strong] == [(5.0, 0, 0.5)]


@pytest.mark.parametrize(
    ("preset", "model", "damping"),
    [
        ("m2-sc-rfa", {}, 0.05),
        ("m3-sc-rfa", {}, 5.0),
        ("m3-sc-rfa", {"zero_heads": 2}, None),
        ("m2-sc-rfa", {"damping": 5}, 5.0),
        ("m2-sc-rfa", {"num_hidden_layers": 2, "damping": 0.0}, 0.0),
        ("m2-sc-rfa", {"innovation": False}, None),
        ("b3-decayed-rope", {"damping": 0.5}, None),
    ],
)
def test_damping_of(preset, model, damping):
    assert damping_of(swept("any", preset, **model)) == damping


@pytest.mark.parametrize("preset", ["m2-sc-rfa", "sc-rfa"])
def test_the_sweep_says_how_m3_differs_besides_the_damping(preset):
    runs = [swept("low", preset, 3.9, damping=0.0005), swept("m3", "m3-sc-rfa", 3.8)]
    said = "b = 5 is m3-sc-rfa, which differs in steady_state and zero_heads, too."
    assert said in damping_table(runs).notes
    assert said not in damping_table(runs[:1]).notes


def test_a_run_trained_in_one_group_is_of_no_sweep():
    other = swept("one-group", "m2-sc-rfa")
    other["spec"]["one_group"] = True
    assert damping_by_label([swept("m2-sc-rfa", "m2-sc-rfa"), other]) == {"m2-sc-rfa": 0.05}


def test_two_labels_of_one_damping():
    with pytest.raises(ValueError, match=r"got labels a and b both of b = 0\.05, expected one"):
        damping_by_label([swept("a", "m2-sc-rfa"), swept("b", "m2-sc-rfa")])
    with pytest.raises(ValueError, match=r"got b = 0\.05 and 0\.5 of label a, expected one"):
        damping_by_label([swept("a", "m2-sc-rfa"), swept("a", "m2-sc-rfa", damping=0.5)])


def test_models():
    assert names(listed_tables(WHOLE)) == [
        *("table1-blocks", "differences-blocks", "table1-matched", "differences-matched", "paper-table1"),
        *("probe-passkey", "probe-repeat", "probe-accuracy", "runs"),
    ]
    assert made(WHOLE, "differences-matched").caption.endswith("Protocol matched.")
    assert made(WHOLE, "paper-table1").notes[0].startswith("Protocol blocks")


def of_sweep(b):
    run = whole_result(f"m2-sc-rfa b={b}", preset="m2-sc-rfa")
    run["config"]["damping"] = b
    return {**run, "spec": {**run["spec"], "preset": "m2-sc-rfa", "model": {"damping": b}}}


@pytest.mark.parametrize(("recipe", "data"), [("table3-babylm", "../mine"), ("mine", "babylm-2025")])
def test_babylm_stands_beside_table_3(recipe, data):
    runs = [whole_result("b1-rope", recipe=recipe, data=data)]
    assert names(listed_tables(runs))[:2] == ["table3-blocks", "differences-blocks"]
    assert "17.70" in markdown(made(runs, "paper-table3"))


def test_a_sweep_beside_models_has_both():
    runs = [*WHOLE, *(of_sweep(b) for b in (0.5, 0.005))]
    assert names(listed_tables(runs))[:3] == ["table1-blocks", "table2-blocks", "differences-blocks"]
    rows = {row[0]: row[1] for row in made(runs, "table1-blocks").rows}
    assert rows["m2-sc-rfa"] == "1"
    assert "m2-sc-rfa b=0.5" not in rows
    found = [row[0] for row in made(runs, "table2-blocks").rows if row[1] == "1"]
    assert found == ["b1-rope", "b = 0.005", "b = 0.05", "b = 0.5"]


def test_probes():
    other = whole_result("b2-alibi")
    other["passkey"]["passkey"]["rows"].pop()
    bare = {**whole_result("c1-nope"), "passkey": None}
    probes = made([*WHOLE, other, bare], "probe-passkey")
    assert probes.columns == ("run", "seed", "D = 8", "D = 16", "D = 32")
    assert [row[0] for row in probes.rows] == ["b1-rope", "m2-sc-rfa", "b2-alibi"]
    assert probes.rows[0][2].value == 0.25
    assert probes.rows[0][2].error == pytest.approx(12.7062 * 0.125, rel=1e-5)  # two trials, each 0.125 from their mean
    loss = {"rows": [{"distance": 8, "loss_by_token": [9.0, 3.0]}]}
    with_trigram = [{**run, "trigram": {"passkey": {"passkey": loss, "repeat": loss}}} for run in WHOLE]
    ceilings = {kind: made(with_trigram, f"probe-{kind}").rows[-1][:3] for kind in ("passkey", "repeat")}
    assert {kind: (name, cell.value) for kind, (name, _, cell) in ceilings.items()} == {
        "passkey": ("perfect copying", 6.0),
        "repeat": ("perfect copying", 1.5),  # not the first of two tokens
    }
    assert probes.rows[2][4] is None
    accuracy = made([*WHOLE, bare], "probe-accuracy")
    assert accuracy.rows[0][2].value == 0.5
    wilson = scipy.stats.binomtest(1, 2).proportion_ci(0.95, method="wilson")
    assert accuracy.rows[0][2].interval == pytest.approx((wilson.low, wilson.high))
    assert accuracy.notes[0].startswith("By chance: 0.062. In brackets Wilson's 95 % interval over 2 trials")
    for name in ("probe-passkey", "probe-repeat", "probe-accuracy"):
        with pytest.raises(ValueError, match="got none with the probe"):
            made([bare], name)


def test_where_heads_look():
    one, two = whole_result("b1-rope", maps=True), whole_result("m2-sc-rfa", maps=True)
    two["attention_summary"]["heads"] = [{"kept": 0.5, "mean_lag": 7.0, "beyond_training": 0.125}]
    rows = made([one, two, WHOLE[0]], "attention").rows
    assert [text_of(cell) for cell in rows[0]] == ["b1-rope", "0", "share beyond", "0.500", "0.500"]
    assert [text_of(cell) for cell in rows[1]] == ["m2-sc-rfa", "0", "share beyond", "0.125", text_of(None)]
    assert [[text_of(cell) for cell in row[2:4]] for row in rows[3::2]] == [["mean lag", "7"], ["kept", "0.500"]]
    assert "attention" not in names(listed_tables(WHOLE))


def test_how_much_context_is_used():
    loss = {"rows": [{"distance": 8, "loss_by_token": [9.0, 3.0, 2.0]}]}
    trigram = {"valid_perplexity": 80.0, "passkey": {"repeat": loss}}
    runs = [{**run, "trigram": trigram} for run in (*WHOLE, whole_result("b1-rope", 1))]
    runs[1]["training"] = {**runs[1]["training"], "valid_perplexity": 50.3}
    found = dict(facts(runs))["context used"]
    below = np.log(80 / 50.3)  # m2 is ahead of b1, whose seeds have 50 and 51
    assert found.startswith(f"on validation m2-sc-rfa, the best, is {below:.3f} nats a token below a trigram")
    assert found.endswith(
        "a passage 8 tokens before gains at most 15.0% of what perfect copying would (b1-rope)"
    )  # 0.25
    assert "context used" not in dict(facts([{**WHOLE[0], "passkey": None}]))


def test_runs():
    """A speed that no process measured from its first step to its last is no time."""
    resumed, unmeasured = whole_result("b2-alibi", 1), whole_result("m1-rfa")
    resumed["resumed"] = [{"step": 1}]
    unmeasured["training"] |= {"tokens_per_second": None, "seconds": None}
    unmeasured["spec"] = {**unmeasured["spec"], "one_group": True}
    probes = made([WHOLE[0], resumed, unmeasured], "runs")
    assert [list(map(text_of, row)) for row in probes.rows] == [
        ["b1-rope", "0", "98,765", "192", "1,234", "1.5", "50.00"],
        ["b2-alibi", "1", "98,765", "192", "1,234", text_of(None), "51.00"],
        ["m1-rfa", "0", "98,765", "192", text_of(None), text_of(None), "50.00"],
    ]
    assert "not of the models" in probes.notes[0]
    assert "like all others (one parameter group): m1-rfa." in probes.notes[1]
    assert (
        dict(facts([WHOLE[0], resumed, unmeasured]))["trained on"] == "576 tokens in all, 1.5 minutes for 1 of 3 runs"
    )
