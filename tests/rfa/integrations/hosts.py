"""Small decoders of transformers with random weights."""

import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8}
_ENDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
NAMES = ("llama", "qwen2", "qwen3", "gpt2")


def host(name, **fields):
    """A model in evaluation mode whose attention is far from uniform."""
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        model = GPT2LMHeadModel(GPT2Config(**sizes | _ENDS | fields))
    else:
        kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
        kinds["qwen3"] = (Qwen3Config, Qwen3ForCausalLM)
        config, kind = kinds[name]
        model = kind(config(**_SIZES | _ENDS | fields))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6.0)  # transformers starts at a deviation of 0.02, where every key weighs the same
    return model.eval()


def tokens(batch=2, length=9, seed=1):
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, **options})


def padded(ids, by):
    """Left padding of the first row, and the mask."""
    mask = torch.ones(len(ids), ids.shape[1] + by, dtype=torch.long)
    mask[0, :by] = 0
    longer = torch.nn.functional.pad(ids, (by, 0))
    longer[1:, :by] = tokens(1, by, seed=5)
    return longer, mask


def assert_generation_is_consistent(model):
    """Whole, in chunks with a cache, without one, and padded on the left: the same.

    Returns:
        The logits of `tokens()`.
    """
    ids = tokens()
    with torch.no_grad():
        logits, cache = model(ids).logits, DynamicCache(config=model.config)
        parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=1e-4, atol=1e-4)  # float32, other orders of sums
    first = generate(model, ids)
    assert torch.equal(first, generate(model, ids, use_cache=False))
    longer, mask = padded(ids, 3)
    beside = generate(model, longer, attention_mask=mask)
    assert torch.equal(beside[0, 3:], first[0])
    assert torch.equal(beside[1:], generate(model, longer[1:]))
    return logits
