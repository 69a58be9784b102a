"""Maps of a layer's attention, read off its own operator."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import rotate
from rfa.models import RFAForCausalLM
from rfa.nn import DotProductAttention

MAP_SIZE = 128
MAP_LENGTHS = 8  # of the window that a record maps, in training lengths


def middle_window(tokens: int, length: int) -> slice:
    """The window of `length` in the middle of a text of `tokens`: far from title pages.

    Raises:
        ValueError: if the text is too short.
    """
    if tokens < length:
        raise ValueError(f"attention: got a text of {tokens} tokens, expected at least {length} for a map")
    start = (tokens - length) // 2
    return slice(start, start + length)


@torch.inference_mode()
def attention_maps(
    model: RFAForCausalLM, ids: np.ndarray, train_length: int, size: int = MAP_SIZE
) -> tuple[dict[str, Float[np.ndarray, "heads queries keys"]], dict[str, Any]]:
    """What each head of the last layer takes from where, on one window.

    An estimate is linear in the values: `out_i = sum_j W_ij R_ij v_j`, with the rotation R where values turn. W_ij is
    what is mapped: the softmax weight times the decay, `A_ij exp(-mu tau)`, which is what reaches the estimate. Rows
    of A sum to one; those of W to the share `kept` that did not decay, one in a head without decay. Values that are
    one on a block of keys and zero elsewhere give the sums of W over blocks from the layer's own operator, in linear
    memory, whatever its prior; where it turns values, they are turned against it.

    Args:
        model: in evaluation mode.
        ids: the window's tokens.
        train_length: of the model.
        size: at most so many blocks of queries, and of keys.

    Returns:
        `weights`, means over blocks of queries of sums over blocks of keys, `(heads, blocks, blocks)`, and `near`, the
        last `size` queries and `2 size` keys one by one, which alone shows periods shorter than two blocks, both in
        float16; and a summary: `length`, `block`, `layer`, and for each head `kept`, `mean_lag` (tokens, of what is
        kept) and `beyond_training` (the share of what is kept that lies more than the training length back), the last
        two to the width of a block.
    """
    layer = len(model.model.layers) - 1
    attention = model.model.layers[layer].attention
    block = -(-len(ids) // size)
    given = _states(model, attention, torch.from_numpy(ids.astype(np.int64))[None].to(model.device))
    weights = _over_keys(attention, given, 0, block)
    near = _over_keys(attention, given, max(len(ids) - 2 * size, 0), 1)[:, -size:]
    _, length, blocks = weights.shape
    starts = block * torch.arange(blocks)
    centre = (starts + (starts + block).clamp(max=length) - 1) / 2
    lag = (torch.arange(length)[:, None] - centre).clamp(min=0)
    kept = weights.sum(-1)
    far = (weights * (lag > train_length)).sum(-1)
    figures = zip(
        kept.mean(-1).tolist(),
        ((weights * lag).sum((-1, -2)) / kept.sum(-1)).tolist(),
        (far.sum(-1) / kept.sum(-1)).tolist(),
        strict=True,
    )
    names = ("kept", "mean_lag", "beyond_training")
    summary = {
        "layer": layer,
        "length": length,
        "block": block,
        "heads": [dict(zip(names, head, strict=True)) for head in figures],
    }
    rows = [part.mean(1) for part in weights.split(block, dim=1)]
    maps = {"weights": torch.stack(rows, dim=1), "near": near}
    return {name: of.numpy().astype(np.float16) for name, of in maps.items()}, summary


def _states(model: RFAForCausalLM, attention: Any, ids: Tensor) -> dict[str, Any]:
    """The arguments of a layer's `estimate` on these tokens."""
    given: dict[str, Any] = {}
    estimate = attention.estimate

    def keep(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        given.update(query=query, key=key, value=value, rest=rest)
        return estimate(query, key, value, **rest)

    attention.estimate = keep  # of this instance, for one forward pass
    try:
        model.model(ids, use_cache=False)
    finally:
        del attention.estimate
    return given


def _over_keys(attention: Any, given: dict[str, Any], start: int, block: int) -> Float[Tensor, "heads length blocks"]:
    """W summed over blocks of keys from `start` on."""
    estimate, value = attention.estimate, given["value"]
    length = value.shape[2]
    times = torch.arange(length, device=value.device)
    frequency, horizon = _turning(attention)
    parts = []
    for first in range(start, length, block * value.shape[-1]):
        of_block = (times - first).div(block, rounding_mode="floor")[:, None]
        ones = (of_block == torch.arange(value.shape[-1], device=value.device)).to(value.dtype).expand_as(value)
        if frequency is not None:
            ones = rotate(ones, frequency, times)
        sums = estimate(given["query"], given["key"], ones.contiguous(), **given["rest"])
        if frequency is not None:
            sums = rotate(sums, frequency, times, inverse=True)
            if horizon is not None:
                sums = rotate(sums, frequency * horizon[:, None], torch.ones_like(times), inverse=True)
        parts.append(sums)
    return torch.cat(parts, dim=-1)[0, ..., : -(-(length - start) // block)].double().cpu()


def _turning(attention: Any) -> tuple[Tensor | None, Tensor | None]:
    """The frequencies that turn a layer's values, and its horizon; None where there are none."""
    if not attention.rotate_values:
        return None, None
    if isinstance(attention, DotProductAttention):  # its dynamics, where it learns slopes, do not turn
        return attention.geometry.frequency, None
    held = attention.dynamics()
    return held["frequency"], held.get("horizon")
