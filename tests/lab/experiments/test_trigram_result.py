"""The trigram's file of a recipe: the tokens of its runs, the targets of its results."""

import json

import numpy as np

from rfa_lab.data import prepare
from rfa_lab.evaluation import Trigram
from rfa_lab.recipes import load_recipe, run_recipe
from rfa_lab.recipes.trigram_result import RecipeTrigram
from rfa_lab.results import read_result, read_results, read_trigram
from rfa_lab.training import seen_blocks

from .recipes import NAMES, claimed_elsewhere, recipe, write_recipe


def test_the_trigram_of_a_recipe(tmp_path):
    plan = {**recipe()["evaluation"], "by_position": True}
    planned = load_recipe(write_recipe(tmp_path, evaluation=plan))
    out = tmp_path / "out"
    assert run_recipe(planned, out, only=[NAMES[0]]).done == (NAMES[0],)
    trigram, result = read_trigram(out / "results"), read_result(out / "results" / f"{NAMES[0]}.json")
    spec = planned.resolved(planned.runs[0])
    text = prepare(spec.data, spec.tokenizer, spec.split_by)
    assert read_results(out).runs[0]["trigram"] == trigram
    assert trigram["tokens"] == result["training"]["tokens"]
    assert trigram["data"]["fingerprint"] == result["data"]["fingerprint"]
    for protocol, evaluation in result["evaluations"].items():
        found = trigram["evaluations"][protocol]
        assert [row["targets"] for row in found["rows"]] == [row["targets"] for row in evaluation["rows"]]
        targets = [
            {book: {length: of[1] for length, of in lengths.items()} for book, lengths in each["books"].items()}
            for each in (found, evaluation)
        ]
        assert targets[0] == targets[1]
    assert len(trigram["by_position"]["loss"]) == len(result["by_position"]["loss"])
    blocks = text.streams["train"][: len(text.streams["train"]) // 8 * 8].reshape(-1, 8)
    model = Trigram(blocks[seen_blocks(spec, len(blocks))], len(text.tokenizer))
    valid = text.streams["valid"][: len(text.streams["valid"]) // 8 * 8].reshape(-1, 8)
    losses = [-np.log(model.probability(*(valid[:, place - back] for back in (2, 1, 0)))) for place in range(2, 8)]
    losses.append(-np.log(model.probability(None, valid[:, 0], valid[:, 1])))
    assert spec.valid_tokens is None
    np.testing.assert_allclose(trigram["valid_perplexity"], np.exp(np.mean(losses)), rtol=1e-12)


def test_it_is_made_for_a_record_that_has_none_and_only_then(tmp_path, out, evaluated):
    planned = load_recipe(write_recipe(tmp_path))
    run_recipe(planned, out, only=[NAMES[0]])
    path = out / "results" / "trigram.json"
    before = path.read_bytes()
    path.write_bytes(before + b" ")
    run_recipe(planned, out, only=[NAMES[0]])
    assert path.read_bytes() == before + b" "
    path.unlink()
    run_recipe(planned, out, only=[NAMES[0]])
    assert path.read_bytes() == before
    assert evaluated == NAMES[:1]


def test_one_process_makes_it_while_the_others_train(tmp_path, out, evaluated):
    planned = load_recipe(write_recipe(tmp_path))
    with claimed_elsewhere(out, "trigram"):
        assert run_recipe(planned, out, only=[NAMES[0]]).done == (NAMES[0],)
        assert not (out / "results" / "trigram.json").exists()
    run_recipe(planned, out, only=[NAMES[0]])
    assert (out / "results" / "trigram.json").is_file()


def test_one_of_another_text_or_evaluation_is_made_anew(tmp_path, out):
    planned = load_recipe(write_recipe(tmp_path))
    run_recipe(planned, out, only=[NAMES[0]])
    path, spec = out / "results" / "trigram.json", planned.resolved(planned.runs[0])
    text = prepare(spec.data, spec.tokenizer, spec.split_by)
    assert not RecipeTrigram(planned, out).is_of_another_text(text)
    found = json.loads(path.read_text("utf-8"))
    rows = next(iter(found["evaluations"].values()))["rows"]
    for damaged in (
        {**found, "data": {**found["data"], "fingerprint": "0"}},
        {**found, "evaluations": {name: {"rows": rows[:-1]} for name in found["evaluations"]}},
        {**found, "tokens": found["tokens"] - 8},
        {**found, "vocabulary": 300},
        {**found, "tokenizer": "bpe:257"},
        {**found, "evaluation": {**found["evaluation"], "valid_tokens": 8}},
        {**found, "evaluation": {**found["evaluation"], "protocols": {"blocks": 200, "matched": None}}},
        {},
    ):
        path.write_text(json.dumps(damaged), "utf-8")
        assert RecipeTrigram(planned, out).is_of_another_text(text)


def test_a_longer_run_that_joins_the_recipe_has_it_made_anew(tmp_path, out, evaluated):
    run_recipe(load_recipe(write_recipe(tmp_path)), out, only=[NAMES[0]])
    path = out / "results" / "trigram.json"
    before = json.loads(path.read_text("utf-8"))
    older = {name: value for name, value in before.items() if name not in ("evaluation", "tokenizer")}
    path.write_text(json.dumps(older), "utf-8")
    longer = {"presets": ["b1-rope"], "label": "long", "seeds": [0], "max_steps": 8}
    planned = load_recipe(write_recipe(tmp_path, runs=[*recipe()["runs"], longer]))
    run_recipe(planned, out, only=["b1-rope-long-seed0"])
    found = json.loads(path.read_text("utf-8"))
    assert found["tokens"] > before["tokens"]
    assert found["evaluation"] == before["evaluation"]


def test_blocks_of_two_tokens_have_no_trigram(tmp_path, out, evaluated):
    training = {**recipe()["training"], "length": 2}
    planned = load_recipe(write_recipe(tmp_path, training=training))
    run_recipe(planned, out, only=[NAMES[0]])
    assert not (out / "results" / "trigram.json").exists()
