"""DDP and FSDP2 on two processes against one process; resuming on three; bfloat16."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from accelerate.utils import send_to_device
from cover import slow
from integrations.hosts import host
from models.small import assert_same, small, tokens
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from parallel.processes import together
from rfa.integrations import replace_attention
from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig
from rfa.models.decoder import RFABlock
from rfa.ops.positions import checked_positions
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


def check_times():
    """Times reach the layers as they are, and so the outputs are those of one process to the digits of the weights."""
    name, ids, times = "x5-content-clock", tokens(1, 200), 1.003 * torch.arange(200.0)
    model = fully_sharded(small(name), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    # bfloat16 weights: 0.04 without times too; times of 8 bits: 0.15
    assert_same(model(ids, times=times).logits.float(), small(name)(ids, times=times).logits, 0.02)


def cast_by_fsdp(model, kinds, cast):
    """PyTorch's own `fully_shard`, which casts what modules are given unless it is told not to."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
    for part in [*filter(lambda part: isinstance(part, kinds), model.modules()), model]:
        fully_shard(part, mp_policy=policy)
    return model


def check_cast_inputs():
    ids, kinds = tokens(2, 400), (RFABlock, LlamaDecoderLayer)
    makers = {name: partial(small, name) for name in ("rfa", "b2-alibi", "c4-fox", *PRESETS, "x6-content-dynamics")}
    makers["llama"] = lambda: replace_attention(host("llama", max_position_embeddings=512, vocab_size=61))
    for name, make in makers.items():
        whole, cast = (cast_by_fsdp(make(), kinds, cast)(ids).logits for cast in (False, True))
        assert torch.equal(whole, cast), name
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "span": 300.0, "channels": 1}
    config = RFATimeSeriesConfig(preset="x5-content-clock", **sizes)
    times, values = 1000 + torch.arange(300), torch.randn(1, 300, 1).bfloat16()
    weights, outputs = RFAForTimeSeries(config).state_dict(), []
    for cast in (False, True):
        series = RFAForTimeSeries(config)
        series.load_state_dict(weights)
        outputs.append(cast_by_fsdp(series, kinds, cast)(times, values).location)
    assert torch.equal(*outputs)
    language = cast_by_fsdp(small("rfa"), kinds, True)
    for call in (lambda x: series(x, values), lambda x: language(ids[:, :300], times=x)):
        with pytest.raises(ValueError, match=r"^times: got dtype torch.bfloat16, .*cast_forward_inputs=False"):
            call(times.float())
    language(ids[:, :300], times=times)  # no policy casts integers


def test_times_are_not_rounded():
    together(check_times, 1)
    together(check_cast_inputs, 1)


def test_positions_move_between_devices():
    """accelerate spreads a model over devices and moves what a block is given."""
    mask, segments = tokens(2, 5) > 0, tokens(2, 5)
    positions = checked_positions(2, 5, 5, torch.device("cpu"), torch.arange(5.0), None, mask, segments)
    moved = send_to_device({"positions": positions}, torch.device("meta"))["positions"]
    for name, given in vars(positions).items():
        for x, y in zip(tree_leaves(given), tree_leaves(getattr(moved, name)), strict=True):
            assert (x.shape, x.dtype, y.is_meta) == (y.shape, y.dtype, True) if torch.is_tensor(x) else x == y, name


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
