"""An exported folder: transformers loads it without `import rfa`, and its card says what was measured."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from training.runs import tiny_spec, write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from rfa.checks import install_command
from rfa.models import RFAConfig
from rfa_lab.evaluation import evaluate
from rfa_lab.export import export_run, model_card
from rfa_lab.training import RunFolder, train

LOAD = """
import sys
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
{before}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("the old sea", return_tensors="pt").input_ids
print(model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist())
"""
BLOCKED = """
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "rfa":
            raise ModuleNotFoundError("No module named 'rfa'")

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The parent of a run, of its evaluation and of its exported folder."""
    place = tmp_path_factory.mktemp("exported")
    train(tiny_spec(write_corpus(place / "corpus"), max_steps=4), place / "run")
    evaluated = evaluate(place / "run", lengths=[16, 32], protocol="matched")
    (place / "evaluation.json").write_text(json.dumps(evaluated))
    export_run(place / "run", place / "model", results=[place / "evaluation.json"])
    return place


def loaded(folder, before, tmp_path):
    program = [sys.executable, "-c", LOAD.format(before=before), str(folder)]
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    return subprocess.run(program, capture_output=True, text=True, env=environment)


def test_it_loads_without_import_rfa(place, tmp_path):
    done = loaded(place / "model", "", tmp_path)
    assert done.returncode == 0, done.stderr
    model = RunFolder(place / "run").load_model()
    ids = torch.tensor([list(b"the old sea")])
    assert json.loads(done.stdout) == model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()


def test_the_auto_map_names_what_is_registered(place):
    """transformers prefers the registered classes as soon as the configuration has loaded rfa."""
    named = json.loads((place / "model" / "config.json").read_text())["auto_map"]
    assert named.pop("AutoConfig") == "configuration_rfa.RFAConfig"
    assert len(named) == 5
    for auto, what in named.items():
        module, name = what.split(".")
        registered = getattr(transformers, auto)._model_mapping[RFAConfig]
        assert runpy.run_path(place / "model" / f"{module}.py")[name] is registered


def test_without_rfa_the_error_names_the_installation(place, tmp_path):
    done = loaded(place / "model", BLOCKED, tmp_path)
    assert done.returncode == 1
    error = "ImportError: this model needs the package robust-filter-attention: "
    assert done.stderr.splitlines()[-1].startswith(error + install_command("hf"))


def test_the_pipeline_pads_prompts_of_different_lengths(place):
    made = pipeline("text-generation", model=str(place / "model"), trust_remote_code=True)
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    alone = [made(prompt, **options) for prompt in ("the old sea", "by")]
    assert made(["the old sea", "by"], batch_size=2, **options) == alone


def test_the_card_has_the_results_of_the_run(place):
    card = ModelCard.load(place / "model" / "README.md")
    rows = json.loads((place / "evaluation.json").read_text())["rows"]
    found = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert found == {f"perplexity, matched, {row['length']} tokens": round(row["perplexity"], 4) for row in rows}
    assert {each.dataset_type for each in card.data.eval_results} == {"corpus"}
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    record = RunFolder(place / "run").read()
    for row in rows:
        assert f"| matched | {row['length']} | {row['targets']} | {row['loss']:.4f} |" in card.text
    assert f"| {record['result']['parameters']:,} |" in card.text
    assert f"| {record['result']['valid_perplexity']:.2f} |" in card.text
    assert str(place) not in card.text


NAMES = ['x"; import os; os.system("id")  #', "a\\", "a`b` ``` {0}", "![x](http://evil/a.png) www.evil.com <script>"]
NAMES += ["*b* _b_ ~~b~~ a&b &lt;", "a|b", "# h", "a\n---\n# b", "a\ud800", "plain_name-2", "\u202eabc\x1b[31m\u200b"]


def test_a_hostile_name_stays_text(place):
    """As the name of the folder, of the text and of the machine, for a reader of Markdown that is not ours."""
    record = RunFolder(place / "run").read()
    row = {"length": 16, "targets": 9, "loss": 1.0, "perplexity": 2.0, "protocol": "blocks", "fingerprint": "f"}
    for name in NAMES:
        record["data"]["corpus"] = record["environment"]["machine"] = name
        card = model_card(name, record, "model", 5, [{**row, "text": name}])
        shown = "".join(letter for letter in " ".join(name.split()) if letter.isprintable())
        head, body = ModelCard(card).data, card.split("\n---\n", 1)[1]
        assert head.model_name == head.eval_results[0].dataset_name == shown
        parsed = MarkdownIt("commonmark").enable("table").parse(body)
        inline = [token for token in parsed if token.type == "inline"]
        kinds = {child.type for token in inline for child in token.children}
        assert kinds <= {"text", "text_special", "softbreak", "code_inline"}
        texts = ["".join(child.content for child in token.children) for token in inline]
        assert texts[0] == shown  # the title
        assert texts[texts.index("machine") + 1].endswith(f"; {shown}")
        assert texts[texts.index("perplexity") + 1] == shown
        assert not [token for token in parsed if token.type == "html_block"]
        (code,) = [token.content for token in parsed if token.type == "fence" and token.info == "python"]
        _, folder, *_ = ast.parse(code).body
        assert (ast.literal_eval(folder.value), len(ast.parse(code).body)) == (name, 4)
        assert all(letter.isprintable() for letter in card.replace("\n", ""))
        assert not re.search(r"(?<!\\)://|www\.", body.replace(repr(name), ""))  # the Hub makes links of bare addresses


def test_a_copy_of_a_loaded_model_loads_too(place, tmp_path):
    """transformers would copy the package's files beside it, and they import each other."""
    AutoModelForCausalLM.from_pretrained(place / "model").save_pretrained(tmp_path / "copy")
    for name in ("config.json", "configuration_rfa.py", "modeling_rfa.py"):
        assert (tmp_path / "copy" / name).read_bytes() == (place / "model" / name).read_bytes()
    assert sorted(path.suffix for path in (tmp_path / "copy").iterdir()) == [
        ".json",
        ".json",
        ".py",
        ".py",
        ".safetensors",
    ]


def test_what_is_refused(place, tmp_path, rfa):
    other = {**json.loads((place / "evaluation.json").read_text()), "seed": 5}
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    run, faults = place / "run", {}
    faults["--out", "new", "--results", "other.json"] = "of seed 5', expected 0, the run's"
    faults["--out", "new", "--results", "list.json"] = "list.json cannot be read"
    faults["--out", "new", "--results", "none.json"] = "none.json cannot be read"
    faults["--out", "mine"] = "expected a folder that does not exist, or overwrite"
    faults["--out", "mine", "--overwrite"] = "expected a folder that an export wrote"
    faults["--out", str(run)] = "expected a folder beside the run's own files"
    for options, said in faults.items():
        status, out, err = rfa("export", run, *options)
        assert (status, out) == (2, "")
        assert said in err
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "mine" / "notes").read_text() == "mine"


def test_the_command(place, tmp_path, rfa):
    """An unfinished run has the weights of its checkpoint, and an export is replaced as a whole."""
    status, said, _ = rfa("export", place / "run", "--out", "made", "--results", place / "evaluation.json")
    assert (status, said.splitlines()[0]) == (0, "model: made")
    (tmp_path / "made" / "old").write_text("of the export before")
    record = RunFolder(place / "run").record
    before = record.read_text()
    record.write_text(json.dumps({**json.loads(before), "finished": False}))
    try:
        status, said, _ = rfa("export", place / "run", "--out", "made", "--overwrite")
    finally:
        record.write_text(before)
    assert status == 0
    assert "none; `rfa evaluate" in said
    card = (tmp_path / "made" / "README.md").read_text()
    assert "not finished: the weights are those of checkpoint-4" in card
    assert "Not evaluated" in card
    assert not (tmp_path / "made" / "old").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.padding_side == "left"
