"""Robust filter attention as a layer (section 3.2, algorithm 1)."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import check_choice, require
from rfa.dynamics import rotation_of_heads, turn
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import Positions
from rfa.ops.problem import Options, Parameters, Problem, Weight, certificate_missing
from rfa.ops.routing import gaussian_parameters, located_posterior_routing, routing_step
from rfa.ops.transforms import transformed

from .attention import Attention, HeadStates, Marks, QueryStates, Rotation
from .cache_layer import FilterLayer
from .checks import check_rates
from .dot_product_attention import ascending_slopes
from .dynamics import NOISE_PARTS, HeadDynamics, LayerPrior, Noise, ProcessNoiseAs, bank

Step = Literal["learned", "precision"]
Aggregation = Literal["consensus", "routing"]
SourcePrior = Literal["uniform", "exponential"]
_NEEDS: dict[tuple[str, str], dict[str, object]] = {  # what the extensions of appendix E need of other choices
    # Riccati weights are not precisions, a flat prior has no gamma^2, and a bias with gamma^2 would count it twice
    ("step", "precision"): {"prior": "lyapunov", "query_noise_in_bias": False},
    # the likelihood has gamma^2 in both places, and each source its own gain
    ("aggregation", "routing"): {
        "prior": "lyapunov",
        "gate": True,
        "query_noise_in_bias": False,
        "horizon": None,
        "step": "learned",
        "weight": "student_t",
        "dropout": 0.0,
        "clock": "times",
    },
}


class RobustFilterAttention(Attention):
    """Projections, the operator, the innovation step; the block around it adds the residual.

    The defaults are the preset `rfa`: the Riccati prior started at ALiBi's slopes, the partitioned frequency bank with
    damping 0.05, and two heads that do not decay. `prior="lyapunov", innovation=True` is the paper's SC-RFA.

    Args:
        hidden_size: d_model.
        num_heads: H.
        frequency, decay: `(heads, modes)` in radians and `(heads,)`, both per unit of time; the partitioned bank, and
            0.05 times the fastest frequency of each head, 0 for the first two.
        weight: "student_t" or "exponential".
        prior: "riccati", "lyapunov", or "flat".
        initial_slopes: where a Riccati prior starts: at ALiBi's slopes, the first head slowest ("alibi"), at those
            given, `(heads,)` per unit of time, or at those of `steady_state` (None). Other priors have no slopes.
        gate: off, `Sigma + gamma^2` is 1 in the residual term.
        rotate_values: transport values by rotation too.
        innovation: return the correction from the token's value toward the estimate, not the estimate.
        query_noise_in_bias: gamma^2 in the additive prior too, as in the released code.
        steady_state, horizon, learn_frequencies, learn_decay, learn_horizon, learn_noise_floor, process_noise_as,
            noise, noise_parts: as of `HeadDynamics`.
        step: "learned", part of the output projection; or "precision", the innovation times the gain
            `sigmoid(p log s_i + log gamma^2)` of each query and head, with p learned from 1 on (appendix E.2). It needs
            prior="lyapunov": Riccati weights are not precisions, and a flat prior has no gamma^2.
        aggregation: "consensus", or "routing": each earlier key is a possible source with its own responsibility and
            gain (appendix E.8), in O(N^2) memory. The weight is Gaussian: no robustness, no temperature.
        source_prior: of routing: "uniform", each key is as likely a source as the others; or "exponential", near keys
            are likelier, `R_ij ~ exp(-rho tau)`. Each head learns rho, from ALiBi's slopes on, the first head slowest.
        tie_key_value, backend, **options: of every layer; see `Attention`.

    Raises:
        ValueError: if sizes or options do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        frequency: Float[Tensor, "heads modes"] | None = None,
        decay: Float[Tensor, " heads"] | None = None,
        weight: Weight = "student_t",
        prior: LayerPrior = "riccati",
        steady_state: float = 0.1,
        initial_slopes: Float[Tensor, " heads"] | Literal["alibi"] | None = "alibi",
        gate: bool = True,
        rotate_values: bool = True,
        innovation: bool = False,
        query_noise_in_bias: bool = False,
        horizon: float | None = None,
        learn_frequencies: bool = False,
        learn_decay: bool = False,
        learn_horizon: bool = False,
        learn_noise_floor: bool = False,
        process_noise_as: ProcessNoiseAs = "rate",
        tie_key_value: bool = False,
        step: Step = "learned",
        noise: Noise = "constant",
        noise_parts: int = NOISE_PARTS,
        aggregation: Aggregation = "consensus",
        source_prior: SourcePrior = "uniform",
        backend: str = "auto",
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, innovation, tie_key_value, backend=backend, **options)
        check_choice("weight", weight, Weight)
        check_choice("step", step, Step)
        check_choice("aggregation", aggregation, Aggregation)
        require(gate or prior != "flat", "gate", gate, "a prior other than 'flat' with it")
        biased = "prior='lyapunov' with it"
        require(prior == "lyapunov" or not query_noise_in_bias, "query_noise_in_bias", query_noise_in_bias, biased)
        chosen: dict[str, Any] = {"prior": prior, "gate": gate, "query_noise_in_bias": query_noise_in_bias}
        chosen |= {"horizon": horizon, "step": step, "aggregation": aggregation, "weight": weight}
        chosen |= {"dropout": self.dropout, "clock": "times" if self.clock is None else "content"}
        for (extension, choice), needs in _NEEDS.items():
            for name, wanted in needs.items() if chosen[extension] == choice else ():
                require(chosen[name] == wanted, name, chosen[name], f"{wanted!r} with {extension}={choice!r}")
        check_choice("source_prior", source_prior, SourcePrior)
        precise, routed = step == "precision", aggregation == "routing"
        falls = source_prior == "exponential"
        plain = routed or source_prior == "uniform"
        require(plain, "source_prior", source_prior, "'uniform' without aggregation='routing'")
        served = not routed or backend in ("auto", "reference")
        require(served, "backend", backend, "'auto' or 'reference' with aggregation='routing'")
        frequency, decay = bank(num_heads, self.modes, frequency, decay)
        if isinstance(initial_slopes, str):
            require(initial_slopes == "alibi", "initial_slopes", initial_slopes, "'alibi', a tensor or None")
            initial_slopes = ascending_slopes(num_heads).to(decay) if prior == "riccati" else None
        elif initial_slopes is not None:
            require(prior == "riccati", "initial_slopes", initial_slopes, "None or 'alibi' without prior='riccati'")
            check_rates("initial_slopes", initial_slopes, num_heads)
        self.dynamics = HeadDynamics(
            frequency,
            decay,
            steady_state=steady_state,
            prior=prior,
            slopes=initial_slopes,
            uses_query_noise=gate or query_noise_in_bias or precise,
            robust=not routed,
            tempered=precise,
            noise=noise,
            noise_parts=noise_parts,
            horizon=horizon,
            source_rate=ascending_slopes(num_heads) if falls else None,
            learn_frequencies=learn_frequencies,
            learn_decay=learn_decay,
            learn_horizon=learn_horizon,
            learn_noise_floor=learn_noise_floor,
            process_noise_as=process_noise_as,
        )
        self.rotate_values, self.step, self.aggregation = rotate_values, step, aggregation
        self.settle_certified(certificate_missing("routing" if routed else prior, self.causal))
        self.options = Options(
            causal=self.causal,
            weight=weight,
            rotate_values=rotate_values,
            prior="lyapunov" if prior == "flat" else prior,
            gate=gate,
            query_noise_in_bias=query_noise_in_bias,
            log_precision=precise,
            certified=self.certified,
        )

    def estimate(
        self,
        query: QueryStates,
        key: HeadStates,
        value: HeadStates,
        *,
        positions: Positions,
    ) -> QueryStates:
        """The operator under the layer's dynamics."""
        dynamics = self.dynamics()
        if self.aggregation == "routing":
            parameters = gaussian_parameters(**dynamics)
            options: dict[str, Any] = {"causal": self.causal, "rotate_values": self.rotate_values}
            return located_posterior_routing(positions, query, key, value, value, parameters, **options)
        problem = Problem(Parameters(**dynamics), positions, self._options())
        result = located_filter_attention(query, key, value, problem, backend=self.backend)
        return result if isinstance(result, Tensor) else self.stepped(value, *result, dynamics["query_noise"])

    def value_rotations(self, positions: Positions, **marks: Marks) -> tuple[Rotation, Rotation] | None:
        """The rotations by the frequencies; the estimate turns by the horizon too."""
        if not self.rotate_values:
            return None
        dynamics, (of_keys, of_queries) = self.dynamics(), positions.times_of_heads()
        ahead = dynamics["horizon"][:, None] if "horizon" in dynamics else 0.0
        frequency = dynamics["frequency"]
        return rotation_of_heads(frequency, of_keys), rotation_of_heads(frequency, of_queries + ahead)

    def estimate_with_cache(
        self, query: HeadStates, key: HeadStates, value: HeadStates, cached: FilterLayer, *, positions: Positions
    ) -> HeadStates:
        """The operator in the frame of the cache: only new states are turned, and the estimate is turned back."""
        dynamics = self._dynamics_of(cached)
        frequency = dynamics["frequency"]
        turns = cached.turns.at(frequency, positions, torch.promote_types(query.dtype, torch.float32))
        everything, positions = positions, cached.kept(positions)
        eps = cached.eps(self.certified, query.dtype)
        options = self._options()._replace(certified=eps)
        if "horizon" not in dynamics and self.aggregation == "consensus":
            estimate = cached.decode_token(query, key, value, turns, positions, options, self.backend)
            if estimate is not None:
                cached.drop_old(eps, positions)
                return estimate
        query, keys, values = cached.enter(query, key, value, turns, self.rotate_values, self.backend)
        if self.aggregation == "routing":
            own = values[:, :, values.shape[2] - value.shape[2] :]
            parameters = gaussian_parameters(**dynamics)
            step = routing_step(query, keys, values, own, parameters, positions)
            return value + (turns.forward(step) if self.rotate_values else step)
        shown = options.log_precision or cached.dropped > 0
        options = options._replace(rotate_values=False, in_frame=True, log_precision=shown)
        problem = Problem(Parameters(**dynamics), positions, options)
        result = located_filter_attention(query, keys, values, problem, cache=cached.decoding, backend=self.backend)
        estimate, log_precision = (result, None) if isinstance(result, Tensor) else result
        if cached.dropped and log_precision is not None:
            cached.count_uncertified(log_precision, eps, everything)
            log_precision = log_precision if self.options.log_precision else None
        cached.drop_old(eps, positions)
        if self.rotate_values:
            estimate = turns.forward(estimate)
            if "horizon" in dynamics:
                angle = frequency * dynamics["horizon"][:, None]
                ones = torch.ones_like(positions.query_times)[:, None]
                estimate = turn(estimate, *rotation_of_heads(angle, ones))
        return (
            estimate if log_precision is None else self.stepped(value, estimate, log_precision, dynamics["query_noise"])
        )

    def _options(self) -> Options:
        """The operator's options; dropout is for training."""
        return self.options._replace(dropout=self.dropout) if self.training and self.dropout else self.options

    def stepped(
        self,
        value: QueryStates,
        estimate: QueryStates,
        log_precision: Float[Tensor, "batch heads queries"],
        query_noise: Float[Tensor, " heads"],
    ) -> QueryStates:
        """`x_i + G_i (estimate - x_i)` in the gain's precision: in half precision a small step would be lost."""
        gain = precision_gain(log_precision, query_noise, self.dynamics.tempering())[..., None]
        return torch.lerp(value.to(gain.dtype), estimate.to(gain.dtype), gain)

    def _dynamics_of(self, cached: FilterLayer) -> dict[str, Any]:
        """The dynamics that the cache began with: parameters do not change while it holds something."""
        if torch.is_grad_enabled() or transformed():
            return self.dynamics()
        if cached.dynamics is not None and not cached.get_seq_length():  # of an empty prompt, or a refused one
            cached.forget_parameters()
        if cached.dynamics is None:
            cached.dynamics = self.dynamics()
        return cached.dynamics


def precision_gain(log_precision: Tensor, query_noise: Tensor, tempering: Tensor) -> Tensor:
    """`G_i = sigmoid(p log s_i + log gamma^2)`, the gain of an innovation that weighs evidence against the query.

    The query counts as a measurement of variance gamma^2, the context as one of precision `s_i^p`. With `p = 1` the
    transported observations count as independent. Smaller values discount their common part, and `p -> 0` leaves the
    constant gain `gamma^2 / (1 + gamma^2)`. Source: appendix E.2.

    Args:
        log_precision: log s_i, `(batch, heads, queries)` as the gain; -inf, where the gain is 0, for no key.
        query_noise: gamma^2, `(heads,)`, variance.
        tempering: p > 0, `(heads,)`.
    """
    dtype = log_precision.dtype
    log_noise = query_noise.to(dtype).clamp(min=torch.finfo(dtype).tiny).log()[:, None]
    unseen = log_precision == -torch.inf  # p times that would have no gradient
    logit = tempering.to(dtype)[:, None] * log_precision.masked_fill(unseen, 0.0) + log_noise
    return torch.sigmoid(logit).masked_fill(unseen, 0.0)
