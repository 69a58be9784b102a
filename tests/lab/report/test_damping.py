"""The damping of a run, from its spec; which runs are of the sweep."""

from pathlib import Path

import pytest
import yaml

from rfa.models import preset as build
from rfa.models.flat import flat_record
from rfa_lab.report.layout import NumberCell
from rfa_lab.report.runs import damping_by_label, damping_of
from rfa_lab.report.tables import published_results, table2

from .results import result

RECIPES = Path(__file__).parents[3] / "recipes"


def run(label, preset, loss=4.0, **model):
    written = {"spec": {"preset": preset, "model": {"hidden_size": 256, **model}}}
    return {**result(label, loss=loss), **written, "config": flat_record(build(preset, **model).to_dict())}


SWEEP = [run("b1-rope", "b1-rope"), run("b=5.0", "m3-sc-rfa", 3.8), run("low", "m2-sc-rfa", 3.9, damping=0.0005)]


def test_recipe_of_table_2():
    """Every row of the paper's table 2 has a run of the recipe."""
    recipe = yaml.safe_load((RECIPES / "table2-damping.yaml").read_text("utf-8"))
    sizes = recipe["training"]["model"]
    runs = [run(each["label"], *each["presets"], **sizes, **each.get("model", {})) for each in recipe["runs"]]
    found = damping_by_label(runs)
    assert list(found) == ["b=0.0005", "b=0.005", "b=0.05", "b=0.5", "b=5.0"]
    assert list(found.values()) == [float(label[2:]) for label in found]
    assert {str(b) for b in found.values()} == published_results()["wikitext-103-damping"].keys()
    configs = {each["label"]: each["config"] for each in runs}
    strong, light = configs["b=5.0"], configs["b=0.05"]  # appendix F: identical but for b and the steady state
    changed = {name: strong[name] for name in strong if strong[name] != light[name]}
    assert changed == {"damping": 5.0, "steady_state": 0.5}
    assert strong["zero_heads"] == 2


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("table*.yaml")), ids=lambda path: path.stem)
def test_recipes_of_the_tables_ask_for_the_retrieval_probes(recipe):
    assert yaml.safe_load(recipe.read_text("utf-8"))["evaluation"]["passkey"] is True


@pytest.mark.parametrize(
    ("preset", "model", "damping"),
    [
        ("m2-sc-rfa", {}, 0.05),
        ("m3-sc-rfa", {}, 5.0),
        ("m3-sc-rfa", {"zero_heads": 2}, 5.0),
        ("m3-sc-rfa", {"zero_heads": 1}, None),
        ("m2-sc-rfa", {"zero_heads": 0}, None),
        ("m2-sc-rfa", {"damping": 5}, 5.0),
        ("m2-sc-rfa", {"num_hidden_layers": 2, "damping": 0.0}, 0.0),
        ("m2-sc-rfa", {"innovation": False}, None),
        ("m2.3-no-gate", {}, None),
        ("b3-decayed-rope", {"damping": 0.5}, None),
        ("b1-rope", {}, None),
    ],
)
def test_damping_of(preset, model, damping):
    assert damping_of(run("any", preset, **model)) == damping


def test_a_run_trained_in_one_group_is_of_no_sweep():
    other = run("one-group", "m2-sc-rfa")
    other["spec"]["one_group"] = True
    assert damping_by_label([run("m2-sc-rfa", "m2-sc-rfa"), other]) == {"m2-sc-rfa": 0.05}


def test_two_labels_of_one_damping():
    with pytest.raises(ValueError, match=r"got labels a and b both of b = 0\.05, expected one"):
        damping_by_label([run("a", "m2-sc-rfa"), run("b", "m2-sc-rfa")])
    with pytest.raises(ValueError, match=r"got b = 0\.05 and 0\.5 of label a, expected one"):
        damping_by_label([run("a", "m2-sc-rfa"), run("a", "m2-sc-rfa", damping=0.5)])


def test_the_table_reads_it():
    table = table2(SWEEP, published_results())
    found = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(found) == ["b1-rope", "b2-alibi", "b = 0.0005", "b = 0.005", "b = 0.05", "b = 0.5", "b = 5"]
    assert isinstance(found["b = 0.0005"]["L = 16"], NumberCell)
    assert isinstance(found["b = 5"]["L = 16"], NumberCell)
    assert found["b = 0.005"]["L = 16"] is None
