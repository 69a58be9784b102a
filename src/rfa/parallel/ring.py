"""A ring of key blocks: each process holds its queries, and the keys and values of all pass by, forward and backward.

With the estimate `out_b` and the log sum `s_b` of each block of keys,

    s = log sum_b exp(s_b),    out = sum_b exp(s_b - s) out_b.

Backward, the blocks pass once more and each is computed again, so that nothing of another process is kept. The
gradients of a block follow it, one step behind, until they are at home.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import Positions
from rfa.ops.problem import Options, Parameters, Problem, RiccatiWeights

States = tuple[Tensor, ...]  # key, value and, with Riccati weights, log gain and cumulative sum


class Shards(NamedTuple):
    """A sequence in equal shards, one for each process of a group, in the order of their ranks.

    Fields:
        group: the processes.
        rank, number: of this process, and how many there are.
        positions: of the whole sequence, whose tokens are keys and queries.
        options: of the operator, the log precision among them.
        backend: of the operator.
    """

    group: dist.ProcessGroup
    rank: int
    number: int
    positions: Positions
    options: Options
    backend: str

    def part(self, rank: int) -> slice:
        """The tokens of a process."""
        length = self.positions.key_times.shape[-1] // self.number
        return slice(rank * length, (rank + 1) * length)

    def sees(self, rank: int) -> bool:
        """Whether this process's queries may see the keys of another: causal ones see no later shard.

        Times rise from shard to shard within a segment. Only an absent token may carry a later time.
        """
        return rank <= self.rank or not self.options.causal

    def between(self, rank: int) -> Positions:
        """Of the keys of a process and the queries of this one."""
        keys = self.positions.keys(self.part(rank))
        return keys.rows(self.part(self.rank))._replace(uniform=False)

    def block(
        self, rank: int, query: Tensor, at_queries: Tensor | None, states: States, parameters: Parameters
    ) -> tuple[Tensor, Tensor]:
        """The estimates from the keys of a process alone, and their log sums."""
        key, value, *weights = states
        riccati = RiccatiWeights(weights[0], weights[1], at_queries) if at_queries is not None else None
        problem = Problem(parameters, self.between(rank), self.options, riccati)
        estimate, log_sum = located_filter_attention(query, key, value, problem, backend=self.backend)
        return estimate, log_sum

    def passed_on(self, tensors: States, kind: Literal["states", "gradients"] = "states") -> "Passing":
        """Start to send these tensors to the next process, and to receive those of the one before."""
        return Passing(self, tensors, 0 if kind == "states" else len(tensors))


class Passing:
    """Tensors on their way to the next process of the ring, while this one computes."""

    def __init__(self, shards: Shards, tensors: States, first_tag: int):
        self.sent = tuple(x.contiguous() for x in tensors)  # kept until they have left
        self.received = tuple(torch.empty_like(x) for x in self.sent)
        after, before = (shards.rank + 1) % shards.number, (shards.rank - 1) % shards.number
        operations = []
        for tag, (mine, theirs) in enumerate(zip(self.sent, self.received, strict=True), first_tag):
            operations.append(dist.P2POp(dist.isend, mine, group=shards.group, group_peer=after, tag=tag))
            operations.append(dist.P2POp(dist.irecv, theirs, group=shards.group, group_peer=before, tag=tag))
        self.works = dist.batch_isend_irecv(operations)

    def arrived(self) -> States:
        """The tensors of the process before, when they are here and the own ones have left."""
        for work in self.works:
            work.wait()
        return self.received


def check_initialised(name: str) -> None:
    """Raise `ValueError` for the argument that needs processes, where there are none."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{name}: torch.distributed is not initialised, expected init_process_group before this call")


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all processes, `(processes, ...)`; without a gradient."""
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


class ContinuedSum(torch.autograd.Function):
    """Cumulative sums `(b, heads, length)` of each shard, continued from those of the shards before."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, cumulative: Tensor) -> Tensor:
        """Arguments: the shards, and the sums from the start of this process's shard."""
        ctx.shards = shards
        totals = gathered(cumulative[..., -1], shards.group)
        return cumulative + totals[: shards.rank].sum(0)[..., None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """The last sum of a shard is part of all sums of the later shards."""
        later = gathered(grad.sum(-1), ctx.shards.group)[ctx.shards.rank + 1 :].sum(0)
        grad = grad.clone()
        grad[..., -1] += later
        return None, grad


class Ring(torch.autograd.Function):
    """The estimates and log precisions of this process's queries from the keys of all.

    Arguments: the shards, the parameters (their tensors follow), the query, C at the queries or None, the number of
    tensors of a block, the block of this process, and the tensors of the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shards: Shards,
        parameters: Parameters,
        query: Tensor,
        at_queries: Tensor | None,
        size: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        states = tensors[:size]
        given = _with_tensors(parameters, tensors[size:])
        dtype = torch.promote_types(query.dtype, torch.float32)
        estimate = query.new_zeros(*query.shape[:3], states[1].shape[-1], dtype=dtype)
        log_sum = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for step in range(shards.number):
            rank = (shards.rank - step) % shards.number
            passing = shards.passed_on(states) if step + 1 < shards.number else None
            if shards.sees(rank):
                part, part_sum = shards.block(rank, query, at_queries, states, given)
                total = torch.logaddexp(log_sum, part_sum)
                estimate = _share(log_sum, total) * estimate + _share(part_sum, total) * part.to(dtype)
                log_sum = total
            if passing is not None:
                states = passing.arrived()
        ctx.shards, ctx.parameters, ctx.size = shards, parameters, size
        ctx.save_for_backward(query, at_queries, *tensors, estimate, log_sum)
        return estimate.to(query.dtype), log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_estimate: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        """`d out_b = w_b d out` and `d s_b = w_b (<d out, out_b - out> + d s)` with `w_b = exp(s_b - s)`."""
        shards: Shards = ctx.shards
        query, at_queries, *tensors, estimate, log_sum = ctx.saved_tensors
        learned = [x for x in (query, at_queries) if x is not None] + tensors[ctx.size :]
        of_query, of_sums, _, *needed = ctx.needs_input_grad[2:]
        wanted = [of_query, of_sums][: 1 if at_queries is None else 2] + needed[ctx.size :]
        wanted += [True, True, *needed[2 : ctx.size]]  # keys and values of another process may need theirs
        total = [torch.zeros_like(x, dtype=_summed(x)) for x in learned]
        grad_estimate = grad_estimate.to(estimate.dtype)
        states = tuple(tensors[: ctx.size])
        gradients = tuple(torch.zeros_like(x, dtype=_summed(x)) for x in states)
        returning = None
        for step in range(shards.number):
            rank = (shards.rank - step) % shards.number
            passing = shards.passed_on(states) if step + 1 < shards.number else None
            found: tuple[Tensor | None, ...] = ()
            if shards.sees(rank):
                leaves = [x.detach().requires_grad_(w) for x, w in zip((*learned, *states), wanted, strict=True)]
                with torch.enable_grad():
                    own, others = leaves[: len(learned)], tuple(leaves[len(learned) :])
                    at = None if at_queries is None else own[1]
                    of_heads = _with_tensors(ctx.parameters, own[1 if at is None else 2 :])
                    part, part_sum = shards.block(rank, own[0], at, others, of_heads)
                weight = _share(part_sum.detach(), log_sum)
                difference = (grad_estimate * (part.detach().to(estimate.dtype) - estimate)).sum(-1)
                grad_sum = weight[..., 0] * (difference + grad_log_sum)
                outputs, sent = (part, part_sum), ((weight * grad_estimate).to(part.dtype), grad_sum)
                asked = [x for x in leaves if x.requires_grad]
                given = iter(torch.autograd.grad(outputs, asked, sent, allow_unused=True))
                found = tuple(next(given) if x.requires_grad else None for x in leaves)
            if returning is not None:
                gradients = returning.arrived()
            for held, new in zip([*total, *gradients], found, strict=False):
                if new is not None:
                    held.add_(new)
            if passing is not None:
                states = passing.arrived()
            if shards.number > 1:
                returning = shards.passed_on(gradients, "gradients")
        if returning is not None:
            gradients = returning.arrived()
        first = 1 if at_queries is None else 2
        of_queries = (total[0].to(query.dtype), None if at_queries is None else total[1])
        home = (new.to(x.dtype) for new, x in zip(gradients, tensors, strict=False))
        of_parameters = (new.to(x.dtype) for new, x in zip(total[first:], tensors[ctx.size :], strict=True))
        return None, None, *of_queries, None, *home, *of_parameters


def _share(part: Tensor, total: Tensor) -> Tensor:
    """`exp(part - total)` for channels, 0 where neither sees a key."""
    return torch.exp(part - total.masked_fill(total == -torch.inf, 0.0))[..., None]


def _summed(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _with_tensors(parameters: Parameters, tensors: list[Tensor] | tuple[Tensor, ...]) -> Parameters:
    """The parameters with other tensors in the order of `Parameters.tensors`."""
    by_name: dict[str, Any] = dict(zip(parameters.tensors(), tensors, strict=True))
    noise = parameters.noise
    if noise is not None:
        by_name["noise"] = type(noise)(*(by_name.pop(name) for name in noise._fields))
    return parameters._replace(**by_name)
