"""Parameter groups, schedule and clips of the paper's training (F), and a whole run against a bare PyTorch loop."""

import sys

import pytest
import torch
from cover import cover
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rfa.models import RFAForCausalLM, preset
from rfa_lab.data import TokenBlocks, prepare
from rfa_lab.training import train
from rfa_lab.training.callbacks import read_metrics
from rfa_lab.training.run_folder import RunFolder
from rfa_lab.training.trainer import make_optimizer, one_cycle
from training.runs import MODEL, tiny_spec

FILTERS = {
    "m2-sc-rfa": {"process_noise", "key_noise", "query_noise", "robustness", "inverse_temperature"},
    "x1-riccati": {"process_noise", "key_noise", "query_noise", "robustness", "inverse_temperature"},
    "m2.2-flat-prior": {"robustness", "inverse_temperature"},
}


def model(name, **changes):
    return RFAForCausalLM(preset(name, **{**MODEL, "vocab_size": 257, "train_length": 16, **changes}))


@cover(1, name=FILTERS, learned=[False, True])
def test_parameter_groups_of_filters(name, learned):
    more = {"learn_decay": True, "learn_frequencies": True} if learned else {}
    net = model(name, **more)
    features, dynamics = make_optimizer(net, 0.01).param_groups
    everything = [id(p) for p in net.parameters()]
    assert sorted(id(p) for group in (features, dynamics) for p in group["params"]) == sorted(everything)
    of_name = {id(p): n for n, p in net.named_parameters()}
    found = {of_name[id(p)].rpartition(".")[2].removeprefix("raw_") for p in dynamics["params"]}
    assert found == FILTERS[name] | ({"decay", "frequency"} if learned else set())
    assert all(".dynamics." in of_name[id(p)] for p in dynamics["params"])
    assert not any(".dynamics." in of_name[id(p)] for p in features["params"])
    assert (features["lr"], features["betas"], features["weight_decay"]) == (0.01, (0.9, 0.999), 0)
    assert (dynamics["lr"], dynamics["betas"], dynamics["weight_decay"]) == (0.005, (0.0, 0.999), 0)
    assert (features["eps"], dynamics["eps"]) == (1e-8, 1e-7)


def test_one_group(corpus, tmp_path):
    net = model("m2-sc-rfa")
    (group,) = make_optimizer(net, 0.01, one_group=True).param_groups
    assert sorted(map(id, group["params"])) == sorted(map(id, net.parameters()))
    groups = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: groups.append(len(optimizer.param_groups)))
    try:
        for one_group in (False, True):
            run = tmp_path / f"{one_group}"
            train(tiny_spec(corpus, max_steps=1, one_group=one_group), run)
            assert RunFolder(run).read()["spec"].get("one_group", False) == one_group
    finally:
        hook.remove()
    assert groups == [2, 1]


def test_what_is_frozen_is_in_no_group():
    net = model("m2-sc-rfa")
    frozen = [net.model.embed_tokens.weight, net.head_dynamics()[0].raw_robustness]
    for parameter in frozen:
        parameter.requires_grad_(False)
    found = {id(p) for group in make_optimizer(net, 0.01).param_groups for p in group["params"]}
    assert len(found) == len(list(net.parameters())) - 2
    assert not found & set(map(id, frozen))


def reference_schedule(parameters, peaks, total):
    """torch's one-cycle: 5 % up from peak / 25, then down to peak / 1000, both as cosines."""
    optimizer = torch.optim.SGD([{"params": [p], "lr": peak} for p, peak in zip(parameters, peaks, strict=True)])
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peaks, total, pct_start=0.05, div_factor=25, final_div_factor=40, cycle_momentum=False
    )


@pytest.mark.parametrize("total", [21, 137])  # at 20 steps and fewer torch divides by zero
def test_one_cycle_is_torchs(total):
    optimizer, schedule = reference_schedule([torch.zeros(1, requires_grad=True)], [1.0], total)
    for step in range(total):
        assert one_cycle(step, total) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        if step < total - 1:
            schedule.step()
    assert one_cycle(total - 1, total) == pytest.approx(1e-3)
    assert one_cycle(total, total) == pytest.approx(1e-3)  # the scheduler looks one step past the last


def test_one_cycle_of_few_steps():
    for total in (1, 2, 7, 20, 25):
        shares = [one_cycle(step, total) for step in range(total + 1)]
        assert all(0 < share <= 1 for share in shares)
        assert max(shares) > 0.9  # some step is about the peak, not only the start
        assert shares[-1] == pytest.approx(1e-3) or total == 1


def test_gradients_are_clipped_twice(corpus, tmp_path, monkeypatch):
    """Norms as the optimiser sees them: all within 1, the SDE's within 1e-4; both clips bite here."""
    norms = []

    class Steep(RFAForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.lm_head.weight.data.mul_(20)

    monkeypatch.setattr(sys.modules["rfa_lab.training.train"], "RFAForCausalLM", Steep)

    def look(optimizer, args, kwargs):
        groups = [[p.grad.flatten() for p in group["params"]] for group in optimizer.param_groups]
        norms.append([float(torch.cat(grads).norm()) for grads in groups])

    hook = register_optimizer_step_pre_hook(look)
    try:
        train(tiny_spec(corpus, max_steps=4), tmp_path / "run")
    finally:
        hook.remove()
    unclipped = [line["grad_norm"] for line in read_metrics(RunFolder(tmp_path / "run")) if "grad_norm" in line]
    assert len(norms) == 4
    assert min(unclipped) > 1.5
    assert max(features for features, _ in norms) < 1 + 1e-5
    assert max(features for features, _ in norms) > 0.99
    assert max(dynamics for _, dynamics in norms) < 1e-4 * (1 + 1e-5)
    assert max(dynamics for _, dynamics in norms) > 1e-4 * 0.9


def bare_loop(spec, order, data, steps):
    """The protocol in plain PyTorch: the losses of each step and the model at the end."""
    torch.manual_seed(spec.seed)
    net = RFAForCausalLM(spec.model_config(257, eos_token_id=256)).train()
    named = dict(net.named_parameters())
    sde = [p for n, p in named.items() if ".dynamics." in n]
    features = [p for n, p in named.items() if ".dynamics." not in n]
    peaks = [spec.learning_rate] + [spec.learning_rate / 2] * bool(sde)
    adam = torch.optim.Adam(features, lr=spec.learning_rate)
    sde_adam = torch.optim.Adam(sde, lr=spec.learning_rate / 2, betas=(0.0, 0.999), eps=1e-7) if sde else None
    clock, schedule = reference_schedule([torch.zeros(1) for _ in peaks], peaks, spec.max_steps)
    stream, losses = torch.tensor(data.streams["train"].astype("int64")), []
    batch = spec.batch_size * spec.accumulate
    for step in range(steps):
        blocks = torch.stack([stream[i * 16 : i * 16 + 16] for i in order[step * batch : (step + 1) * batch]])
        logits = net(blocks).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten())
        net.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimizer, rate in zip((adam, sde_adam), schedule.get_last_lr(), strict=False):
            if optimizer is sde_adam:
                torch.nn.utils.clip_grad_norm_(sde, 1e-4)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        losses.append(float(loss.detach()))
        clock.step()
        if step < spec.max_steps - 1:
            schedule.step()
    return losses, net


@pytest.mark.parametrize(("name", "accumulate"), [("m2-sc-rfa", 1), ("m2-sc-rfa", 3)])
def test_a_run_is_the_bare_loop(corpus, tmp_path, monkeypatch, name, accumulate):
    order, get = [], TokenBlocks.__getitem__

    def watched(blocks, index):
        order.extend([index] if len(blocks) == 100 else [])  # training, not validation
        return get(blocks, index)

    monkeypatch.setattr(TokenBlocks, "__getitem__", watched)
    spec = tiny_spec(corpus, name, max_steps=24, eval_steps=24, accumulate=accumulate, seed=3)
    train(spec, tmp_path / "run")
    if accumulate == 1:  # the epoch of 25 batches has every block once
        assert len(set(order[:96])) == 96
    steps = 24 if accumulate == 1 else 8  # an epoch's ninth step of three batches has one only
    losses, net = bare_loop(spec, order, prepare(str(corpus), "bytes"), steps)
    logged = [line["loss"] for line in read_metrics(RunFolder(tmp_path / "run")) if "loss" in line]
    assert logged[:steps] == pytest.approx(losses, abs=1e-5)  # float32 sums in another order
    if accumulate == 1:
        trained = RunFolder(tmp_path / "run").load_model()
        for mine, theirs in zip(net.parameters(), trained.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
