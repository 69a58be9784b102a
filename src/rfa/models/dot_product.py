"""The configuration of baselines and controls: dot-product attention with a term of the lag."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rfa.checks import require
from rfa.nn import Attention, DotProductAttention, Yarn, alibi_slopes
from rfa.nn.checks import check_channel_gates, check_turned_values
from rfa.nn.dot_product_attention import Gates
from rfa.nn.state_options import Clock

from .attention import AttentionConfig, DecayRates, FrequencyBank

_GATES: dict[str, Gates] = {
    "forget_gate": "forget",
    "alibi_gate": "forget",
    "channel_gate": "channel",
    "content_riccati": "gain",
}
_ROPE, _NO_DECAY = FrequencyBank(kind="rope"), DecayRates(kind="none", zero_heads=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotProductAttentionConfig(AttentionConfig):
    """Dot-product attention. The defaults are `b1-rope`.

    Args:
        prior: the term of the lag in the score: "flat", "alibi", "kerple" (a learned logarithmic bias), "window" (keys
            farther than the training length are invisible), "forget_gate" (the Forgetting Transformer's gates of the
            tokens in between), "alibi_gate" (the same, started at ALiBi's slopes), "channel_gate" (the same for each
            channel, without rotation and decay, dense), "riccati" (slopes from learned noises, without decay), or
            "content_riccati" (Kalman gains that depend on the content, without decay). Both Riccati priors start at
            ALiBi's slopes.
        learn_frequencies: train the frequencies, which are fixed by default.
        clock: "times", the given times; or "content": each token says how fast the time of each head passes until the
            next token. Rotation, slopes and decay follow that clock.
        sink: a key of score 0 and value 0 takes part in each softmax.
        gated_heads: share of the heads that have forget gates or such a clock, the last ones. The others have none.
        frequencies, decay, rotate_values, innovation, normalise_states, taps, output_gain, backend: as in
            `AttentionConfig`. Decays multiply the weights after the softmax.

    Raises:
        ValueError: if values do not fit together.
    """

    kind: ClassVar[str] = "dot_product"
    chosen_by: ClassVar[Mapping[str, str]] = {"score": "dot_product"}
    layer: ClassVar[type[Attention]] = DotProductAttention

    frequencies: FrequencyBank = _ROPE
    decay: DecayRates = _NO_DECAY
    rotate_values: bool = False
    innovation: bool = False
    prior: Literal[
        "flat",
        "alibi",
        "kerple",
        "window",
        "forget_gate",
        "alibi_gate",
        "channel_gate",
        "riccati",
        "content_riccati",
    ] = "flat"
    learn_frequencies: bool = False
    sink: bool = False
    clock: Clock = "times"
    gated_heads: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        still = self.frequencies.kind == "none" and self.decay.kind == "none"
        lag = not still or self.prior in ("alibi", "riccati", "kerple")
        require(lag or self.clock == "times", "clock", self.clock, "'times' where nothing depends on the lag")
        free = self.prior not in ("content_riccati", "channel_gate") or self.gated_heads == 1
        require(free, "gated_heads", self.gated_heads, f"1 with prior={self.prior!r}")
        if self.prior == "channel_gate":
            check_channel_gates(still and self.clock == "times", self.backend)
        alone = self.prior not in ("riccati", "content_riccati", "window") or self.decay.kind == "none"
        require(alone, "decay", self.decay.kind, f"'none' for dot products with prior={self.prior!r}")
        require(self.prior != "window" or not self.rotate_values, "rotate_values", True, "False with prior='window'")
        turns = self.frequencies.kind not in ("none", "as_released", "yarn")
        require(turns or not self.learn_frequencies, "learn_frequencies", True, "frequencies that turn states with it")
        check_turned_values(self.rotate_values, turns)
        self.check_slow_modes(self.learn_frequencies)
        free = self.prior != "window" and self.frequencies.kind not in ("as_released", "yarn")
        sinks = free and self.prior != "channel_gate"
        require(sinks or not self.sink, "sink", True, "False with a window, YaRN, channel gates or the released map")
        require(free or self.clock == "times", "clock", self.clock, "'times' with a window, YaRN or the released map")

    def without_effect(self) -> set[str]:
        """Flat names of the fields without effect. There are gated heads with gates or a clock only."""
        gated = self.clock == "content" or self.prior in ("forget_gate", "alibi_gate")
        return super().without_effect() | (set() if gated else {"gated_heads"})

    def is_relative(self) -> bool:
        """Whether scores depend on differences of times alone. Not with the map of the paper's code."""
        return self.frequencies.kind != "as_released"

    def has_sde_parameters(self) -> bool:
        """Whether the layer has parameters of the SDE. Only learned slopes are such parameters."""
        return self.prior == "riccati"

    def arguments(self, hidden_size: int, heads: int, train_length: int) -> dict[str, Any]:
        """The arguments of the layer. None where there are no frequencies, no decay or no slopes."""
        given, kind = super().arguments(hidden_size, heads, train_length), self.frequencies.kind
        prior = given.pop("prior")
        return {
            **given,
            "frequency": None if kind == "none" else given["frequency"],
            "decay": None if self.decay.kind == "none" else given["decay"],
            "slopes": self._slopes(heads),
            "learn_slopes": prior == "riccati",
            "logarithmic": prior == "kerple",
            "window": train_length if prior == "window" else None,
            "gates": _GATES.get(prior),
            "yarn": Yarn(train_length, self.frequencies.base) if kind == "yarn" else None,
            "rotary_map": "as_released" if kind == "as_released" else "complex",
        }

    def _slopes(self, heads: int) -> Tensor | None:
        """ALiBi's slopes, or None. Learned slopes start in ascending order, because head 0 is the slowest."""
        if self.prior == "alibi":
            return alibi_slopes(heads)
        if self.prior == "riccati":
            return alibi_slopes(heads).sort().values
        if self.prior in ("content_riccati", "alibi_gate"):
            with torch.device("cpu"):  # the gates start at these numbers, and tensors on "meta" have no numbers
                return alibi_slopes(heads).sort().values
        return None
