"""The decoder by hand: blocks, loss, tied head, initialisation, gradient checkpointing."""

from contextlib import nullcontext

import pytest
import torch
from cover import cover

import rfa.nn.cache

from .small import EXACT, ONE_OF_EACH, SIZES, assert_same, small, tokens


@pytest.mark.parametrize("ignored", [False, True])
def test_loss_shifts_inside(ignored):
    model, ids = small("m2-sc-rfa"), tokens()
    labels = ids.clone()
    if ignored:
        labels[0, 2:5], labels[1, 0], labels[1, 8] = -100, -100, -100
    output = model(ids, labels=labels)
    log_p = output.logits.detach().double().log_softmax(-1)
    scored = [(b, t) for b in range(2) for t in range(8) if labels[b, t + 1] != -100]
    expected = -sum(float(log_p[b, t, labels[b, t + 1]]) for b, t in scored) / len(scored)
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(output.logits, model(ids).logits)
    summed = model(ids, labels=labels, num_items_in_batch=50).loss
    assert summed.item() == pytest.approx(expected * len(scored) / 50, rel=1e-5)
    as_tensor = model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    assert as_tensor.item() == pytest.approx(summed.item(), rel=1e-6)


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 4])], ids=str)
def test_logits_to_keep(kept):
    model, ids = small("m2-sc-rfa"), tokens()
    whole = model(ids).logits
    expected = whole[:, -kept:] if isinstance(kept, int) else whole[:, kept]
    assert_same(model(ids, logits_to_keep=kept).logits, expected)


def test_the_decoder_by_hand():
    """Embedding, linear, pre-norm blocks, norm, linear, tied head with bias."""
    model, ids = small("b1-rope", dtype=torch.float64), tokens()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    p = model.state_dict()

    def linear(x, at):
        return x @ p[f"{at}.weight"].T + p[f"{at}.bias"]

    def norm(x, at):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * p[f"{at}.weight"] + p[f"{at}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))

    x = linear(p["model.embed_tokens.weight"][ids], "model.input_projection")
    for index, layer in enumerate(model.model.layers):
        at = f"model.layers.{index}"
        x = x + layer.attention(norm(x, f"{at}.attention_norm"))
        inner = gelu(linear(norm(x, f"{at}.feed_forward_norm"), f"{at}.feed_forward.0"))
        x = x + linear(inner, f"{at}.feed_forward.2")
    x = linear(norm(x, "model.norm"), "model.output_projection")
    expected = x @ p["model.embed_tokens.weight"].T + p["lm_head.bias"]
    assert_same(model(ids).logits, expected, EXACT)


def gradients(model):
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@cover(1, name=["b1-rope", "m2-sc-rfa", "x1-riccati"], reentrant=[False, True])
def test_gradient_checkpointing_gives_the_same_gradients(name, reentrant):
    model = small(name).train()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    for path, gradient in gradients(model).items():
        assert_same(gradient, plain[path])


def test_initialisation_outside_attention():
    """Linear layers keep variance, the embedding as a head too; norms are at one and zero, biases at zero."""
    model = small("m2-sc-rfa", hidden_size=128, vocab_size=1000)
    for path, parameter in model.named_parameters():
        if path.endswith("norm.weight"):
            assert (parameter == 1).all(), path
        elif path.endswith("bias"):
            assert not parameter.any(), path
        elif "attention." not in path:
            # tokens enter the stream with unit variance; all others have their input size last;
            # of 16,384 numbers, the deviation of a standard deviation is 0.6 %
            expected = 1.0 if "input_projection" in path else parameter.shape[-1] ** -0.5
            assert parameter.std().item() == pytest.approx(expected, rel=0.04), path


@pytest.mark.parametrize(("name", "learned"), [("x3-rotation-riccati", 2), ("x6-content-dynamics", 4)])
def test_noises_are_learned_as_dynamics(name, learned):
    """Slopes are noises. The map from the content to dynamics is a projection, and learns as one."""
    model = small(name)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    found = [names[id(parameter)].rsplit(".", 1)[1] for parameter in model.sde_parameters()]
    assert len(found) == learned * SIZES["num_hidden_layers"]
    assert all(key.startswith("raw_") for key in found)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_step_never_waits_for_its_device(name, monkeypatch):
    """Tensors without data raise where one is read: each such place would hold up a GPU, in every layer and step."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which has no meta device
    model, ids = small(name).to("meta"), tokens().to("meta")
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_tokens_are_located_once_a_forward_pass(monkeypatch):
    """Not once a layer: each time a GPU would have to finish its work first."""
    calls, original = [], rfa.nn.cache.checked_positions
    monkeypatch.setattr(rfa.nn.cache, "checked_positions", lambda *given: calls.append(1) or original(*given))
    model, ids = small("m2-sc-rfa"), tokens()
    with torch.no_grad():
        first = model(ids[:, :4], use_cache=True, times=torch.arange(4.0))
        model(ids[:, 4:], past_key_values=first.past_key_values, times=torch.arange(1.0 * ids.shape[1]))
    model(ids, times=torch.arange(1.0 * ids.shape[1]), segment_ids=torch.zeros_like(ids))
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["b1-rope", "m2-sc-rfa"])
def test_autocast_leaves_the_residual_stream_as_it_is(name):
    with torch.autocast("cpu", torch.bfloat16):
        states = small(name)(tokens(), output_hidden_states=True).hidden_states
    assert [state.dtype for state in states[:-1]] == [torch.float32] * (len(states) - 1)  # the last one is projected
