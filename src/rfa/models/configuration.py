"""The one configuration of the one decoder: every variant of the paper is a choice of these fields."""

import functools
import math
import re
from typing import Literal, get_args, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from rfa.nn.checks import check_extensions, check_range, require

Score = Literal["student_t", "exponential", "dot_product"]
Prior = Literal["lyapunov", "riccati", "flat", "alibi", "window", "forget_gate", "content_riccati"]
Frequencies = Literal["rope", "yarn", "paired_rope", "partitioned", "none", "as_released"]
Decay = Literal["none", "spectral", "length_scaled"]
_WRONG_KIND = re.compile(r"Field '(\w+)' ")  # how `strict` begins
_RICCATI = ("riccati", "content_riccati")
_SIZES = {  # far beyond what fits any machine; larger ones would end as somebody else's overflow, or never
    "vocab_size": (1, 2**31 - 1),
    "hidden_size": (1, 2**24),
    "intermediate_size": (1, 2**26),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 2**24),
    "train_length": (2, 2**31 - 1),
}

# The extensions of appendix E
_EXTENSIONS = {"tie_key_value": False, "step": "learned", "noise": "constant", "aggregation": "consensus"}


def _with_value_errors(cls):
    """Let the constructor raise `ValueError` in one line where `strict` raises errors of its own."""
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self, *args, **kwargs):
        try:
            construct(self, *args, **kwargs)
        except StrictDataclassError as error:
            cause = error.__cause__
            message = " ".join((str(cause) if isinstance(cause, ValueError | TypeError) else str(error)).split())
            if (of_a_field := _WRONG_KIND.match(message)) and (field := of_a_field[1]) in kwargs:
                message = f"{field}: got {kwargs[field]!r}, expected {_kind(cls.__dataclass_fields__[field].type)}"
            raise ValueError(message) from error

    cls.__init__ = init
    return cls


def _kind(hint) -> str:
    """A field's type in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if kinds := get_args(hint):
        return " or ".join(map(_kind, kinds))
    return "None" if hint is type(None) else hint.__name__


@_with_value_errors
@strict
class RFAConfig(PreTrainedConfig):
    """Sizes by Hugging Face's names, and what attention computes. The defaults are `m2-sc-rfa` at the paper's size.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: the decoder's sizes.
        intermediate_size: of the feed-forward network; four times `hidden_size`.
        train_length: tokens of a training block, T_train.
        layer_norm_eps, use_cache: as elsewhere in transformers.
        score: "student_t" or "exponential" (robust filter attention), or "dot_product" (the baselines).
        prior: what a lag adds to the score. Filters: "lyapunov", "riccati", "flat". Dot products: "flat", "alibi",
            "window" (nothing below `train_length`, all else is out of sight), "forget_gate" (the Forgetting
            Transformer's gates of the tokens in between), "riccati" (slopes from learned noises, without decay),
            "content_riccati" (Kalman gains that depend on the content, without decay).
        frequencies: "partitioned" (SC-RFA's bank), "paired_rope" (RoPE's bank in conjugate pairs, equal in all
            heads), "rope" (as published, for dot products), "yarn" (that with YaRN where a sequence is longer than
            `train_length`), "as_released" (the map of the paper's code), "none".
        frequency_base: ratio of the fastest to the slowest frequency of a bank.
        decay: "spectral" (`damping` times the fastest frequency of a head's band of the partitioned bank),
            "length_scaled" (that times `5 / (train_length - 1)`), "none".
        damping: the dimensionless coefficient b.
        zero_heads: this many first heads do not decay.
        steady_state: initial steady-state process variance.
        initial_slopes: "alibi" starts a Riccati prior at ALiBi's slopes.
        gate: off, the residual is not divided by its variance.
        rotate_values: transport values by rotation too.
        innovation: attention returns the correction toward its estimate, not the estimate.
        query_noise_in_bias: the query's noise counts in the additive prior too, as in the released code.
        horizon: initial time added to each lag; None for none.
        learn_frequencies, learn_decay, learn_horizon: train what is fixed by default.
        tie_key_value: the values are the keys, with one projection fewer.
        step: "learned", or "precision": the innovation times a gain from the posterior precision.
        noise: "constant", or "time_dependent": exponential and periodic parts beside the white one.
        aggregation: "consensus", or "routing": a responsibility and a gain for each past token.
        backend: of the operator.

    Raises:
        ValueError: if a value is unknown or values do not fit together.
    """

    model_type = "rfa"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (the Trainer adds lists to it)

    vocab_size: int = 50257
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    train_length: int = 512
    layer_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    score: Score = "student_t"
    prior: Prior = "lyapunov"
    frequencies: Frequencies = "partitioned"
    frequency_base: float = 10000.0
    decay: Decay = "spectral"
    damping: float = 0.05
    zero_heads: int = 2
    steady_state: float = 0.1
    initial_slopes: Literal["alibi"] | None = None
    gate: bool = True
    rotate_values: bool = True
    innovation: bool = True
    query_noise_in_bias: bool = False
    horizon: float | None = None
    learn_frequencies: bool = False
    learn_decay: bool = False
    learn_horizon: bool = False
    tie_key_value: bool = False
    step: Literal["learned", "precision"] = "learned"
    noise: Literal["constant", "time_dependent"] = "constant"
    aggregation: Literal["consensus", "routing"] = "consensus"
    backend: str = "auto"

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of the `strict` validation: which values fit together."""
        for name, (least, most) in _SIZES.items():
            check_range(name, getattr(self, name), least, most)
        heads = self.num_attention_heads
        _require(self.hidden_size % heads == 0, self, "hidden_size", f"a multiple of num_attention_heads = {heads}")
        even = (self.hidden_size // heads) % 2 == 0
        paired = self.frequencies in ("paired_rope", "partitioned")
        pairs = paired or self.decay != "none" or self.learn_frequencies
        _require(even or not pairs, self, "hidden_size", "an even number of modes (hidden_size / heads) for pairs")
        _require(0 < self.layer_norm_eps < 1, self, "layer_norm_eps", "a small positive number")
        _require(1 < self.frequency_base < math.inf, self, "frequency_base", "a number above 1")
        _require(0 <= self.damping < math.inf, self, "damping", "a finite number >= 0")
        _require(0 <= self.steady_state < math.inf, self, "steady_state", "a finite number >= 0")
        _require(0 <= self.zero_heads <= heads, self, "zero_heads", f"a number from 0 to {heads}")
        _require(self.horizon is None or 0 <= self.horizon < math.inf, self, "horizon", "None or a number >= 0")
        _require(self.horizon is not None or not self.learn_horizon, self, "learn_horizon", "a horizon to start from")
        riccati = self.prior in _RICCATI
        _require(riccati or self.initial_slopes is None, self, "initial_slopes", "a Riccati prior with it")
        if self.score == "dot_product":
            self._validate_dot_product()
        else:
            self._validate_filter()

    def has_head_dynamics(self) -> bool:
        """Whether `RFAPreTrainedModel.head_dynamics` of its model finds any: parameters of the SDE, head by head."""
        return self.score != "dot_product" or self.prior == "riccati"

    def without_effect(self) -> set[str]:
        """The fields that this choice of attention does not read."""
        unread = set()
        if self.decay == "none":
            unread |= {"damping", "zero_heads"}
            if self.frequencies == "none":
                unread |= {"frequency_base"}
        if self.score == "dot_product" or self.prior == "flat" or self.initial_slopes is not None:
            unread |= {"steady_state"}
        return unread

    def _validate_filter(self):
        lyapunov = self.prior == "lyapunov"
        served = self.prior in ("lyapunov", "riccati", "flat")
        _require(served, self, "prior", f"'lyapunov', 'riccati' or 'flat' for score={self.score!r}")
        _require(self.frequencies not in ("as_released", "yarn"), self, "frequencies", "score='dot_product' with it")
        paired = self.frequencies != "rope" or not self.learn_frequencies
        _require(paired, self, "learn_frequencies", "frequencies='paired_rope' or 'partitioned' with it")
        _require(lyapunov or not self.query_noise_in_bias, self, "query_noise_in_bias", "prior='lyapunov' with it")
        _require(self.gate or self.prior != "flat", self, "gate", "a prior other than 'flat' with it")
        _require(lyapunov or self.noise == "constant", self, "noise", "prior='lyapunov' with it")
        robust = self.score == "student_t" or self.aggregation == "consensus"
        _require(robust, self, "score", "'student_t' with aggregation='routing', whose own weight is Gaussian")
        check_extensions(vars(self))

    def _validate_dot_product(self):
        expected = "anything but 'lyapunov' for score='dot_product'"
        _require(self.prior != "lyapunov", self, "prior", expected)
        riccati = self.prior in _RICCATI
        started = not riccati or self.initial_slopes == "alibi"
        _require(started, self, "initial_slopes", f"'alibi' for dot products with prior={self.prior!r}")
        alone = not (riccati or self.prior == "window") or self.decay == "none"
        _require(alone, self, "decay", f"'none' for dot products with prior={self.prior!r}")
        _require(self.prior != "window" or not self.rotate_values, self, "rotate_values", "False with prior='window'")
        turns = self.frequencies not in ("none", "as_released", "yarn")
        _require(turns or not self.rotate_values, self, "rotate_values", "frequencies that turn values")
        for name in ("query_noise_in_bias", "learn_frequencies", "learn_decay", "learn_horizon"):
            _require(not getattr(self, name), self, name, "False for score='dot_product'")
        _require(self.gate, self, "gate", "True for score='dot_product'")
        _require(self.horizon is None, self, "horizon", "None for score='dot_product'")
        for name, default in _EXTENSIONS.items():
            _require(getattr(self, name) == default, self, name, f"{default!r} for score='dot_product'")


def _require(condition: bool, config: RFAConfig, name: str, expected: str) -> None:
    require(condition, name, getattr(config, name), expected)
