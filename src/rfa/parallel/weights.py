"""Sharded weights: FSDP2 on the decoder's blocks, with the dynamics in full precision under mixed precision."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rfa.checks import require
from rfa.models.decoder import RFABlock
from rfa.nn.dynamics import FullPrecision


def fully_sharded(
    model: nn.Module, mesh: DeviceMesh | None = None, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> nn.Module:
    """`torch.distributed.fsdp.fully_shard` on each block of the decoder and on the model, in place.

    In half precision phases and variances would be wrong. So modules of the dynamics, gates and clocks are groups of
    their own, which a policy does not cast: a few numbers a head.

    Args:
        model: a model with the decoder of `rfa.models`.
        mesh: of one dimension, or of two for replicas of sharded weights; all processes by default.
        mp_policy: the dtypes of the weights in use and of the sums of gradients; float32 by default.
        **options: of `fully_shard`, such as `reshard_after_forward` or `offload_policy`.

    Returns:
        The same model. `torch.distributed.checkpoint` saves it, and loads it on any number of processes.

    Raises:
        ValueError: for a model without such a decoder, or where a policy would cast learned frequencies of a baseline.
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    blocks = [module for module in model.modules() if isinstance(module, RFABlock)]
    require(blocks != [], "model", type(model).__name__, "a model with the decoder of rfa.models")
    for block in blocks:
        for name, module in _precise(block) if policy.param_dtype is not None else ():
            runs = type(module).forward is not nn.Module.forward  # FSDP2 gathers weights when a forward pass begins
            require(runs, "mp_policy", f"{policy.param_dtype} with learned {name}", "param_dtype=None with it")
            own = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
            # its numbers are used after its forward pass too
            fully_shard(module, mesh=mesh, mp_policy=own, **{**options, "reshard_after_forward": False})
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=policy, **options)
    return model


def _precise(block: RFABlock) -> list[tuple[str, FullPrecision]]:
    """The outermost modules in full precision that learn something, by name."""
    found: dict[str, FullPrecision] = {}
    for name, module in block.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, FullPrecision) and not inside and next(module.parameters(), None) is not None:
            found[name] = module
    return list(found.items())
