"""What the tests of the layers share: one table of all of them, what they are given, and reading in chunks."""

import torch
from cover import ALL

from rfa.dynamics import rotary_frequencies
from rfa.nn import ContentFilterAttention, DotProductAttention, FilterCache, RobustFilterAttention, alibi_slopes

from .by_hand import perturb

SIZE, HEADS, MODES = 16, 2, 8
DECAY, ROPE = torch.tensor([0.0, 0.3]), rotary_frequencies(HEADS, MODES)
SLOPES = alibi_slopes(HEADS)
M2 = {"prior": "lyapunov", "innovation": True}  # the paper's layer
FILTERS = {
    "defaults": {},
    "m2": M2,
    "horizon": {"horizon": 0.7},
    "horizon, values do not turn": {**M2, "horizon": 0.7, "rotate_values": False},
    "learned": {**M2, "decay": DECAY, "learn_frequencies": True, "learn_decay": True},
    "query noise in bias": {**M2, "decay": DECAY, "query_noise_in_bias": True},
    "no gate": {**M2, "decay": DECAY, "gate": False},
    "exponential": {**M2, "decay": DECAY, "weight": "exponential"},
    "flat": {"decay": DECAY, "prior": "flat"},
    "algorithm 1": {**M2, "process_noise_as": "steady_state", "learn_noise_floor": True},
    "riccati": {"decay": DECAY, "initial_slopes": None, "innovation": True},
    "clock": {"decay": DECAY, "clock": "content"},
    "clock, horizon": {**M2, "decay": DECAY, "horizon": 0.7, "learn_horizon": True, "clock": "content"},
    "unit states": {"normalise_states": True},
}
BOTH_DECAY = torch.tensor([0.1, 0.4])
EXTENSIONS = {
    "tied": {"tie_key_value": True},
    "precision": {**M2, "step": "precision"},
    "precision with horizon": {**M2, "step": "precision", "horizon": 0.7},
    "noise": {**M2, "noise": "time_dependent"},
    "routing": {**M2, "aggregation": "routing"},
    "all that go together": {**M2, "tie_key_value": True, "step": "precision", "noise": "time_dependent"},
    "routing with the others": {
        **M2,
        "aggregation": "routing",
        "tie_key_value": True,
        "noise": "time_dependent",
        "source_prior": "exponential",
        "rotate_values": False,
    },
}
PRODUCTS = {
    "plain": {},
    "b1": {"frequency": ROPE},
    "b2": {"slopes": SLOPES},
    "b3": {"frequency": ROPE, "decay": DECAY},
    "RoPER with decay": {"frequency": ROPE, "rotate_values": True, "decay": DECAY},
    "clock of RoPER, gates": {"frequency": ROPE, "rotate_values": True, "gates": "forget", "clock": "content"},
    "clock of slopes": {"frequency": ROPE, "slopes": SLOPES, "learn_slopes": True, "clock": "content"},
    "c7": {"frequency": ROPE, "slopes": SLOPES, "innovation": True},
    "learned slopes": {"slopes": SLOPES, "learn_slopes": True},
    "forget gate": {"gates": "forget"},
    "gains": {"frequency": ROPE, "gates": "gain", "slopes": SLOPES},
    "gates and clock": {"frequency": ROPE, "gates": "forget", "clock": "content"},
    "as released": {"frequency": ROPE, "rotary_map": "as_released"},
}
LAYERS = {name: (RobustFilterAttention, options) for name, options in FILTERS.items()}
LAYERS |= {name: (RobustFilterAttention, {"decay": BOTH_DECAY, **options}) for name, options in EXTENSIONS.items()}
LAYERS |= {name: (DotProductAttention, options) for name, options in PRODUCTS.items()}
LAYERS["content"] = (ContentFilterAttention, {})
# one for each way through the code
WAYS = ["defaults", "m2", "learned", "exponential", "clock, horizon", "unit states", "precision", "noise"]
WAYS += ["routing with the others", "b3", "clock of slopes", "forget gate", "gains", "as released", "content"]
WAYS = list(LAYERS) if ALL else WAYS
IRREGULAR = torch.tensor([0.0, 0.5, 0.7, 2.0, 2.5, 4.0, 7.0, 7.5, 9.0], dtype=torch.float64)
CHUNKS = (4, 1, 1, 2, 1)


def build(name, dtype=torch.float64, **more):
    kind, options = LAYERS[name]
    return perturb(kind(SIZE, HEADS, **options, **more)).to(dtype)


def read(layer, x, chunks=CHUNKS, cache=None, start=0, **given):
    """The layer's output in chunks; what is given of all keys is given of those so far."""
    cache, outputs = FilterCache() if cache is None else cache, []
    for length in chunks:
        end = start + length
        so_far = {name: value[..., :end] for name, value in given.items()}
        outputs.append(layer(x[:, start:end], past_key_values=cache, **so_far))
        start = end
    return torch.cat(outputs, 1), cache


def mask_of_left_padding(*padding, length=9):
    return torch.arange(length) >= torch.tensor(padding)[:, None]


# what the layer is given beside the tokens; padding's outputs are not compared
SITUATIONS = {
    "default times": {},
    "irregular": {"times": IRREGULAR},
    "each row its own": {"times": torch.stack([IRREGULAR, 3 * IRREGULAR + 2])},
    "far-off seconds": {"times": 1e9 + IRREGULAR},
    "nanoseconds since 1970": {"times": 1_700_000_000_000_000_000 + (10 * IRREGULAR).long() * torch.tensor([[1], [2]])},
    "left padding": {"key_mask": mask_of_left_padding(0, 3)},
    "padding longer than a chunk": {"key_mask": mask_of_left_padding(5, 6)},
    "a gap": {"key_mask": torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1], [1] * 9]).bool()},
    "padding with times": {
        "key_mask": mask_of_left_padding(2, 0),
        "times": torch.stack([torch.cat([torch.full((2,), -1e6), IRREGULAR[:7]]), IRREGULAR]),
    },
    "segments": {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [4, 4, 4, 4, 4, 2, 2, 7, 7]])},
    "segments that each start at 0": {
        "segment_ids": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]]).repeat(2, 1),
        "times": torch.cat([IRREGULAR[:5], IRREGULAR[:4]]),
    },
}


# Changes of a cache's rows, and the two rows of the batch that each leaves
ROWS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    "grow": (lambda cache: cache.reorder_cache(torch.tensor([1, 0, 0])), [1, 0, 0]),
    "shrink": (lambda cache: cache.reorder_cache(torch.tensor([1])), [1]),
}
