"""Training on synthetic tasks: scores against a loop over positions, the curve, and models that know the answers."""

import math

import pytest
import torch

from rfa.models import RFAForCausalLM, preset
from rfa_lab.data.synthetic import AssociativeRecall, SyntheticBatch, TimedRecall
from rfa_lab.training.synthetic import TaskTraining, task_score, train_on_task

SMALL = AssociativeRecall(pairs=2, keys=4, values=4, filler=2)


def network(task=SMALL, name="b1-rope", length=12):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return RFAForCausalLM(preset(name, vocab_size=task.vocabulary, train_length=length, **sizes))


def batch_of(task, sequences=40, length=12):
    return task.sample(sequences, length, torch.Generator().manual_seed(3))


def test_a_score_is_that_of_a_loop_over_the_questions():
    model, batch = network(), batch_of(SMALL)  # 40 sequences: two parts
    losses, right = [], 0
    with torch.no_grad():
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            logits = model(tokens[None]).logits[0].double()
            for place in (labels >= 0).nonzero().flatten().tolist():
                losses.append(-logits[place].log_softmax(-1)[labels[place]].item())
                right += int(logits[place].argmax() == labels[place])
    score = task_score(model, batch)
    assert score.questions == len(losses) == 80
    assert score.loss == pytest.approx(sum(losses) / 80, abs=1e-5)  # float32 logits
    assert score.accuracy == pytest.approx(right / 80)


def test_the_model_sees_the_times_of_a_task():
    task = TimedRecall(questions=2, values=4, lag=3.5)
    model, batch = network(task), batch_of(task)
    given = task_score(model, batch)
    assert given.loss != task_score(model, batch._replace(times=None)).loss
    assert given.loss == pytest.approx(task_score(model, batch._replace(times=batch.times + 7.0)).loss, rel=1e-4)


def test_a_batch_without_questions_is_refused():
    batch = batch_of(SMALL)
    with pytest.raises(ValueError, match="questions: got 0"):
        task_score(network(), SyntheticBatch(batch.tokens, torch.full_like(batch.labels, -100)))


def test_a_model_learns_and_its_curve_says_when():
    seen = []
    training = TaskTraining(steps=90, batch_size=16, learning_rate=1e-2, length=12, every=40, held_out=32)
    task = AssociativeRecall(pairs=1, keys=2, values=3, filler=1)
    model = network(task)
    before = task_score(model, batch_of(task))
    curve = train_on_task(model, task, training, lambda *step: seen.append(step))
    assert list(curve) == [40, 80, 90]
    assert seen == [(step, 90) for step in range(1, 91)]
    assert before.loss > 0.8 * math.log(3)  # the values' share of a new model's guess
    assert curve[90].loss < 0.1
    assert curve[90].accuracy == task_score(model, batch_of(task)).accuracy == 1.0
    assert not model.training


def test_the_held_out_sequences_are_the_same_for_every_seed():
    """A rate at which nothing is learnt: the same new model has the same score."""
    scores = []
    for seed in (0, 1):
        training = TaskTraining(steps=1, batch_size=2, learning_rate=1e-9, length=12, held_out=8, seed=seed)
        scores.append(train_on_task(network(), SMALL, training)[1].loss)
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_one_group_gives_the_dynamics_the_rate_of_the_rest():
    """One step of Adam moves a parameter by its rate: the SDE's group has half of it, unless there is one group."""
    moved = []
    for one_group in (False, True):
        model = network(name="m2-sc-rfa")
        before = [p.detach().clone() for module in model.head_dynamics().values() for p in module.parameters()]
        rate = {"steps": 1, "learning_rate": 1e-3, "one_group": one_group}
        train_on_task(model, SMALL, TaskTraining(batch_size=4, length=12, held_out=4, **rate))
        after = [p for module in model.head_dynamics().values() for p in module.parameters()]
        moved.append(max((p - q).abs().max().item() for p, q in zip(after, before, strict=True)))
    assert moved[1] == pytest.approx(2 * moved[0], rel=0.02)  # float32 and Adam's eps


@pytest.mark.parametrize("given", [{"length": 1}, {"every": 0}, {"held_out": 0}])
def test_training_that_cannot_be_is_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        TaskTraining(**given)
