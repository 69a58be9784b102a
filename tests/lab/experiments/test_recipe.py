"""Recipes: what they hold, and everything that is wrong with one at once."""

from pathlib import Path

import pytest
from training.runs import MODEL

from rfa_lab.recipes import RecipeError, load_recipe

from .recipes import NAMES, TRAINING, recipe, write_recipe

SHIPPED = Path(__file__).parents[3] / "recipes"
RUN = {"presets": ["b1-rope"], "seeds": [0]}
# aliases of aliases: 9^9 texts in 304 bytes, and as many keys, which YAML itself would merge
ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(10))


def faults(path, **options) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        load_recipe(path, **options)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def assert_faults(path, wanted):
    """One line begins with each of the wanted ones, and there are no others."""
    found = faults(path)
    for start in wanted:
        assert sum(line.startswith(start) for line in found) == 1, (start, found)
    assert len(found) == len(wanted), found


def test_a_recipe(tmp_path):
    read = load_recipe(write_recipe(tmp_path))
    assert [run.name for run in read.runs] == NAMES
    assert [run.label for run in read.runs] == ["b1-rope", "m2-sc-rfa", "m2-sc-rfa b=0.5"]
    assert [run.spec.model.get("damping") for run in read.runs] == [None, None, 0.5]
    assert (read.name, read.title, read.keep_models) == ("tiny", "A tiny recipe", False)
    assert read.evaluation.lengths == [8, 16]
    assert read.evaluation_of(read.runs[0])["protocols"] == {"blocks": 300, "matched": None}
    read = load_recipe(write_recipe(tmp_path, runs=[{"presets": ["b1-rope", "b2-alibi"], "seeds": [1, 0]}]))
    names = ["b1-rope-seed1", "b2-alibi-seed1", "b1-rope-seed0", "b2-alibi-seed0"]  # seeds come in turns
    assert [run.name for run in read.runs] == names


def test_attention_maps_are_of_a_presets_first_run(tmp_path):
    wanted = {**recipe()["evaluation"], "attention": ["m2-sc-rfa"]}
    read = load_recipe(write_recipe(tmp_path, evaluation=wanted))
    assert [read.evaluation_of(run)["attention"] for run in read.runs] == [False, True, False]
    # finished runs stay so when variants are put before them and seeds behind
    variant = {"presets": ["m2-sc-rfa"], "seeds": [0], "model": {"damping": 0.5}, "label": "b=0.5"}
    first, more = ({"presets": ["m2-sc-rfa"], "seeds": [seed]} for seed in (1, 0))
    for runs in ([first], [variant, first], [variant, first, more]):
        read = load_recipe(write_recipe(tmp_path, runs=runs, evaluation=wanted))
        assert [run.name for run in read.runs if read.evaluation_of(run)["attention"]] == ["m2-sc-rfa-seed1"]
    (fault,) = faults(write_recipe(tmp_path, runs=[variant], evaluation=wanted))
    assert "attention: got 'm2-sc-rfa', expected presets of the runs, those without a label" in fault


def test_paths_are_meant_from_the_recipe(tmp_path, monkeypatch):
    path = write_recipe(tmp_path, training={**TRAINING, "data": "corpus", "tokenizer": "gpt2:words", "model": MODEL})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    read = load_recipe(path)
    spec = read.spec_of(read.runs[0])
    assert (spec.data, spec.tokenizer) == (str(tmp_path / "corpus"), f"gpt2:{tmp_path / 'words'}")
    assert read.runs[0].spec.data == "corpus"  # in results, so that they may move
    for data, meant in (("other", str(tmp_path / "elsewhere" / "other")), ("stdlib", "stdlib")):
        given = load_recipe(path, data=data)
        assert given.spec_of(given.runs[0]).data == meant


def test_an_entry_has_options_of_its_own(tmp_path):
    released = {"presets": ["m2-sc-rfa"], "seeds": [0], "label": "released", "one_group": True, "max_steps": 2}
    runs = [{"presets": ["m2-sc-rfa"], "seeds": [0]}, released]
    read = load_recipe(write_recipe(tmp_path, runs=runs))
    assert [(run.spec.one_group, run.spec.max_steps) for run in read.runs] == [(False, 4), (True, 2)]
    runs[1] = {**RUN, "label": "released", "one_group": True}
    wanted = "runs[1]: one_group: got True, expected False: b1-rope has none of the SDE's parameters"
    assert_faults(write_recipe(tmp_path, runs=runs), [wanted])


def test_all_faults_of_keys_and_types_at_once(tmp_path):
    path = write_recipe(
        tmp_path,
        colour="red",
        keep_models="perhaps",
        training={**TRAINING, "epoch": 3, "seed": 4, "learning_rate": "fast", "accumulate": True},
        runs=[
            {"presets": ["b1-rope", "b9-new", "b1-rope"], "seeds": [0, 2**32, True], "colour": "red"},
            {"presets": [], "seeds": [0, 0], "label": "a/b", "model": {3: 4}, "max_steps": "x"},
            {"seeds": [0], "one_group": "yes"},
            "b1-rope",
        ],
        evaluation={"lengths": [8, 1, "x"], "protocols": {"guess": None}, "attention": [[]], "colour": "red"},
    )
    wanted = [
        "recipe: colour: unknown key, expected some of name, title",
        "recipe: keep_models: got 'perhaps', expected a valid boolean",
        "training: seed: unknown key",
        "training: epoch: unknown key",
        "training: learning_rate: got 'fast', expected a valid number",
        "training: accumulate: got True, expected a valid integer",
        "runs[0]: colour: unknown key, expected some of presets, seeds",
        "runs[0].presets[1]: got 'b9-new', expected one of ",
        "runs[0].seeds[1]: got 4294967296",
        "runs[0].seeds[2]: got True, expected a valid integer",
        "runs[1]: presets: got [], expected at least one",
        "runs[1]: seeds: got 0 twice in [0, 0]",
        "runs[1]: label: got 'a/b', expected letters, digits",
        "runs[1].model[3]: [key]: got 3, expected a valid string",
        "runs[1]: max_steps: got 'x'",
        "runs[2]: presets: missing",
        "runs[2]: one_group: got 'yes', expected a valid boolean",
        "runs[3]: got 'b1-rope', expected a valid dictionary",
        "evaluation: colour: unknown key",
        "evaluation.lengths[1]: got 1",
        "evaluation.lengths[2]: got 'x', expected a valid integer",
        "evaluation.protocols.guess: [key]: got 'guess', expected one of blocks",
        "evaluation.attention[0]: got []",
    ]
    assert_faults(path, wanted)


def test_faults_of_what_does_not_fit_together(tmp_path):
    training = {**TRAINING, "data": "corpus", "model": MODEL}
    runs = [
        {**RUN, "model": {"damping": 0.5}},
        {**RUN, "model": {"head": 3}},
        {"presets": ["m2-sc-rfa"], "seeds": [0], "model": {"horizon": "x"}},
        {"presets": ["m2-sc-rfa", "b2-alibi"], "seeds": [0], "model": {"damping": 0.5}},
        {"presets": ["b9-new"], "seeds": [0]},
    ]
    wanted = [
        "runs[0]: damping: got 0.5, expected nothing: it has no effect in b1-rope",
        "runs[1]: head: not a field of RFAConfig",
        "runs[2]: horizon: got 'x'",
        "runs[3]: damping: got 0.5, expected nothing: it has no effect in b2-alibi",
        "runs[4].presets[0]: got 'b9-new'",
        "evaluation: protocols: got 8 for blocks, expected null or a number of tokens of at least 16",
    ]
    evaluation = {"lengths": [16], "protocols": {"blocks": 8}}
    assert_faults(write_recipe(tmp_path, runs=runs, training=training, evaluation=evaluation), wanted)
    twice = write_recipe(tmp_path, runs=2 * [RUN], training=training)
    assert_faults(twice, ["runs: b1-rope-seed0: named 2 times, expected once"])
    assert_faults(write_recipe(tmp_path, training={**training, "length": 1}), ["training: length: got 1, expected at"])
    path = write_recipe(tmp_path, rates=[1e-3, 2], training=training)
    assert_faults(path, ["rates[1]: got 2, expected"])
    both = {**training, "learning_rate": 1e-3}
    for more, where in (({"rates": [1e-3]}, "rates"), ({"runs": [{**RUN, "rates": [1e-3]}]}, "runs[0]")):
        path = write_recipe(tmp_path, training=both, **more)
        assert_faults(path, [f"{where}: learning_rate: not in training, expected rates alone"])


def test_no_recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    for text, said in {
        "": "recipe: got None, expected a valid dictionary",
        "a: [": "no YAML",
        "name: a\nname: b": "stands twice",
        "name: 2024-13-45": "no YAML: month must be in 1..12",
        ALIASES + "title: *a9": "no YAML: line 5: got 125,479, expected at most 100,000 characters with all aliases",
        "name: !!map [a]": "no YAML: line 1: expected a mapping",
        "training: []": "training: got [], expected a valid dictionary",
    }.items():
        path.write_text(text)
        assert any(said in line for line in faults(path)), text


def test_shipped_recipes():
    for path in SHIPPED.glob("*.yaml"):
        read = load_recipe(path)
        assert read.name == path.stem
        assert {run.spec.length for run in read.runs} == {min(read.evaluation.lengths)}
