"""Recipes: what they hold, and everything that is wrong with one at once."""

from pathlib import Path

import pytest
from training.runs import MODEL, command

from rfa.models import PRESETS
from rfa.models.presets import PLAIN_NAMES
from rfa_lab.recipes import RecipeError, load_recipe

from .recipes import NAMES, TRAINING, recipe, write_recipe

SHIPPED = Path(__file__).parents[3] / "recipes"


def faults(path, **options) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        load_recipe(path, **options)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_a_recipe(tmp_path):
    read = load_recipe(write_recipe(tmp_path))
    assert [run.name for run in read.runs] == NAMES
    assert [run.label for run in read.runs] == ["b1-rope", "m2-sc-rfa", "m2-sc-rfa b=0.5"]
    assert [run.spec.model.get("damping") for run in read.runs] == [None, None, 0.5]
    assert (read.name, read.title, read.keep_models) == ("tiny", "A tiny recipe", False)
    assert read.evaluation.lengths == (8, 16)
    assert read.asked_of(read.runs[0])["protocols"] == {"blocks": 300, "matched": None}


def test_seeds_come_in_turns(tmp_path):
    read = load_recipe(write_recipe(tmp_path, runs=[{"presets": ["b1-rope", "b2-alibi"], "seeds": [1, 0]}]))
    names = ["b1-rope-seed1", "b2-alibi-seed1", "b1-rope-seed0", "b2-alibi-seed0"]
    assert [run.name for run in read.runs] == names


def test_attention_maps_are_of_a_presets_first_run(tmp_path):
    wanted = {**recipe()["evaluation"], "attention": ["m2-sc-rfa"]}
    read = load_recipe(write_recipe(tmp_path, evaluation=wanted))
    assert [read.asked_of(run)["attention"] for run in read.runs] == [False, True, False]
    # finished runs stay so when variants are put before them and seeds behind
    variant = {"presets": ["m2-sc-rfa"], "seeds": [0], "model": {"damping": 0.5}, "label": "b=0.5"}
    first, more = ({"presets": ["m2-sc-rfa"], "seeds": [seed]} for seed in (1, 0))
    for runs in ([first], [variant, first], [variant, first, more]):
        read = load_recipe(write_recipe(tmp_path, runs=runs, evaluation=wanted))
        assert [run.name for run in read.runs if read.asked_of(run)["attention"]] == ["m2-sc-rfa-seed1"]
    (fault,) = faults(write_recipe(tmp_path, runs=[variant], evaluation=wanted))
    assert "attention: got 'm2-sc-rfa', expected presets of the runs, those without a label" in fault
    (fault,) = faults(write_recipe(tmp_path, evaluation={**wanted, "attention": 2 * ["m2-sc-rfa"]}))
    assert "attention: got m2-sc-rfa 2 times" in fault


def test_paths_are_meant_from_the_recipe(tmp_path, monkeypatch):
    path = write_recipe(tmp_path, training={**TRAINING, "data": "corpus", "tokenizer": "gpt2:words", "model": MODEL})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    read = load_recipe(path)
    spec = read.resolved(read.runs[0])
    assert (spec.data, spec.tokenizer) == (str(tmp_path / "corpus"), f"gpt2:{tmp_path / 'words'}")
    assert read.runs[0].spec.data == "corpus"  # in results, so that they may move
    given = load_recipe(path, data="other")
    assert given.resolved(given.runs[0]).data == str(tmp_path / "elsewhere" / "other")
    named = load_recipe(path, data="stdlib")
    assert named.resolved(named.runs[0]).data == "stdlib"


def test_all_faults_at_once(tmp_path):
    path = write_recipe(
        tmp_path,
        colour="red",
        keep_models="perhaps",
        training={
            **TRAINING,
            "length": 1,
            "batch_size": 0,
            "epoch": 3,
            "seed": 4,
            "learning_rate": "fast",
            "model": MODEL,
        },
        runs=[
            {"presets": ["b1-rope", "b9-new", "b1-rope"], "seeds": [0, 0, -1], "colour": "red"},
            {"presets": ["b1-rope"], "seeds": [0], "model": {"damping": 0.5, "head": 3}},
            {"presets": [], "seeds": [0], "label": "a/b"},
            {"seeds": [0]},
            "b1-rope",
        ],
        evaluation={
            "lengths": [8, 1, 8, 600, "x"],
            "protocols": {"blocks": 300, "guess": None},
            "attention": ["b2-alibi"],
            "colour": "red",
        },
    )
    found = faults(path)
    wanted = [
        "recipe: colour: unknown key",
        "recipe: keep_models: got 'perhaps', expected true or false",
        "training: seed: not here, expected seeds in runs",
        "training: epoch: unknown key",
        "training: length: got 1, expected at least 2",
        "training: batch_size: got 0, expected at least 1",
        "training: learning_rate: got 'fast'",
        "runs[0]: colour: unknown key",
        "runs[0]: presets: got b1-rope twice",
        "runs[0]: seeds: got 0 twice",
        "runs[0]: seeds: got -1",
        "runs[0]: preset: got 'b9-new'",
        "runs[1]: damping: got 0.5, expected nothing: it has no effect in b1-rope",
        "runs[1]: head: not a field of RFAConfig",
        "runs[2].label: got 'a/b'",
        "runs[2]: presets: got none",
        "runs[3]: presets: missing",
        "runs[4]: got 'b1-rope', expected a mapping",
        "evaluation: colour: unknown key",
        "evaluation: lengths: got 1, ",
        "evaluation: lengths: got 'x', ",
        "evaluation: lengths: got 8 twice",
        "evaluation: protocols: got 300 for blocks",
        "evaluation: protocols: got 'guess'",
        "evaluation: attention: got 'b2-alibi'",
    ]
    for start in wanted:
        assert sum(line.startswith(start) for line in found) == 1, (start, found)
    assert len(found) == len(wanted), found


def test_one_group_of_some_runs(tmp_path):
    runs = [{"presets": ["m2-sc-rfa"], "seeds": [0]}]
    runs.append({"presets": ["m2-sc-rfa"], "seeds": [0], "label": "released", "one_group": True})
    assert [run.spec.one_group for run in load_recipe(write_recipe(tmp_path, runs=runs)).runs] == [False, True]
    runs[1]["one_group"] = "yes"
    assert faults(write_recipe(tmp_path, runs=runs)) == ["runs[1]: one_group: got 'yes', expected true or false"]
    runs[1].update(presets=["b1-rope"], one_group=True)
    (fault,) = faults(write_recipe(tmp_path, runs=runs))
    assert fault.startswith("runs[1]: one_group: got True, expected False: b1-rope has none of the SDE's parameters")


def test_all_faults_of_a_model(tmp_path):
    """Of a wrong kind too, each said of where it stands."""
    path = write_recipe(
        tmp_path,
        training={
            **TRAINING,
            "model": {**MODEL, "intermediate_size": "a", "num_attention_heads": "8", "hidden_size": -2},
        },
        runs=[
            {
                "presets": ["m2-sc-rfa"],
                "seeds": [0],
                "model": {"horizon": "x", "prior": "", "damping": "lots", "zero_heads": 9, "initial_slopes": "none"},
            },
            {"presets": ["b1-rope"], "seeds": [0], "label": 101 * "a", "model": {"innovation": 3}},
        ],
    )
    found = sorted(line.partition(", expected")[0] for line in faults(path))
    assert found == [
        "runs[0]: damping: got 'lots'",
        "runs[0]: horizon: got 'x'",
        "runs[0]: initial_slopes: got 'none'",
        "runs[0]: prior: got ''",
        "runs[0]: zero_heads: got 9",
        "runs[1].label: got '" + 101 * "a" + "'",
        "runs[1]: innovation: got 3",
        "training: hidden_size: got -2",
        "training: intermediate_size: got 'a'",
        "training: num_attention_heads: got '8'",
    ]


def test_two_runs_of_one_name(tmp_path):
    (line,) = faults(write_recipe(tmp_path, runs=2 * [{"presets": ["b1-rope"], "seeds": [0]}]))
    assert line.startswith("runs: b1-rope-seed0: named 2 times")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "recipe: got None"),
        ("- 1", "recipe: got [1]"),
        ("a: [", "no YAML"),
        ("name: a\nname: b", "stands twice"),
        ("? [a]\n: b", "no YAML"),
        ("name: 2024-13-45", "no YAML: month must be in 1..12"),
        ("name: !!int abc", "no YAML: "),
        ("name: !!map [a]", "no YAML: line 1: expected a mapping"),
        ("training: {accumulate: true}\nruns: [{presets: [b1-rope], seeds: [0]}]", "accumulate: got True"),
        ("name: ''", "name: got ''"),
        ("evaluation: {attention: [[]]}", "attention: got []"),
        ("runs: [{presets: [[]], seeds: [true]}]", "seeds: got True"),
        ("training: {model: {3: 4}}\nruns: [{presets: [b1-rope], seeds: [0]}]", "model: got the key 3"),
        ("name: 3", "name: got 3, expected text"),
        ("training: []", "training: got [], expected a mapping"),
    ],
)
def test_no_recipe(tmp_path, text, said):
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    assert any(said in line for line in faults(path))


def test_the_command_says_all_of_it(tmp_path, monkeypatch, capsys):
    path = write_recipe(tmp_path, colour="red", runs=[{"presets": ["b9-new"], "seeds": [0]}])
    status, out, err = command(monkeypatch, capsys, "experiment", path, "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert [line.split(": ")[:4] for line in err.splitlines()] == [
        ["rfa", str(path), "recipe", "colour"],
        ["rfa", str(path), "runs[0]", "preset"],
    ]
    assert not (tmp_path / "out").exists()


LANGUAGE = sorted(path for path in SHIPPED.glob("*.yaml") if not path.stem.startswith(("series-", "recall")))


@pytest.mark.parametrize("path", LANGUAGE, ids=lambda path: path.stem)
def test_shipped_recipes(path):
    read = load_recipe(path)
    assert read.name == path.stem
    assert {run.spec.length for run in read.runs} == {min(read.evaluation.lengths)}


def test_the_small_record_has_every_preset():
    runs = load_recipe(SHIPPED / "novels-small.yaml").runs
    for_series = {"c9-rotation-fox", "c10-rotation-learned"}  # controls of irregular series only
    later = {
        "c12-kerple",
        "x5-content-clock",
        "x6-content-dynamics",
        "x7-gated-roper",
        "c8-fox-clock",
    }  # in recipes of other records
    assert {run.spec.preset for run in runs} == set(PRESETS) - set(PLAIN_NAMES) - for_series - later
    assert {run.spec.max_steps * run.spec.batch_size * run.spec.length for run in runs} == {4_096_000}
