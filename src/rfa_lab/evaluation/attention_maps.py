"""Maps of a layer's attention, computed with the layer's own operator."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import turn
from rfa.models import RFAForCausalLM
from rfa.ops.transforms import WeightedRows, recorded_weights

MAP_SIZE = 128
MAP_LENGTHS = 8  # length of the mapped window, in training lengths
_ROUNDING = 1e-4  # of a row's sum, by an operator in float32


def middle_window(tokens: int, length: int) -> slice:
    """The window of `length` tokens in the middle of a text. Raises `ValueError` if the text is too short."""
    if tokens < length:
        raise ValueError(f"attention: got a text of {tokens} tokens, expected at least {length} for a map")
    start = (tokens - length) // 2
    return slice(start, start + length)


@torch.inference_mode()
def attention_maps(
    model: RFAForCausalLM, ids: np.ndarray, train_length: int, size: int = MAP_SIZE, layer: int = -1
) -> tuple[dict[str, Float[np.ndarray, "heads queries keys"]], dict[str, Any]]:
    """The weight of each key in each query's estimate, for every head of a layer, on one window.

    An estimate is linear in the values: `out_i = sum_j W_ij R_ij v_j`, with a rotation R if the layer rotates values.
    The map shows `W_ij = A_ij exp(-mu tau)`, the softmax weight times the decay. A row of A sums to one. A row of W
    sums to `kept`, the fraction that did not decay; it is one in a head without decay.

    The maps of W need linear memory and work for every prior. The layer's own operator gets values that are one on a
    block of keys and zero elsewhere, and returns sums of W over blocks. The rotation of values is undone. Where W
    decays there are the same maps of A, as in the paper's figures 15 and 16: the reference computes it some rows at a
    time.

    Args:
        model: in evaluation mode.
        ids: the window's tokens.
        train_length: training length of the model, in tokens.
        size: maximum number of blocks of queries, and of keys.
        layer: its number from 0, or from the end: -1 is the last layer.

    Returns:
        Maps in float16 and a summary. `weights` is `(heads, blocks, blocks)`: sums over blocks of keys, averaged
        over blocks of queries. `undecayed` is the same of A; a layer in which nothing decays does not have it, because
        there A = W.

        The summary has `length`, `block`, `layer`, and for each head `kept`, `mean_lag` (in tokens, weighted with W)
        and `beyond_training` (the fraction of W that lies more than the training length back). The last two are
        accurate to the width of a block.

    Raises:
        ValueError: for a layer that the model does not have.
    """
    layers = len(model.model.layers)
    if not -layers <= layer < layers:
        raise ValueError(f"layer: got {layer}, expected {-layers} to {layers - 1}")
    layer %= layers
    attention = model.model.layers[layer].attention
    block = -(-len(ids) // size)
    arguments = _estimate_arguments(model, attention, torch.from_numpy(ids.astype(np.int64))[None].to(model.device))
    weights = _block_sums(attention, arguments, block)
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
    maps = {"weights": _block_means(weights, block)}
    if (kept < 1 - _ROUNDING).any():
        maps["undecayed"] = _block_means(_softmax_block_sums(attention, arguments, block), block)
    return {name: of.numpy().astype(np.float16) for name, of in maps.items()}, summary


def _block_means(weights: Tensor, block: int) -> Tensor:
    """Averages over blocks of queries, `(heads, blocks, ...)`."""
    return torch.stack([part.mean(1) for part in weights.split(block, dim=1)], dim=1)


def _estimate_arguments(model: RFAForCausalLM, attention: Any, ids: Tensor) -> dict[str, Any]:
    """The arguments of a layer's `estimate` on these tokens."""
    arguments: dict[str, Any] = {}
    estimate = attention.estimate

    def record(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        arguments.update(query=query, key=key, value=value, rest=rest)
        return estimate(query, key, value, **rest)

    attention.estimate = record  # of this instance, for one forward pass
    try:
        model.model(ids, use_cache=False)
    finally:
        del attention.estimate
    return arguments


def _block_sums(attention: Any, arguments: dict[str, Any], block: int) -> Float[Tensor, "heads length blocks"]:
    """W summed over blocks of keys."""
    estimate, value = attention.estimate, arguments["value"]
    length = value.shape[2]
    index = torch.arange(length, device=value.device)
    turned = attention.value_rotations(**arguments["rest"])
    parts = []
    for first in range(0, length, block * value.shape[-1]):
        of_block = (index - first).div(block, rounding_mode="floor")[:, None]
        ones = (of_block == torch.arange(value.shape[-1], device=value.device)).to(value.dtype).expand_as(value)
        if turned is not None:
            ones = turn(ones, *turned[0])
        sums = estimate(arguments["query"], arguments["key"], ones.contiguous(), **arguments["rest"])
        if turned is not None:
            cos, sin = turned[1]
            sums = turn(sums, cos, -sin)
        parts.append(sums)
    return torch.cat(parts, dim=-1)[0, ..., : -(-length // block)].double().cpu()


def _softmax_block_sums(attention: Any, arguments: dict[str, Any], block: int) -> Float[Tensor, "heads length blocks"]:
    """A summed over blocks of keys."""
    length = arguments["value"].shape[2]
    sums: list[Tensor] = []

    def note(rows: WeightedRows) -> None:
        weights = F.pad(rows.weights[0], (0, -length % block))
        sums.append(weights.unflatten(-1, (-1, block)).sum(-1, dtype=torch.float64).cpu())

    with recorded_weights(note):
        attention.estimate(arguments["query"], arguments["key"], arguments["value"], **arguments["rest"])
    return torch.cat(sums, dim=1)
