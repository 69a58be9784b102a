"""From a configuration to its attention layer."""

import torch
from torch import Tensor

from rfa.dynamics import partitioned_frequencies, rope_frequencies, rotary_frequencies, spectral_decay
from rfa.nn import Attention, DotProductAttention, RobustFilterAttention, Yarn, alibi_slopes
from rfa.nn.dot_product_attention import Gates

from .configuration import RFAConfig

_GATES: dict[str, Gates] = {"forget_gate": "forget", "content_riccati": "gain"}


def build_attention(config: RFAConfig) -> Attention:
    """The layer that `config` describes."""
    heads, frequency, decay = config.num_attention_heads, frequencies(config), decays(config)
    slopes = None
    if config.prior == "alibi" or config.initial_slopes == "alibi":
        with torch.device("cpu" if config.prior == "content_riccati" else torch.get_default_device()):
            slopes = alibi_slopes(heads)  # gains start at its numbers, which a model on "meta" has not
    if slopes is not None and config.initial_slopes == "alibi":  # head 0 is the slowest
        slopes = slopes.sort().values
    if config.score == "dot_product":
        return DotProductAttention(
            config.hidden_size,
            heads,
            frequency=None if config.frequencies == "none" else frequency,
            decay=None if config.decay == "none" else decay,
            slopes=slopes,
            learn_slopes=config.prior == "riccati",
            window=config.train_length if config.prior == "window" else None,
            gates=_GATES.get(config.prior),
            yarn=Yarn(config.train_length, config.frequency_base) if config.frequencies == "yarn" else None,
            rotate_values=config.rotate_values,
            innovation=config.innovation,
            rotary_map="as_released" if config.frequencies == "as_released" else "complex",
            backend=config.backend,
        )
    assert config.prior in ("lyapunov", "riccati", "flat")  # the configuration sees to it
    return RobustFilterAttention(
        config.hidden_size,
        heads,
        frequency=frequency,
        decay=decay,
        weight=config.score,
        prior=config.prior,
        steady_state=config.steady_state,
        slopes=slopes,
        gate=config.gate,
        rotate_values=config.rotate_values,
        innovation=config.innovation,
        query_noise_in_bias=config.query_noise_in_bias,
        horizon=config.horizon,
        learn_frequency=config.learn_frequencies,
        learn_decay=config.learn_decay,
        learn_horizon=config.learn_horizon,
        tie_key_value=config.tie_key_value,
        step=config.step,
        noise=config.noise,
        aggregation=config.aggregation,
        backend=config.backend,
    )


def frequencies(config: RFAConfig) -> Tensor:
    """`(heads, modes)`, radians per token."""
    heads, modes = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.frequencies == "partitioned":
        return partitioned_frequencies(heads, modes, config.frequency_base)
    if config.frequencies == "paired_rope":
        return rope_frequencies(heads, modes, config.frequency_base)
    if config.frequencies == "none":
        return torch.zeros(heads, modes, dtype=torch.float32)
    return rotary_frequencies(heads, modes, config.frequency_base)


def decays(config: RFAConfig) -> Tensor:
    """`(heads,)`, per token: `b` times the fastest frequency of each head's band of the partitioned bank."""
    heads, modes = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.decay == "none":
        return torch.zeros(heads, dtype=torch.float32)
    damping = config.damping
    if config.decay == "length_scaled":
        damping *= 5 / (config.train_length - 1)
    bands = partitioned_frequencies(heads, modes, config.frequency_base)
    return spectral_decay(bands, damping, config.zero_heads)
