"""Sharded weights: FSDP2 on the decoder's blocks, with the dynamics in full precision under mixed precision."""

import os
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rfa.checks import require
from rfa.models.decoder import RFABlock
from rfa.nn.dynamics import FullPrecision

from .ring import check_initialised


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
        ValueError: for a model without such a decoder, where a policy would cast learned frequencies of a baseline, or
            without a mesh where there are no processes.
    """
    if mesh is None and "RANK" not in os.environ:  # torchrun sets it, and PyTorch begins with all its processes then
        check_initialised("mesh")
    policy = replace(MixedPrecisionPolicy() if mp_policy is None else mp_policy, cast_forward_inputs=False)
    blocks = [module for module in model.modules() if isinstance(module, RFABlock)]
    require(blocks != [], "model", type(model).__name__, "a model with the decoder of rfa.models")
    for block in blocks:
        for name, module in _precise(block) if policy.param_dtype is not None else ():
            runs = type(module).forward is not nn.Module.forward  # FSDP2 gathers weights when a forward pass begins
            require(runs, "mp_policy", f"{policy.param_dtype} with learned {name}", "param_dtype=None with it")
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


def _precise(block: RFABlock) -> list[tuple[str, FullPrecision]]:
    """The outermost modules in full precision that learn something, by name."""
    found: dict[str, FullPrecision] = {}
    for name, module in block.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, FullPrecision) and not inside and next(module.parameters(), None) is not None:
            found[name] = module
    return list(found.items())
