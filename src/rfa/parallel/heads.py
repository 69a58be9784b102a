"""Tensor parallel: each process computes some of the heads, and a part of the feed-forward networks."""

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rfa.checks import require
from rfa.models.decoder import RFABlock
from rfa.nn import Attention
from rfa.nn.content import ContentDynamics
from rfa.ops.weights import recording


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide the heads and the feed-forward networks of a model among the processes of a mesh, in place.

    Heads do not need each other. Projections to queries, keys and values, the parameters of the SDE, gates and clocks
    are cut by heads, the output projection by its inputs. The sums over the processes are two a block forward, and two
    backward. Embedding, head, norms and the two maps of the decoder remain whole on each process.

    Cut parameters are `DTensor`s, so that `torch.distributed.checkpoint` saves and loads them on any number of
    processes. The weights of the first process are sent to all. Each process is given the same batch. Optimisers and
    `clip_grad_norm_` work inside `torch.distributed.tensor.experimental.implicit_replication()`. Attention weights are
    refused in a forward pass: no process has those of all heads.

    Args:
        model: a model with the decoder of `rfa.models`, on the mesh's device.
        mesh: of one dimension.

    Returns:
        The same model.

    Raises:
        ValueError: for a mesh of more dimensions, or where heads, groups of heads or the feed-forward size are no
            multiple of the number of processes.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053).
    """
    require(mesh.ndim == 1, "mesh", f"{mesh.ndim} dimensions", "one, such as mesh['tensor']")
    blocks = [module for module in model.modules() if isinstance(module, RFABlock)]
    require(blocks != [], "model", type(model).__name__, "a model with the decoder of rfa.models")
    processes = mesh.size()
    for block in blocks:  # all of them before the first is changed
        attention, inner = block.attention, cast(nn.Linear, block.feed_forward[0]).out_features
        groups = attention.num_key_value_heads
        for name, number in (
            ("num_attention_heads", attention.num_heads),
            ("num_key_value_heads", groups),
            ("intermediate_size", inner),
        ):
            fits = number % processes == 0
            require(fits, name, number, f"a multiple of the {processes} processes of tensor parallel")
        whole = attention.gated_heads == attention.num_heads
        require(whole, "gated_heads", "some heads", "all of them with tensor parallel")
    for block in blocks:
        style = {"feed_forward.0": ColwiseParallel(), "feed_forward.2": RowwiseParallel(), "attention": _Heads()}
        parallelize_module(block, mesh, {**style, "attention.output_projection": RowwiseParallel()})
    return model


class _Heads(ParallelStyle):
    """Attention with some of the heads: all but its output projection is cut along the first dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Attention)
        held = list(_cut(module))
        for part in held:
            for name, parameter in part.named_parameters(recurse=False):
                cut = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
                part.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
            for name, buffer in part.named_buffers(recurse=False):
                part.register_buffer(name, distribute_tensor(buffer, device_mesh, [Shard(0)]))
        for holder in (module, *(part for part in held if isinstance(part, ContentDynamics))):
            for name in ("num_heads", "num_key_value_heads", "gated_heads", "heads"):
                if hasattr(holder, name):
                    setattr(holder, name, getattr(holder, name) // device_mesh.size())

        whole: list[tuple[dict[str, Any], str, DTensor]] = []

        def begin(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """The process's own part of each tensor, and inputs whose gradients are summed."""
            expected = "False with tensor parallel: a process has the weights of some heads"
            require(not recording(), "output_attentions", True, expected)
            tables: list[dict[str, Any]] = [each for part in held for each in (part._parameters, part._buffers)]
            for tensors in tables:
                whole.extend((tensors, name, x) for name, x in tensors.items() if isinstance(x, DTensor))
            for tensors, name, x in whole:
                tensors[name] = x.to_local()
            states = {name: _summed(x, device_mesh) for name, x in kwargs.items() if name in _STATES}
            return tuple(_summed(x, device_mesh) for x in args), {**kwargs, **states}

        def end(attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for tensors, name, x in whole:
                tensors[name] = x
            whole.clear()

        module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(end, always_call=True)
        return module


_STATES = ("hidden_states", "query_states")


def _cut(attention: Attention) -> Iterator[nn.Module]:
    """The modules whose tensors have the heads, or the channels of the heads, in their first dimension."""
    for module in attention.modules():
        if module is not attention.output_projection:
            yield module


def _summed(x: Any, mesh: DeviceMesh) -> Any:
    """The same states, whose gradient is the sum over the processes."""
    if not isinstance(x, Tensor):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
