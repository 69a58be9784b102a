"""Heads on two processes against the model in one: outputs, gradients, a step, decoding; sizes that do not divide."""

import pytest
import torch
import torch.distributed as dist
from cover import ALL
from models.small import PATHS, assert_same, small, tokens
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from parallel.processes import together
from rfa.parallel import tensor_parallel
from rfa_lab.training.trainer import make_optimizer


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def held(model):
    return sum((x.to_local() if isinstance(x, DTensor) else x).numel() for x in model.model.layers.parameters())


def check_presets(names):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = tokens()
    for name in names.split():
        alone, divided = small(name), small(name)
        tensor_parallel(divided, mesh)
        assert held(divided) < 0.51 * held(alone) + 2 * 6 * 32, name  # norms and two biases of 32 stay whole
        logits = []
        for model in (alone, divided):
            with CommDebugMode() as sent:
                result = model(ids, labels=ids)
                result.loss.backward()
            logits.append(result.logits)
        assert sent.get_total_counts() == 2 * 4, (name, sent.get_comm_counts())  # as the page on scaling counts
        assert_same(logits[1], logits[0])
        expected = {n: p.grad for n, p in alone.named_parameters()}
        for parameter, mine in divided.named_parameters():
            assert_same(whole(mine.grad), expected[parameter])
        assert_same(divided(ids[:, :5]).logits, alone(ids[:, :5]).logits)


def check_steps():
    """With the protocol's optimiser, whose groups hold both whole and cut parameters."""
    mesh, ids = init_device_mesh("cpu", (dist.get_world_size(),)), tokens()
    alone, divided = small("x3-rotation-riccati"), small("x3-rotation-riccati")
    tensor_parallel(divided, mesh)
    for model in (alone, divided):
        optimizer = make_optimizer(model, 1e-3)
        for _ in range(2):
            with implicit_replication():
                model(ids, labels=ids).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    expected = dict(alone.named_parameters())
    for name, mine in divided.named_parameters():
        assert_same(whole(mine), expected[name], 1e-4)
    generated = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (alone, divided)]
    torch.testing.assert_close(*generated)


def check_saved(folder):
    """As the page on scaling saves a divided model."""
    ids, mesh = tokens(), init_device_mesh("cpu", (dist.get_world_size(),))
    alone, divided = small("m2-sc-rfa"), tensor_parallel(small("m2-sc-rfa"), mesh)
    weights = get_model_state_dict(divided, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        divided.save_pretrained(folder, state_dict=weights)
        assert_same(type(alone).from_pretrained(folder)(ids).logits, alone(ids).logits, 0.0)


def check_refused():
    model = tensor_parallel(small("m2-sc-rfa"), init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ValueError, match="output_attentions: got True, expected False with tensor parallel"):
        model(tokens(), output_attentions=True)


def check_sizes():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for message, sizes in (
        ("num_attention_heads: got 3, expected a multiple of the 2", {"num_attention_heads": 3, "hidden_size": 24}),
        ("num_key_value_heads: got 1, expected", {"num_key_value_heads": 1}),
        ("intermediate_size: got 33, expected", {"intermediate_size": 33}),
    ):
        with pytest.raises(ValueError, match=message):
            tensor_parallel(small("m2-sc-rfa", **sizes), mesh)
    with pytest.raises(ValueError, match="mesh: got '2 dimensions'"):
        tensor_parallel(small("m2-sc-rfa"), init_device_mesh("cpu", (1, dist.get_world_size())))


def check_all(names, folder):
    check_presets(names)
    check_steps()
    check_saved(folder)
    check_refused()
    check_sizes()


def test_two_processes_share_the_heads(tmp_path):
    names = PATHS if ALL else ["c4-fox", "m2-sc-rfa", "x1-riccati", "x6-content-dynamics"]
    together(check_all, 2, " ".join(names), str(tmp_path))
