"""What the tests of the cache share: the layers, what they are given, and reading in chunks."""

import torch

from rfa.dynamics import rotary_frequencies
from rfa.nn import ContentFilterAttention, DotProductAttention, FilterCache, RobustFilterAttention, Yarn, alibi_slopes

from .by_hand import perturb

SIZE, HEADS = 16, 2
DECAY, ROPE = torch.tensor([0.0, 0.3]), rotary_frequencies(HEADS, SIZE // HEADS)
LAYERS = {
    "defaults": lambda: RobustFilterAttention(SIZE, HEADS),
    "horizon": lambda: RobustFilterAttention(SIZE, HEADS, horizon=0.7),
    "horizon, values do not turn": lambda: RobustFilterAttention(SIZE, HEADS, horizon=0.7, rotate_values=False),
    "learned": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, learn_frequency=True, learn_decay=True),
    "query noise in bias": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, query_noise_in_bias=True),
    "no gate": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, gate=False),
    "exponential": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, weight="exponential"),
    "flat": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, prior="flat"),
    "riccati": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, prior="riccati"),
    "clock": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, prior="riccati", clock="content"),
    "clock, horizon": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, horizon=0.7, clock="content"),
    "content": lambda: ContentFilterAttention(SIZE, HEADS),
    "plain": lambda: DotProductAttention(SIZE, HEADS),
    "b1": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE),
    "b2": lambda: DotProductAttention(SIZE, HEADS, slopes=alibi_slopes(HEADS)),
    "b3": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, decay=DECAY),
    "RoPER with decay": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, rotate_values=True, decay=DECAY),
    "clock of RoPE": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, clock="content"),
    "clock of RoPER, gates": lambda: DotProductAttention(
        SIZE, HEADS, frequency=ROPE, rotate_values=True, gates="forget", clock="content"
    ),
    "clock of slopes": lambda: DotProductAttention(
        SIZE, HEADS, frequency=ROPE, slopes=alibi_slopes(HEADS), learn_slopes=True, clock="content"
    ),
    "c7": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, slopes=alibi_slopes(HEADS), innovation=True),
    "learned slopes": lambda: DotProductAttention(SIZE, HEADS, slopes=alibi_slopes(HEADS), learn_slopes=True),
    "window": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, window=3),
    "yarn": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, yarn=Yarn(1000)),  # no text here is as long
    "forget gate": lambda: DotProductAttention(SIZE, HEADS, gates="forget"),
    "gains": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, gates="gain", slopes=alibi_slopes(HEADS)),
    "unit states": lambda: RobustFilterAttention(SIZE, HEADS, prior="riccati", normalise_states=True),
    "unit states of RoPE": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, normalise_states=True),
    "taps": lambda: RobustFilterAttention(SIZE, HEADS, taps=True),
    "taps, clock": lambda: RobustFilterAttention(SIZE, HEADS, prior="riccati", taps=True, clock="content"),
    "taps of RoPER": lambda: DotProductAttention(
        SIZE, HEADS, frequency=ROPE, rotate_values=True, gates="forget", taps=True
    ),
    "output gain": lambda: RobustFilterAttention(SIZE, HEADS, output_gain=True),
    "gates of some heads": lambda: DotProductAttention(
        SIZE, HEADS, frequency=ROPE, gates="forget", clock="content", gated_heads=0.5
    ),
    "logarithmic": lambda: DotProductAttention(SIZE, HEADS, logarithmic=True),
    "gates of channels": lambda: DotProductAttention(SIZE, HEADS, gates="channel"),
    "as released": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, rotary_map="as_released"),
}
UNTURNED = (
    "plain",
    "b2",
    "learned slopes",
    "forget gate",
    "content",
    "logarithmic",
    "gates of channels",
)  # without frequencies, or with phases of their own
IRREGULAR = torch.tensor([0.0, 0.5, 0.7, 2.0, 2.5, 4.0, 7.0, 7.5, 9.0], dtype=torch.float64)
CHUNKS = (4, 1, 1, 2, 1)


def build(name, dtype=torch.float64):
    return perturb(LAYERS[name]()).to(dtype)


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
