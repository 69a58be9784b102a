"""The configuration of robust filter attention whose dynamics depend on content (appendix E.6)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rfa.checks import require
from rfa.nn import ContentFilterAttention
from rfa.nn.checks import check_dynamics
from rfa.ops.problem import Weight

from .attention import AttentionConfig
from .banks import check_slow_modes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentAttentionConfig(AttentionConfig):
    """Robust filter attention in which each token sets decay, frequencies and noise until the next token.

    Args:
        score: the robust weight of a residual, "student_t" or "exponential".
        steady_state: initial stationary variance of the process noise.
        frequencies, decay: where the dynamics of all tokens start.
        rotate_values: always True.
        innovation, normalise_states, taps, output_gain, backend: as in `AttentionConfig`.

    Raises:
        ValueError: if values do not fit together.
    """

    kind: ClassVar[str] = "content"
    chosen_by: ClassVar[Mapping[str, str]] = {"dynamics": "content"}

    score: Weight = "student_t"
    steady_state: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dynamics("lyapunov", self.steady_state, "constant")
        kind = self.frequencies.kind
        require(kind in ("partitioned", "paired_rope"), "frequencies", kind, "'partitioned' or 'paired_rope'")
        require(not self.taps, "taps", True, "False with dynamics='content'")
        check_slow_modes(self.frequencies, learned=True)
        require(self.rotate_values, "rotate_values", False, "True with dynamics='content'")

    def has_head_dynamics(self) -> bool:
        """Whether the layer has parameters of the SDE for each head. Its SDE is that of each token."""
        return False

    def has_precision(self) -> bool:
        """Whether the sum of a query's weights is the precision of its estimate, as in the isotropic filter."""
        return True

    def build(self, hidden_size: int, heads: int, train_length: int, **options: Any) -> ContentFilterAttention:
        """A new layer with initial weights. `train_length` is in tokens, `options` are of every layer (`Attention`)."""
        frequency, decay = self.bank(hidden_size, heads, train_length)
        return ContentFilterAttention(
            hidden_size,
            heads,
            frequency=frequency,
            decay=decay,
            steady_state=self.steady_state,
            weight=self.score,
            innovation=self.innovation,
            backend=self.backend,
            **self.shared_options(),
            **options,
        )
