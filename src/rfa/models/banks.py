"""The configurations of what a model's heads are built with: the bank of frequencies and the decays."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import require
from rfa.dynamics import partitioned_frequencies, rope_frequencies, rotary_frequencies, spectral_decay

from .fields import CheckedFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequencyBank(CheckedFields):
    """The frequencies of all heads.

    Args:
        kind: "partitioned" (SC-RFA's bank), "paired_rope" (RoPE's bank in conjugate pairs, the same in all heads),
            "rope" (as published, for dot products), "yarn" (RoPE with YaRN for sequences longer than in training),
            "as_released" (the map of the paper's code), or "none".
        base: ratio of the fastest to the slowest frequency.
        slow_modes: "rotate", or "real" to set every frequency with `omega T_train < 2 pi` to 0. Such a mode does not
            turn once within the training length, so it cannot be told from a mode that does not turn.

    Raises:
        ValueError: for an unknown kind, or a base that is not a finite number above 1.
    """

    flat_names: ClassVar[Mapping[str, str]] = {"kind": "frequencies", "base": "frequency_base"}

    kind: Literal["rope", "yarn", "paired_rope", "partitioned", "none", "as_released"] = "partitioned"
    base: float = 10000.0
    slow_modes: Literal["rotate", "real"] = "rotate"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 < self.base < math.inf, "frequency_base", self.base, "a number above 1")

    def build(self, heads: int, modes: int, train_length: int) -> Float[Tensor, "heads modes"]:
        """The frequencies, in radians per token. `train_length` is in tokens."""
        frequency = self._bank(heads, modes)
        if self.slow_modes == "rotate":
            return frequency
        return frequency.masked_fill(frequency.abs() * train_length < 2 * math.pi, 0.0)

    def _bank(self, heads: int, modes: int) -> Tensor:
        if self.kind == "partitioned":
            return partitioned_frequencies(heads, modes, self.base)
        if self.kind == "paired_rope":
            return rope_frequencies(heads, modes, self.base)
        if self.kind == "none":
            return torch.zeros(heads, modes, dtype=torch.float32)
        return rotary_frequencies(heads, modes, self.base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayRates(CheckedFields):
    """The decay of each head.

    Args:
        kind: "spectral" (`damping` times the fastest frequency of the head's band in the partitioned bank),
            "length_scaled" (the spectral decay times `5 / (train_length - 1)`), or "none".
        damping: the dimensionless coefficient b.
        zero_heads: this many heads, the first ones, do not decay; None for two, or for one where there is no other. A
            finished configuration of a model holds their number.

    Raises:
        ValueError: for an unknown kind, or a negative number.
    """

    flat_names: ClassVar[Mapping[str, str]] = {"kind": "decay"}

    kind: Literal["none", "spectral", "length_scaled"] = "spectral"
    damping: float = 0.05
    zero_heads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.damping < math.inf, "damping", self.damping, "a finite number >= 0")
        require(self.zero_heads is None or self.zero_heads >= 0, "zero_heads", self.zero_heads, "a number >= 0")

    def without_decay(self, heads: int) -> int:
        """The number of heads that do not decay, of this many."""
        return min(2, heads) if self.zero_heads is None else self.zero_heads

    def build(self, heads: int, modes: int, base: float, train_length: int) -> Float[Tensor, " heads"]:
        """The decays, per token. `base` is the base of the frequency bank."""
        if self.kind == "none":
            return torch.zeros(heads, dtype=torch.float32)
        damping = self.damping * (5 / (train_length - 1) if self.kind == "length_scaled" else 1.0)
        return spectral_decay(partitioned_frequencies(heads, modes, base), damping, self.without_decay(heads))


def check_slow_modes(bank: FrequencyBank, learned: bool) -> None:
    """Raise `ValueError` for real slow modes where frequencies are learned: after one step they would turn again."""
    fixed = bank.slow_modes == "rotate" or not learned
    require(fixed, "slow_modes", bank.slow_modes, "'rotate' where frequencies are learned, or learn_frequencies=False")
