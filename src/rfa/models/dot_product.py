"""The configuration of baselines and controls: dot-product attention with a term of the lag."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rfa.checks import require
from rfa.nn import Attention, DotProductAttention, alibi_slopes
from rfa.nn.dot_product_attention import Gates, ascending_slopes
from rfa.nn.projections import Clock

from .attention import AttentionConfig, DecayRates, FrequencyBank

_ROPE, _NO_DECAY = FrequencyBank(kind="rope"), DecayRates(kind="none", zero_heads=0)


class LagTerm(NamedTuple):
    """The arguments that a prior gives the layer. The rules of the configuration follow from them."""

    slopes: Callable[[int], Tensor] | None = None  # makes the initial slopes of a number of heads
    learn_slopes: bool = False
    gates: Gates | None = None


# the only list of the priors of dot products
PRIORS = {
    "flat": LagTerm(),
    "alibi": LagTerm(slopes=alibi_slopes),
    "forget_gate": LagTerm(gates="forget"),
    "riccati": LagTerm(slopes=ascending_slopes, learn_slopes=True),
    "content_riccati": LagTerm(slopes=ascending_slopes, gates="gain"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotProductAttentionConfig(AttentionConfig):
    """Dot-product attention. The defaults are `b1-rope`.

    Args:
        prior: the term of the lag in the score: "flat", "alibi",
            "forget_gate" (the Forgetting Transformer's gates of the tokens in between),
            "riccati" (slopes from learned noises, without decay), or
            "content_riccati" (Kalman gains that depend on the content, without decay).
            Both Riccati priors start at ALiBi's slopes.
        clock: "times", the given times; or "content": each token says how fast the time of each head passes until the
            next token. Rotation, slopes and decay follow that clock.
        frequencies, decay, rotate_values, innovation, normalise_states, certified, backend: as in `AttentionConfig`.
            Decays multiply the weights after the softmax.

    Raises:
        ValueError: if values do not fit together.
    """

    kind: ClassVar[str] = "dot_product"
    layer: ClassVar[type[Attention]] = DotProductAttention

    frequencies: FrequencyBank = _ROPE
    decay: DecayRates = _NO_DECAY
    rotate_values: bool = False
    innovation: bool = False
    prior: str = "flat"
    clock: Clock = "times"

    def check_rules(self) -> None:
        """Raise `ValueError` for an unknown prior, a prior that has no decay, or a clock without an effect."""
        require(self.prior in PRIORS, "prior", self.prior, f"one of {', '.join(map(repr, PRIORS))}")
        sloped = self.term.slopes is not None and self.term.gates is None  # gates are of tokens, and not of the lag
        lag = self.frequencies.kind != "none" or self.decay.kind != "none" or sloped
        require(lag or self.clock == "times", "clock", self.clock, "'times' where nothing depends on the lag")
        decays = self.prior not in ("riccati", "content_riccati")  # noises let old states fade as decay does
        alone = decays or self.decay.kind == "none"
        require(alone, "decay", self.decay.kind, f"'none' for dot products with prior={self.prior!r}")

    @property
    def term(self) -> LagTerm:
        """The arguments that the prior gives the layer."""
        return PRIORS[self.prior]

    def is_relative(self) -> bool:
        """Whether scores depend on differences of times alone. Not with the map of the paper's code."""
        return self.frequencies.kind != "as_released"

    def has_sde_parameters(self) -> bool:
        """Whether the layer has parameters of the SDE. Only learned slopes are such parameters."""
        return self.term.learn_slopes

    def arguments(self, hidden_size: int, heads: int, train_length: int) -> dict[str, Any]:
        """The arguments of the layer. None where there are no frequencies, no decay or no slopes."""
        given, kind, term = super().arguments(hidden_size, heads, train_length), self.frequencies.kind, self.term
        del given["prior"]
        # gates start at the numbers of the slopes, and tensors on "meta" have no numbers
        with torch.device("cpu") if term.gates else nullcontext():
            slopes = None if term.slopes is None else term.slopes(heads)
        return {
            **given,
            "frequency": None if kind == "none" else given["frequency"],
            "decay": None if self.decay.kind == "none" else given["decay"],
            "slopes": slopes,
            "learn_slopes": term.learn_slopes,
            "gates": term.gates,
            "rotary_map": "as_released" if kind == "as_released" else "complex",
        }
