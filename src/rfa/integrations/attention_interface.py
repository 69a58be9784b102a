"""The attention "rfa" of transformers: Student-t weights for decoders whose attention takes states after rotation."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from rfa.checks import require
from rfa.nn.dynamics import ROBUSTNESS
from rfa.nn.projections import repeated_for_heads
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Options, Parameters, Problem

from .located import Mask, read_mask

IN_FRAME = Options(
    causal=True,
    weight="student_t",
    rotate_values=False,
    prior="lyapunov",
    gate=True,
    query_noise_in_bias=False,
    log_precision=False,
    in_frame=True,
)
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias")  # what some models pass, and this has no place for


def student_t_attention(
    module: nn.Module,
    query: Float[Tensor, "batch heads queries channels"],
    key: Float[Tensor, "batch groups keys channels"],
    value: Float[Tensor, "batch groups keys value_channels"],
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch queries heads value_channels"], None]:
    r"""An attention function of transformers, "rfa": the robust filter without decay, in the frame of the states.

    With n channels a head, `nu = nu_s n / 2` degrees of freedom (`nu_s = 4`) and the model's own scaling,

        A_ij  = softmax_j(-(scaling nu / 2) log(1 + |q_i - k_j|^2 / nu))
        out_i = sum_j A_ij v_j

    Queries and keys are rotated already, so `q_i - k_j` is the filter's residual `q - exp(i omega tau) k`. As nu grows
    the score becomes `scaling (q_i.k_j - |k_j|^2 / 2)` up to a constant of the query: the model's dot product, less a
    term that keys of equal norms share. There are no parameters to learn. `rfa.integrations.replace_attention` has
    decay, noises and robustness of each head.

    Args:
        module: the model's attention module; only its `is_causal` is read.
        query, key, value: states; heads may share keys and values.
        attention_mask: as `sdpa_mask` makes it, see `read_mask`.
        scaling: the factor of the dot product; `channels ** -0.5`.
        dropout: share of the weights that become 0, by the reference backend.
        kwargs: what else models pass. `output_attentions` is refused; GPT-2 does not pass it on.

    Returns:
        The estimate, and None in the place of weights.

    Raises:
        ValueError: for attention that is not causal, a sliding window shorter than the keys, a fixed-size cache, a
            model that changes its scores, or one that is asked for its weights.
    """
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    require(causal, "is_causal", causal, "True: queries see earlier keys only")
    for name in _CHANGES_SCORES:
        require(kwargs.get(name) is None, name, kwargs.get(name), "None: the scores are those of the filter")
    wanted = kwargs.get("output_attentions")
    wanted = getattr(getattr(module, "config", None), "output_attentions", False) if wanted is None else wanted
    require(not wanted, "output_attentions", wanted, "False: the operator keeps no weights")
    window = kwargs.get("sliding_window")
    if window is not None:  # a message with the number of keys would fix it in a compiled program
        require(window >= keys, "sliding_window", window, f"None, or {keys}, the keys, at least")
    fixed = attention_mask is None and 1 < queries < keys
    require(not fixed, "past_key_values", "a cache of fixed size", "one that grows, as DynamicCache")
    flags = read_mask(attention_mask, batch, queries, keys)
    positions = checked_positions(batch, queries, keys, query.device, None, None, *flags)
    freedom = ROBUSTNESS * channels / 2
    temperature = (channels**-0.5 if scaling is None else scaling) * freedom / (2 * (ROBUSTNESS + 1))
    none, one = torch.zeros(heads, device=query.device), torch.ones(heads, device=query.device)
    parameters = Parameters(
        decay=none,
        frequency=none[:, None].expand(heads, channels // 2),
        process_noise=none,
        key_noise=none,
        query_noise=none,
        noise_floor=one,
        robustness=ROBUSTNESS * one,
        inverse_temperature=temperature * one,
    )
    share = heads // key.shape[1]
    estimate = located_filter_attention(
        query,
        repeated_for_heads(key, share),
        repeated_for_heads(value, share),
        Problem(parameters, positions, IN_FRAME._replace(dropout=dropout)),
    )
    assert isinstance(estimate, Tensor)
    return estimate.transpose(1, 2).contiguous(), None


AttentionInterface.register("rfa", student_t_attention)
AttentionMaskInterface.register("rfa", sdpa_mask)
