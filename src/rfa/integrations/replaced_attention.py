"""Robust filter attention in the place of a decoder's own attention, with the decoder's projections and its cache."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices

from rfa.checks import require
from rfa.dynamics import rotation_of_heads, turn
from rfa.nn import HeadDynamics
from rfa.nn.dynamics import KEY_NOISE, NOISE_FLOOR, QUERY_NOISE, ROBUSTNESS
from rfa.nn.projections import merge_heads
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import Positions, checked_positions
from rfa.ops.prior import DecodingCache
from rfa.ops.problem import Options, Parameters, Prior, Problem, Weight

from .masks import Mask, TokenFlags, read_mask


class Host(NamedTuple):
    """How an attention class of transformers makes its states and its output. Functions take the module.

    Fields:
        states: hidden states to query, key and value, `(batch, length, heads, channels)`.
        output: the last map, from all heads together to hidden states.
        dropout: the share of the weights that training drops.
    """

    states: Callable[[Any, Tensor], Iterator[Tensor]]
    output: Callable[[Any, Tensor], Tensor]
    dropout: Callable[[Any], float]


def _apart(module: Any, hidden_states: Tensor) -> Iterator[Tensor]:
    for name in "qkv":
        states = getattr(module, f"{name}_proj")(hidden_states).unflatten(-1, (-1, module.head_dim))
        yield getattr(module, f"{name}_norm", nn.Identity())(states)  # Qwen3 has norms of queries and keys


def _together(module: Any, hidden_states: Tensor) -> Iterator[Tensor]:
    for states in module.c_attn(hidden_states).chunk(3, dim=-1):
        yield states.unflatten(-1, (-1, module.head_dim))


_LLAMA = Host(_apart, lambda module, states: module.o_proj(states), lambda module: module.attention_dropout)
_GPT2 = Host(
    _together,
    lambda module, states: module.resid_dropout(module.c_proj(states)),
    lambda module: module.attn_dropout.p,
)
HOSTS = {"LlamaAttention": _LLAMA, "Qwen2Attention": _LLAMA, "Qwen3Attention": _LLAMA, "GPT2Attention": _GPT2}


def first_temperature(scaling: float, modes: int, weight: Weight) -> float:
    """beta_s of a replaced layer before training.

    Near a residual of 0 a score then grows with `q.k` as that of the dot product does, by `scaling`:
    `beta_s = scaling nu_s d (Sigma + gamma^2) / 2`, divided by `nu_s + 1` with Student-t weights.
    """
    variance = KEY_NOISE + NOISE_FLOOR + QUERY_NOISE
    exponent = ROBUSTNESS + 1 if weight == "student_t" else 1.0
    return scaling * ROBUSTNESS * modes * variance / (2 * exponent)


class ReplacedAttention(nn.Module):
    """The operator between the projections of an attention module of transformers, which keep their names and weights.

    A head of `2 d` channels holds d complex modes: the first half of the channels is real, the second imaginary, which
    is the pairing of RoPE. A cache of transformers holds keys and values turned into the common frame. Its heads are
    those of the keys, so shared keys and values stay shared. Times are places in the cache: 0, 1, 2, ...

    Args:
        module: the attention module, of a class in `HOSTS`.
        frequency: `(key heads, modes)`, radians per token. Heads that share keys share frequencies.
        decay: `(heads,)`, per token.
        weight, prior, rotate_values, innovation, learn_decay, backend: as in `rfa.nn.RobustFilterAttention`.
    """

    def __init__(
        self,
        module: nn.Module,
        frequency: Float[Tensor, "groups modes"],
        decay: Float[Tensor, " heads"],
        *,
        weight: Weight,
        prior: Prior,
        rotate_values: bool,
        innovation: bool,
        learn_decay: bool,
        backend: str,
    ):
        super().__init__()
        host: Any = module
        self.host = HOSTS[type(module).__name__]
        for name, child in module.named_children():
            self.add_module(name, child)
        self.layer_idx, self.head_dim, self.is_causal = host.layer_idx, host.head_dim, True
        self.dropout, self.backend = self.host.dropout(module), backend
        self.share = len(decay) // len(frequency)
        self.rotate_values, self.innovation = rotate_values, innovation
        self.dynamics = HeadDynamics(
            frequency.repeat_interleave(self.share, 0), decay, prior=prior, learn_decay=learn_decay
        )
        start = torch.full_like(decay, first_temperature(host.scaling, frequency.shape[1], weight))
        self.dynamics.hold("inverse_temperature", start)
        self.options = Options(
            causal=True,
            weight=weight,
            rotate_values=False,  # by the layer itself, before states enter the cache
            prior=prior,
            gate=True,
            query_noise_in_bias=False,
            log_precision=False,
            in_frame=True,
        )
        self.dynamics.to(next(module.parameters()).device)
        self.train(module.training)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        past_key_values: Cache | None = None,
        attention_mask: Mask | None = None,
        position_ids: Int[Tensor, "b length"] | None = None,
        output_attentions: bool | None = False,
        **kwargs: object,
    ) -> tuple[Float[Tensor, "batch length hidden"], None]:
        """What the attention module returns: its output, and None in the place of weights.

        Args:
            hidden_states: the tokens, already normalised.
            past_key_values: any cache of transformers that keeps all keys; this call extends it. Parameters may change
                only while it is empty.
            attention_mask: as the model makes it, see `read_mask`.
            position_ids: where they start again, a packed sequence begins. Not read after a mask or cached tokens.
            output_attentions: refused; the fused operator has no weights.
            kwargs: what else the model passes, as the cosines of its own rotation: not used.

        Raises:
            ValueError: for a mask that is not causal with padding or packed sequences, or if weights are asked for.
        """
        require(not output_attentions, "output_attentions", output_attentions, "False: the operator keeps no weights")
        batch, queries, _ = hidden_states.shape
        query, key, value = (states.transpose(1, 2) for states in self.host.states(self, hidden_states))
        cached = 0 if past_key_values is None else int(past_key_values.get_seq_length(self.layer_idx))
        dynamics = self.dynamics()
        of_keys = self._phases(dynamics["frequency"][:: self.share], cached, queries)
        of_queries = tuple(self._of_all_heads(phases) for phases in of_keys)
        own = value
        query, key = _turned_back(query, of_queries), _turned_back(key, of_keys)
        if self.rotate_values:
            value = _turned_back(value, of_keys)
        tables = None
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
            key, value = key[:, :, : cached + queries], value[:, :, : cached + queries]  # the rest is not filled yet
            tables = _tables(past_key_values.layers[self.layer_idx], new=not cached)
        flags = read_mask(attention_mask, batch, queries, cached + queries)
        if flags == (None, None) and not cached and position_ids is not None:
            flags = TokenFlags(None, find_packed_sequence_indices(position_ids.expand(batch, -1)))
        positions = self._positions(query, cached, flags)
        options = self.options._replace(dropout=self.dropout) if self.training and self.dropout else self.options
        estimate = located_filter_attention(
            query,
            self._of_all_heads(key),
            self._of_all_heads(value),
            Problem(Parameters(**dynamics), positions, options),
            cache=tables,
            backend=self.backend,
        )
        assert isinstance(estimate, Tensor)
        if self.rotate_values:
            estimate = turn(estimate, *of_queries)
        if self.innovation:
            estimate = estimate - self._of_all_heads(own)
        return self.host.output(self, merge_heads(estimate)), None

    def _of_all_heads(self, states: Tensor) -> Tensor:
        """States of the heads of keys, for each head that shares them."""
        return states if self.share == 1 else states.repeat_interleave(self.share, 1)

    @staticmethod
    def _phases(frequency: Tensor, cached: int, length: int) -> tuple[Tensor, Tensor]:
        times = torch.arange(cached, cached + length, device=frequency.device)
        cos, sin = rotation_of_heads(frequency, times[None, None])
        return cos, sin

    @staticmethod
    def _positions(query: Tensor, cached: int, flags: TokenFlags) -> Positions:
        batch, _, queries, _ = query.shape
        return checked_positions(batch, queries, cached + queries, query.device, None, None, *flags)


def _tables(layer: Any, new: bool) -> DecodingCache:
    """The tables of lags that stay with a layer of a cache, without which each token would make them again."""
    if new or not hasattr(layer, "rfa_tables"):
        layer.rfa_tables = DecodingCache()
    return layer.rfa_tables


def _turned_back(states: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
    """Into the common frame."""
    cos, sin = phases
    return turn(states, cos, -sin)
