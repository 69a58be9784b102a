"""Context parallel of a model: its layers filter a sequence of which each process holds a shard."""

import inspect
from functools import partial
from typing import Any

import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from rfa.checks import require
from rfa.models import RFAModel
from rfa.models.decoder import RFABlock
from rfa.nn import Attention, RobustFilterAttention
from rfa.ops.problem import Options, Parameters

from .context import filtered, whole_sequence
from .ring import Shards


def sequence_shard(
    sequence: Shaped[Tensor, "batch length *rest"], group: dist.ProcessGroup | None = None
) -> Shaped[Tensor, "batch shard *rest"]:
    """This process's shard of a sequence: ids, times, segments or targets.

    Args:
        sequence: the whole, its tokens along the second dimension.
        group: the processes; all of them by default.

    Raises:
        ValueError: if the length is no multiple of the number of processes.
    """
    number, length = dist.get_world_size(group), sequence.shape[1]
    require(length % number == 0, "sequence", f"length {length}", f"a multiple of the {number} processes")
    return sequence.chunk(number, dim=1)[dist.get_rank(group)]


def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let the layers of a language model filter a whole sequence of which each process has a shard, in place.

    From then on the model's inputs are those of this process's tokens, as `sequence_shard` gives them: ids, mask,
    times and segments. Positions count along the whole sequence, and layers attend across shards by
    `ring_filter_attention`. The other parts of the model treat each token alone. Logits are those of this process's
    tokens. A loss needs targets that were shifted before they were cut: `labels` are refused.

    `DistributedDataParallel` or `fully_sharded` over the same processes average the gradients. With the mean loss of
    each shard that is the gradient of the mean loss of the whole.

    Args:
        model: an `RFAModel`, or a model with one inside. It is for training and scoring: caches are refused.
        group: the processes; all of them by default.

    Returns:
        The same model.

    Raises:
        ValueError: for attention that needs more than keys and values of other shards: dot products, a content clock,
            taps, routing, dropout.
    """
    layers = [_checked(module.attention) for module in model.modules() if isinstance(module, RFABlock)]
    models = [module for module in model.modules() if isinstance(module, RFAModel)]
    require(len(models) == 1, "model", type(model).__name__, "one RFAModel, or a model with one inside")
    placed: dict[str, Shards] = {}
    if model is not models[0]:
        model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)
    hook = partial(_place, placed=placed, group=group, options=layers[0].options)
    models[0].register_forward_pre_hook(hook, with_kwargs=True)
    for layer in layers:
        layer.estimate = partial(_estimate, layer, placed)  # type: ignore[method-assign]
    return model


def _checked(layer: Attention) -> RobustFilterAttention:
    name = type(layer).__name__
    require(isinstance(layer, RobustFilterAttention), "attention", name, "RobustFilterAttention over shards")
    assert isinstance(layer, RobustFilterAttention)
    others = {"clock": layer.clock is not None, "taps": layer.taps is not None, "dropout": layer.dropout > 0}
    others["routing"] = layer.aggregation == "routing"
    found = ", ".join(name for name, has in others.items() if has)
    require(not found, "attention", found, "none of clock, taps, routing and dropout over shards")
    return layer


def _refuse_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    require(given.get("labels") is None, "labels", "labels", "none over shards: shift targets before they are cut")


def _place(
    model: RFAModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    placed: dict[str, Shards],
    group: dist.ProcessGroup | None,
    options: Options,
) -> tuple[tuple[()], dict[str, Any]]:
    """Locate the tokens of all shards, once for all layers."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    given = {**bound, **bound.pop("kwargs", {})}
    require(given.get("past_key_values") is None, "past_key_values", "a cache", "None over shards")
    states = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    mask = given.get("attention_mask")
    names = {"times": given.get("times"), "key_mask": None if mask is None else mask.bool()}
    names["segment_ids"] = given.get("segment_ids")

    def sizes() -> dict[str, int]:
        return {"batch": states.shape[0], "length": states.shape[1]}

    sequence = whole_sequence(sizes, states.device, names, group, contiguous=options.prior == "riccati")
    placed["shards"] = Shards(*sequence, options, "auto")
    return (), {**given, "use_cache": False}


def _estimate(
    layer: RobustFilterAttention, placed: dict[str, Shards], query: Tensor, key: Tensor, value: Tensor, **given: Any
) -> Tensor:
    """`RobustFilterAttention.estimate` over the keys of all shards."""
    dynamics, options = layer.dynamics(), layer.options._replace(log_precision=True)
    shards = placed["shards"]._replace(options=options, backend=layer.backend)
    estimate, log_precision = filtered(query, key, value, Parameters(**dynamics), shards)
    if layer.step == "learned":
        return estimate
    return layer.stepped(value, estimate, log_precision, dynamics["query_noise"])
