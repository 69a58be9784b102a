"""lm-evaluation-harness runs a task on an exported folder: its log likelihoods and its accuracy are the model's own."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cover import slow
from training.runs import WORDS, text, tiny_spec, write_corpus

from rfa_lab.export import export_run
from rfa_lab.training import RunFolder, train

QUESTIONS, ANSWERS = 100, 4
PAGE = (Path(__file__).parents[3] / "docs" / "ecosystem.md").read_text("utf-8")


def questions():
    """The beginning of a text; as answers a word of its language, and three times the letters of it in disorder."""
    chance = random.Random(0)
    long = [word for word in WORDS if len(word) >= 4]
    for number in range(QUESTIONS):
        word, answers = chance.choice(long), []
        while len(answers) < ANSWERS - 1:
            other = "".join(chance.sample(word, len(word)))
            if other != word and other not in answers:
                answers.append(other)
        place = chance.randrange(ANSWERS)
        answers.insert(place, word)
        begun = text(200, seed=number)[: chance.randrange(1, 50)].rpartition(" ")[0]
        yield {"text": begun or "the", "choices": answers, "answer": place}


def block(language, begins):
    """A block of the page."""
    return re.search(rf"```{language}\n({begins}.*?)```", PAGE, re.DOTALL)[1]


def log_likelihood(model, given, answer):
    """From the loss of the answer's tokens, each question by itself: no batch, no padding."""
    answer = f" {answer}"  # the harness puts a space before it
    ids = torch.tensor([list((given + answer).encode())])
    labels = ids.clone()
    labels[:, : len(given)] = -100
    with torch.no_grad():
        return -float(model(ids, labels=labels).loss) * len(answer)


@slow
def test_a_task_by_its_command(tmp_path):
    """The task file and the command of docs/ecosystem.md; questions in batches with padding: 25 s."""
    pytest.importorskip("lm_eval")
    train(tiny_spec(write_corpus(tmp_path / "corpus", train=20_000), max_steps=80, eval_steps=80), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "small-model")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(block("yaml", "task: words"))
    asked = list(questions())
    (tmp_path / "tasks" / "words.jsonl").write_text("\n".join(map(json.dumps, asked)))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    _, *given = shlex.split(block("bash", "lm_eval ").replace("\\\n", ""))
    command = [sys.executable, "-m", "lm_eval", *given, "--output_path", "out", "--log_samples"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)

    (file,) = (tmp_path / "out").rglob("samples_words_*.jsonl")
    samples = {sample["doc_id"]: sample for sample in map(json.loads, file.read_text().splitlines())}
    assert len(samples) == QUESTIONS
    model, right = RunFolder(tmp_path / "run").load_model().eval(), 0
    for number, question in enumerate(asked):
        assert samples[number]["doc"] == question
        own = [log_likelihood(model, question["text"], answer) for answer in question["choices"]]
        theirs = [float(value) for value, _ in samples[number]["filtered_resps"]]
        assert theirs == pytest.approx(own, abs=1e-3)  # sums of six tokens in float32, of size 30
        right += max(range(ANSWERS), key=own.__getitem__) == question["answer"]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"]["words"]["acc,none"]
    assert accuracy == pytest.approx(right / QUESTIONS)
    assert accuracy > 0.5  # chance is 0.25: the model knows the words
