"""The configurations of attention: one class for each kind, with its own fields, rules and builder."""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator
from jaxtyping import Float
from torch import Tensor

from rfa.checks import require
from rfa.dynamics import partitioned_frequencies, rope_frequencies, rotary_frequencies, spectral_decay
from rfa.nn import Attention, ContentFilterAttention, RobustFilterAttention
from rfa.nn.dynamics import NOISE_PARTS, LayerPrior, Noise, ProcessNoiseAs
from rfa.nn.filter_attention import SourcePrior, Step
from rfa.nn.projections import Clock
from rfa.ops.problem import Certified, Weight

_LARGEST = 10**300  # the largest integer that is stored as a float


def check_type(name: str, given: object, kind: Any) -> None:
    """Raise `ValueError` for a value of another type than a field's, by the rules of `huggingface_hub`'s `strict`."""
    try:
        type_validator(name, given, kind)
    except TypeError as error:
        expected = inspect.formatannotation(kind).replace("Literal[", "one of [")
        raise ValueError(f"{name}: got {given!r}, expected {expected}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedFields:
    """Base class of attention and its parts. A part adds its rules in `__post_init__`.

    A field of type `float` accepts an integer too, and stores it as a `float`.

    Raises:
        ValueError: for a value of another type.
    """

    noun: ClassVar[str] = "kind"  # what messages call the field `kind` of a part

    def __post_init__(self) -> None:
        for name, kind in hints(type(self)).items():
            value = getattr(self, name)
            if type(value) is int and float in (kind, *get_args(kind)) and abs(value) < _LARGEST:
                object.__setattr__(self, name, float(value))
            else:
                check_type(self.noun if name == "kind" else name, value, kind)

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON. Nested parts are dictionaries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: object, where: str) -> Any:
        """The object of `to_dict`'s dictionary, named `where` in messages. Missing fields have their defaults.

        Raises:
            ValueError: for anything but a dictionary, an unknown field, or a value that does not fit.
        """
        known = hints(cls)
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: got {given!r:.80}, expected an object with {', '.join(known)}")
        values = dict(given)
        for name in values:
            if name not in known:
                raise ValueError(f"{where}: got the field {name!r:.80}, expected some of {', '.join(known)}")
            if is_part(known[name]):
                values[name] = known[name].from_dict(values[name], f"{where}.{name}")
        return cls(**values)

    @classmethod
    def plain_names(cls) -> set[str]:
        """The names by which `changed` reaches a field: of the fields here and in nested parts."""
        nested = (kind.plain_names() - {"kind"} for kind in hints(cls).values() if is_part(kind))
        return set(hints(cls)).union(*nested)

    def changed(self, changes: Mapping[str, Any]) -> Any:
        """The same with other values of some fields, each by its plain name, also in nested parts.

        For example, `damping` is the field of `decay`. A part itself takes an object, a dictionary, or its `kind`.

        Raises:
            ValueError: for a name that no field has, or values that do not fit together.
        """
        for name in sorted(changes.keys() - self.plain_names()):
            expected = f"nothing: it has no effect in {getattr(self, 'kind', self.noun)} attention, which takes "
            require(False, name, changes[name], expected + ", ".join(sorted(self.plain_names())))
        values: dict[str, Any] = {}
        for name, kind in hints(type(self)).items():
            if not is_part(kind):
                values |= {name: changes[name]} if name in changes else {}
                continue
            part = changes.get(name, getattr(self, name))
            if isinstance(part, Mapping):
                part = kind.from_dict(part, name)
            elif not isinstance(part, kind):
                part = dataclasses.replace(getattr(self, name), kind=part)
            inner = (kind.plain_names() - {"kind"}) & changes.keys()
            values[name] = part.changed({each: changes[each] for each in inner})
        return dataclasses.replace(self, **values)


def hints(cls: type[CheckedFields]) -> dict[str, Any]:
    """The type of each field, by name."""
    found = get_type_hints(cls)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def is_part(kind: Any) -> bool:
    """Whether a field's type is a nested part with fields of its own."""
    return isinstance(kind, type) and issubclass(kind, CheckedFields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequencyBank(CheckedFields):
    """The frequencies of all heads.

    Args:
        kind: "partitioned" (SC-RFA's bank), "paired_rope" (RoPE's bank in conjugate pairs, the same in all heads),
            "rope" (as published, for dot products),
            "as_released" (the map of the paper's code), or "none".
        base: ratio of the fastest to the slowest frequency.
        slow_modes: "rotate", or "real" to set every frequency with `omega T_train < 2 pi` to 0. Such a mode does not
            turn once within the training length, so it cannot be told from a mode that does not turn.

    Raises:
        ValueError: for an unknown kind, or a base that is not a finite number above 1.
    """

    noun: ClassVar[str] = "frequencies"

    kind: Literal["rope", "paired_rope", "partitioned", "none", "as_released"] = "partitioned"
    base: float = 10000.0
    slow_modes: Literal["rotate", "real"] = "rotate"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 < self.base < math.inf, "base", self.base, "a number above 1")

    def build(self, heads: int, modes: int, train_length: int) -> Float[Tensor, "heads modes"]:
        """The frequencies, in radians per token. `train_length` is in tokens."""
        if self.kind == "none":
            return torch.zeros(heads, modes, dtype=torch.float32)
        banks = {"partitioned": partitioned_frequencies, "paired_rope": rope_frequencies}
        frequency = banks.get(self.kind, rotary_frequencies)(heads, modes, self.base)
        slow = frequency.abs() * train_length < 2 * math.pi
        return frequency.masked_fill(slow, 0.0) if self.slow_modes == "real" else frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayRates(CheckedFields):
    """The decay of each head.

    Args:
        kind: "spectral" (`damping` times the fastest frequency of the head's band in the partitioned bank),
            "length_scaled" (the spectral decay times `5 / (train_length - 1)`), or "none".
        damping: the dimensionless coefficient b.
        zero_heads: this many heads, the first ones, do not decay; by default two, or one where there is one head.

    Raises:
        ValueError: for an unknown kind, or a negative number.
    """

    noun: ClassVar[str] = "decay"

    kind: Literal["none", "spectral", "length_scaled"] = "spectral"
    damping: float = 0.05
    zero_heads: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.damping < math.inf, "damping", self.damping, "a finite number >= 0")
        require(self.zero_heads >= 0, "zero_heads", self.zero_heads, "a number >= 0")

    def build(self, heads: int, modes: int, base: float, train_length: int) -> Float[Tensor, " heads"]:
        """The decays, per token. `base` is the base of the frequency bank."""
        if self.kind == "none":
            return torch.zeros(heads, dtype=torch.float32)
        damping = self.damping * (5 / (train_length - 1) if self.kind == "length_scaled" else 1.0)
        return spectral_decay(partitioned_frequencies(heads, modes, base), damping, self.zero_heads)


_PARTITIONED, _SPECTRAL = FrequencyBank(), DecayRates()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(CheckedFields):
    """The fields and methods of every kind of attention.

    A subclass names its layer. A field is an argument of the layer by the same name. `frequencies` and `decay` become
    the tensors `frequency` and `decay`.

    Args:
        frequencies: of the rotation of queries and keys.
        decay: of each head.
        rotate_values: rotate values too.
        innovation: return the step from the query's state toward the estimate instead of the estimate.
        normalise_states: queries and keys of each head have a root mean square of one, times a learned scale.
        certified: an eps, "auto" or None: which old keys are left out, as of the layer.
        backend: of the operator.
    """

    kind: ClassVar[str]
    layer: ClassVar[type[Attention]]

    frequencies: FrequencyBank = _PARTITIONED
    decay: DecayRates = _SPECTRAL
    rotate_values: bool = True
    innovation: bool = True
    normalise_states: bool = False
    certified: Certified = "auto"
    backend: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        turning = getattr(self, "learn_frequencies", self.kind == "content")  # after one step all modes would turn
        mode = self.frequencies.slow_modes
        require(mode == "rotate" or not turning, "slow_modes", mode, "'rotate' where frequencies are learned")
        self.check_rules()
        with torch.device("meta"):  # most rules are those of the layer, which says them when it is built
            self.build(8, 2, 16)

    def check_rules(self) -> None:
        """Raise `ValueError` for values that the layer could not tell are wrong."""

    def build(self, hidden_size: int, heads: int, train_length: int, **options: Any) -> Attention:
        """A new layer with initial weights. `train_length` is in tokens, `options` are of every layer (`Attention`)."""
        return self.layer(hidden_size, heads, **self.arguments(hidden_size, heads, train_length), **options)

    def arguments(self, hidden_size: int, heads: int, train_length: int) -> dict[str, Any]:
        """The arguments of the layer. Frequencies are in radians per token, decays per token."""
        modes, names = hidden_size // heads, hints(type(self)).keys() - {"frequencies", "decay"}
        decay = self.decay.build(heads, modes, self.frequencies.base, train_length)
        given = {name: getattr(self, name) for name in names}
        return {"frequency": self.frequencies.build(heads, modes, train_length), "decay": decay, **given}

    def to_dict(self) -> dict[str, Any]:
        """The kind and the fields for JSON."""
        return {"kind": self.kind, **super().to_dict()}

    def check_heads(self, hidden_size: int, heads: int) -> None:
        """Raise `ValueError` if the number of heads or modes of a model does not fit."""
        most = max(heads, DecayRates.zero_heads)  # by default the first two of the heads that there are
        require(self.decay.zero_heads <= most, "zero_heads", self.decay.zero_heads, f"a number from 0 to {heads}")
        even = (hidden_size // heads) % 2 == 0
        expected = "an even number of modes (hidden_size / heads) for pairs"
        require(even or not self.has_paired_modes(), "hidden_size", hidden_size, expected)

    def has_paired_modes(self) -> bool:
        """Whether modes come in conjugate pairs, so that their number must be even."""
        return self.frequencies.kind in ("paired_rope", "partitioned") or self.decay.kind != "none"

    def has_sde_parameters(self) -> bool:
        """Whether the layer learns dynamics or noises, which an optimiser treats apart."""
        return True

    def is_relative(self) -> bool:
        """Whether scores depend on differences of times alone."""
        return True

    def has_precision(self) -> bool:
        """Whether the sum of a query's weights is the precision of its estimate (appendix E.2)."""
        return False

    def without_effect(self) -> set[str]:
        """Plain names of the fields that have no effect with the values of the other fields."""
        of_decay, of_both = {"damping", "zero_heads"} if self.decay.kind == "none" else set(), set()
        if self.frequencies.kind == "none":
            of_both = {"slow_modes"} | ({"base"} if of_decay else set())
        return of_decay | of_both


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpaceConfig(AttentionConfig):
    """The common part of the robust filter and posterior routing: a linear SDE with noises.

    Args:
        steady_state: initial stationary variance of the process noise.
        learn_frequencies, learn_decay, learn_noise_floor: train what is fixed by default.
        process_noise_as: "rate", the noise per unit of time is trained, as in the released code; or "steady_state", the
            stationary variance is, as in algorithm 1. Heads without decay have none and keep the rate.
        tie_key_value: use the keys as values, which saves one projection.
        noise: "constant", or "time_dependent" for damped waves beside the white noise.
        noise_parts: number of these waves, for each head.
    """

    layer: ClassVar[type[Attention]] = RobustFilterAttention

    steady_state: float = 0.1
    learn_frequencies: bool = False
    learn_decay: bool = False
    learn_noise_floor: bool = False
    process_noise_as: ProcessNoiseAs = "rate"
    tie_key_value: bool = False
    noise: Noise = "constant"
    noise_parts: int = NOISE_PARTS

    def check_rules(self) -> None:
        """Raise `ValueError` for frequencies that a filter does not have, or cannot learn."""
        kind = self.frequencies.kind
        require(kind != "as_released", "frequencies", kind, "dot-product attention with it")
        paired = kind != "rope" or not self.learn_frequencies
        require(paired, "learn_frequencies", True, "frequencies='paired_rope' or 'partitioned' with it")

    def has_paired_modes(self) -> bool:
        """Whether modes come in conjugate pairs. Learned frequencies always do."""
        return super().has_paired_modes() or self.learn_frequencies

    def without_effect(self) -> set[str]:
        """Plain names of the fields without effect. Constant noise has no parts."""
        return super().without_effect() | (set() if self.noise == "time_dependent" else {"noise_parts"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterAttentionConfig(StateSpaceConfig):
    """Robust filter attention. The defaults are the preset `rfa`; `prior="lyapunov", innovation=True` is `m2-sc-rfa`.

    Args:
        clock: "times", the given times; or "content": each token says how fast the time of each head passes until the
            next token, and rotation, decay and uncertainty follow that clock.
        weight: the robust weight of a residual, "student_t" or "exponential".
        prior: the term of the lag in the score: "lyapunov", "riccati" or "flat".
        initial_slopes: a Riccati prior starts at ALiBi's slopes ("alibi") or at those of `steady_state` (None). Other
            priors have no slopes, so that it is None with them.
        gate: divide the squared residual by its variance.
        query_noise_in_bias: add the query's noise in the additive prior too, as in the released code.
        horizon: time that is added to each lag at the start, in tokens; None for no horizon.
        learn_horizon: train the horizon.
        step: "learned", or "precision" for the innovation times a gain from the posterior precision.
        others: as in `AttentionConfig` and `StateSpaceConfig`.

    Raises:
        ValueError: if values do not fit together.
    """

    kind: ClassVar[str] = "filter"

    innovation: bool = False
    weight: Weight = "student_t"
    prior: LayerPrior = "riccati"
    initial_slopes: Literal["alibi"] | None = "alibi"
    gate: bool = True
    query_noise_in_bias: bool = False
    horizon: float | None = None
    learn_horizon: bool = False
    step: Step = "learned"
    clock: Clock = "times"

    def check_rules(self) -> None:
        """Raise `ValueError` for a clock without an effect too."""
        super().check_rules()
        if self.prior != "riccati":
            object.__setattr__(self, "initial_slopes", None)
        moves = self.prior != "flat" or self.frequencies.kind != "none" or self.decay.kind != "none"
        require(moves or self.clock == "times", "clock", self.clock, "'times' where nothing depends on the lag")

    def has_precision(self) -> bool:
        """Whether weights are precisions: Riccati weights and weights without a variance are not."""
        return self.prior == "lyapunov"

    def without_effect(self) -> set[str]:
        """Plain names of the fields without effect. A flat prior has no variance, and initial slopes set their own."""
        unread = super().without_effect() | (set() if self.prior == "riccati" else {"initial_slopes"})
        return unread | {"steady_state"} if self.prior == "flat" or self.initial_slopes is not None else unread


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingAttentionConfig(StateSpaceConfig):
    """Posterior routing: a responsibility and a gain for each earlier token (appendix E.8).

    Its likelihood has fixed Gaussian weights, Lyapunov variances, and no horizon.

    Args:
        source_prior: "uniform", each earlier token is as likely a source as the others; or "exponential", near ones are
            likelier, at a learned rate of each head.
        others: as in `AttentionConfig` and `StateSpaceConfig`.

    Raises:
        ValueError: if values do not fit together.
    """

    kind: ClassVar[str] = "routing"

    source_prior: SourcePrior = "uniform"

    def arguments(self, hidden_size: int, heads: int, train_length: int) -> dict[str, Any]:
        """The arguments of the layer."""
        of_layer = super().arguments(hidden_size, heads, train_length)
        return {**of_layer, "aggregation": "routing", "prior": "lyapunov"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentAttentionConfig(AttentionConfig):
    """Robust filter attention in which each token sets decay, frequencies and noise until the next one (appendix E.6).

    Args:
        weight: the robust weight of a residual, "student_t" or "exponential".
        steady_state: initial stationary variance of the process noise.
        frequencies, decay: where the dynamics of all tokens start.
        rotate_values: always True.
        innovation, normalise_states, certified, backend: as in `AttentionConfig`.

    Raises:
        ValueError: if values do not fit together.
    """

    kind: ClassVar[str] = "content"
    layer: ClassVar[type[Attention]] = ContentFilterAttention

    weight: Weight = "student_t"
    steady_state: float = 0.1

    def check_rules(self) -> None:
        """Raise `ValueError` for frequencies without pairs, or values that do not turn."""
        kind = self.frequencies.kind
        require(kind in ("partitioned", "paired_rope"), "frequencies", kind, "'partitioned' or 'paired_rope'")
        require(self.rotate_values, "rotate_values", False, "True where each token sets the dynamics")

    def has_precision(self) -> bool:
        """Whether the sum of a query's weights is the precision of its estimate, as in the isotropic filter."""
        return True

    def arguments(self, hidden_size: int, heads: int, train_length: int) -> dict[str, Any]:
        """The arguments of the layer, which always turns values."""
        given = super().arguments(hidden_size, heads, train_length)
        del given["rotate_values"]
        return given
