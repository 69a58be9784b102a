"""DDP and FSDP2 on two processes against one process; resuming on three; bfloat16."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cover import slow
from models.small import assert_same, small, tokens
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from parallel.processes import together
from rfa.parallel import fully_sharded
from rfa_lab.training.trainer import make_optimizer

BATCH = 6  # a whole number of sequences for one, two and three processes
PRESETS = ("x3-rotation-riccati", "x5-content-clock")


def train(model, optimizer, steps, rank=0, number=1):
    for step in steps:
        ids = tokens(BATCH, seed=step)[rank * BATCH // number : (rank + 1) * BATCH // number]
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def alone(name, steps):
    model = small(name)
    train(model, make_optimizer(model, 1e-3), steps)
    return model


def same(model, expected):
    theirs = dict(expected.named_parameters())
    for name, mine in model.named_parameters():
        # 1e-3 a step: Adam divides by the root of small squares, which enlarges their rounding
        assert_same(mine.full_tensor() if isinstance(mine, DTensor) else mine, theirs[name], 2e-5)


def check_ddp():
    ranks = dist.get_rank(), dist.get_world_size()
    for name in PRESETS:
        model = small(name)
        train(DistributedDataParallel(model), make_optimizer(model, 1e-3), range(2), *ranks)
        same(model, alone(name, range(2)))


def check_begun(folder):
    rank, number = dist.get_rank(), dist.get_world_size()
    for name in PRESETS:
        model = fully_sharded(small(name))
        optimizer = make_optimizer(model, 1e-3)
        train(model, optimizer, range(2), rank, number)
        same(model, alone(name, range(2)))
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:  # as the page on scaling saves a divided model
            model.save_pretrained(f"{folder}/{name}-whole", state_dict=whole)
            same(AutoModelForCausalLM.from_pretrained(f"{folder}/{name}-whole"), alone(name, range(2)))
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{name}")


def check_resumed(folder):
    rank, number = dist.get_rank(), dist.get_world_size()
    for name in PRESETS:
        model = fully_sharded(small(name, seed=1))
        optimizer = make_optimizer(model, 1e-3)
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        train(model, optimizer, range(2, 4), rank, number)
        same(model, alone(name, range(4)))


def check_half():
    ids = tokens()
    for name in ("m2-sc-rfa", *PRESETS):
        reference = small(name)
        model = fully_sharded(small(name), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        seen = []
        model.model.layers[0].attention.dynamics.register_forward_hook(lambda m, a, out: seen.append(out))  # noqa: B023
        logits = model(ids, labels=ids).logits
        assert logits.dtype == torch.bfloat16
        expected = reference.model.layers[0].attention.dynamics()
        for number in ("process_noise", "decay", "frequency"):
            torch.testing.assert_close(seen[0][number], expected[number], rtol=0, atol=0)
        assert_same(logits.float(), reference(ids).logits, 0.05)  # bfloat16: 8 bits through two blocks
        model(ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match="mp_policy: got"):
        fully_sharded(small("b1-rope", learn_frequencies=True), mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def check_times():
    """Times reach the layers as they are, and so the outputs are those of one process to the digits of the weights."""
    name, ids, times = "x5-content-clock", tokens(1, 200), 1.003 * torch.arange(200.0)
    model = fully_sharded(small(name), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    # bfloat16 weights: 0.04 without times too; times of 8 bits: 0.15
    assert_same(model(ids, times=times).logits.float(), small(name)(ids, times=times).logits, 0.02)


def test_times_are_not_rounded():
    together(check_times, 1)


@slow
def test_ddp():
    together(check_ddp, 2)


@slow
def test_fsdp_and_resume(tmp_path):
    together(check_begun, 2, str(tmp_path))
    together(check_resumed, 3, str(tmp_path))


@slow
def test_half():
    together(check_half, 2)
