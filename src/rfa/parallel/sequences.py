"""Context parallel of a model: its layers filter a sequence of which each process holds a shard."""

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GenericForSequenceClassification

from rfa.checks import require
from rfa.models import RFAModel
from rfa.models.decoder import RFABlock
from rfa.models.modeling import refuse_unknown
from rfa.models.packing import CACHE_NAMES, read_key_mask
from rfa.nn import Attention, RobustFilterAttention
from rfa.nn.checks import check_ids
from rfa.nn.dynamics import FullPrecision
from rfa.ops.positions import Positions, check_tensor
from rfa.ops.problem import Options, Parameters

from .context import Shards, check_initialised, filtered, whole_sequence

_PLACES = ("times", "segment_ids", "position_ids")  # of tokens in the whole sequence


def sequence_shard(
    sequence: Shaped[Tensor, "*sequence"], group: dist.ProcessGroup | None = None
) -> Shaped[Tensor, "*shard"]:
    """This process's shard of a sequence: ids, times, segments or targets.

    Args:
        sequence: the whole, its tokens along the second dimension; `(length,)` where all rows have the same times.
        group: the processes; all of them by default.

    Raises:
        ValueError: if the length is no multiple of the number of processes.
    """
    check_initialised("group")
    check_tensor("sequence", sequence)
    dimension = min(1, sequence.dim() - 1)
    number, length = dist.get_world_size(group), sequence.shape[dimension]
    require(length % number == 0, "sequence", f"length {length}", f"a multiple of the {number} processes")
    return sequence.chunk(number, dim=dimension)[dist.get_rank(group)]


def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let the layers of a language model filter a whole sequence of which each process has a shard, in place.

    From then on the model's inputs are those of this process's tokens, as `sequence_shard` gives them: ids, mask,
    times, and segments or `position_ids` that restart where packed documents begin. Positions count along the whole
    sequence, and layers attend across shards by `ring_filter_attention`. The other parts of the model
    treat each token alone. Logits are those of this process's tokens.

    A loss needs targets that were shifted before they were cut: `labels` are refused. The loss of a process is its sum
    over scored tokens, divided by the number of scored tokens of all processes. The sum of its gradients over the
    processes is the gradient of the mean loss. `DistributedDataParallel` and `fully_sharded` over the same processes
    average them, so multiply the loss by the number of processes.

    Args:
        model: an `RFAModel`, or a model with one inside. It is for training and scoring: caches and attention weights
            are refused.
        group: the processes; all of them by default.

    Returns:
        The same model.

    Raises:
        ValueError: for attention that needs more than keys and values of other shards: dot products, a content clock,
            routing, dropout. Also for a classifier of sequences, whose head needs the last token of all shards.
    """
    layers = [_checked(module.attention) for module in model.modules() if isinstance(module, RFABlock)]
    models = [module for module in model.modules() if isinstance(module, RFAModel)]
    require(len(models) == 1, "model", type(model).__name__, "one RFAModel, or a model with one inside")
    pools = any(isinstance(module, GenericForSequenceClassification) for module in model.modules())
    require(not pools, "model", type(model).__name__, "a head that treats each token alone")
    placed: dict[str, Shards] = {}
    if model is not models[0]:
        model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)
    hook = partial(_place, placed=placed, group=group, options=layers[0].options)
    models[0].register_forward_pre_hook(hook, with_kwargs=True)
    models[0].run_blocks = partial(_run_blocks, models[0].run_blocks, placed)  # type: ignore[method-assign]
    for layer in layers:
        layer.estimate = partial(_estimate, layer)  # type: ignore[method-assign]
    return model


def _checked(layer: Attention) -> RobustFilterAttention:
    name = type(layer).__name__
    require(isinstance(layer, RobustFilterAttention), "attention", name, "RobustFilterAttention over shards")
    assert isinstance(layer, RobustFilterAttention)
    others = {"clock": layer.clock is not None, "dropout": layer.dropout > 0}
    others["routing"] = layer.aggregation == "routing"
    found = ", ".join(name for name, has in others.items() if has)
    require(not found, "attention", found, "none of clock, routing and dropout over shards")
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
    """Locate the tokens of all shards, once for all layers. The model itself is told where tokens are absent."""
    signature = inspect.signature(model.forward)
    given, known = dict(signature.bind_partial(*args, **kwargs).arguments), signature.parameters
    given.update(given.pop("kwargs", {}))
    states = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    device, mask = getattr(states, "device", torch.device("cpu")), given.get("attention_mask")
    marks = {name: given.get(name) for name in _PLACES}
    marks["key_mask"] = mask == 1 if isinstance(mask, Tensor) else mask

    def check() -> dict[str, Any]:
        check_tensor("input_ids", states)
        assert isinstance(states, Tensor)
        batch, length = states.shape[:2]
        refuse_unknown({name: x for name, x in given.items() if name not in known})
        read_key_mask(mask, batch, length)
        if given.get("input_ids") is not None:
            check_ids("input_ids", states, model.config.vocab_size)
        for name in CACHE_NAMES:
            require(given.get(name) is None, name, type(given.get(name)).__name__, "None over shards")
        weights = given.get("output_attentions")
        weights = model.config.output_attentions if weights is None else weights
        require(not weights, "output_attentions", weights, "False over shards")
        if isinstance(row := marks["position_ids"], Tensor) and tuple(row.shape) in ((length,), (1, length)):
            marks["position_ids"] = row.expand(batch, length)  # one row stands for all
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        types = {"dtype": str(model.dtype), "autocast": str(half)}
        return {"batch": batch, "length": length, **types, **options._asdict()}

    placed["next"] = Shards(
        *whole_sequence(check, device, marks, group, contiguous=options.prior == "riccati"), options, "auto"
    )
    return (), {**{name: x for name, x in given.items() if name not in _PLACES}, "use_cache": False}


def _run_blocks(
    run_blocks: Callable[..., Tensor],
    placed: dict[str, Shards],
    embedded: Tensor,
    positions: Positions,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The shards of this call go with its positions, so that gradient checkpointing computes with the same again."""
    return run_blocks(embedded, positions.replace(shards=placed.pop("next")), *args, **kwargs)


def _estimate(
    layer: RobustFilterAttention, query: Tensor, key: Tensor, value: Tensor, *, positions: Positions, **given: Any
) -> Tensor:
    """`RobustFilterAttention.estimate` over the keys of all shards."""
    dynamics, options = layer.dynamics(), layer.options._replace(log_precision=True)
    shards = cast(Shards, positions.shards)._replace(options=options, backend=layer.backend)
    estimate, log_precision = filtered(query, key, value, Parameters(**dynamics), shards)
    if layer.step == "learned":
        return estimate
    return layer.stepped(value, estimate, log_precision, dynamics["query_noise"])


# Sharded weights: FSDP2 on the decoder's blocks, with the dynamics in full precision under mixed precision


def fully_sharded(
    model: nn.Module, mesh: DeviceMesh | None = None, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> nn.Module:
    """`torch.distributed.fsdp.fully_shard` on each block of the decoder and on the model, in place.

    In half precision phases and variances would be wrong. So modules of the dynamics, gates and clocks are groups of
    their own, which a policy does not cast: a few numbers a head. Times are not cast either: bfloat16 has 8 bits, and
    256 and 257 would be one time. Under a policy each linear map and norm casts its own input.

    Args:
        model: a model with the decoder of `rfa.models`.
        mesh: of one dimension, or of two for replicas of sharded weights; all processes by default.
        mp_policy: the dtypes of the weights in use and of the sums of gradients; float32 by default.
        **options: of `fully_shard`, such as `reshard_after_forward` or `offload_policy`.

    Returns:
        The same model. `torch.distributed.checkpoint` saves it, and loads it on any number of processes.

    Raises:
        ValueError: for a model without such a decoder, or without a mesh where there are no processes.
    """
    if mesh is None and "RANK" not in os.environ:  # torchrun sets it, and PyTorch begins with all its processes then
        check_initialised("mesh")
    policy = replace(MixedPrecisionPolicy() if mp_policy is None else mp_policy, cast_forward_inputs=False)
    blocks = [module for module in model.modules() if isinstance(module, RFABlock)]
    require(blocks != [], "model", type(model).__name__, "a model with the decoder of rfa.models")
    for block in blocks:
        for module in _precise(block) if policy.param_dtype is not None else ():
            own = replace(policy, param_dtype=None, output_dtype=None)
            # its numbers are used after its forward pass too
            fully_shard(module, mesh=mesh, mp_policy=own, **{**options, "reshard_after_forward": False})
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    precise = {part for module in model.modules() if isinstance(module, FullPrecision) for part in module.modules()}
    for part in model.modules() if policy.param_dtype is not None else ():
        if isinstance(part, nn.Linear | nn.LayerNorm) and part not in precise:
            part.register_forward_pre_hook(_cast_inputs)
    fully_shard(model, mesh=mesh, mp_policy=policy, **options)
    return model


def _cast_inputs(module: nn.Linear | nn.LayerNorm, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """In the precision that the weights have while they are gathered."""
    return tuple(x.to(module.weight.dtype) for x in args)


def _precise(block: RFABlock) -> list[FullPrecision]:
    """The outermost modules in full precision that learn something."""
    found: dict[str, FullPrecision] = {}
    for name, module in block.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, FullPrecision) and not inside and next(module.parameters(), None) is not None:
            found[name] = module
    return list(found.values())
