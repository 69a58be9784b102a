"""Context parallel: the filter over a sequence that lies in shards on several processes."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rfa.checks import require
from rfa.dynamics import time_dtype
from rfa.models.packing import NewTokens, packed_segments
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import Positions, check_flags, checked_positions
from rfa.ops.prior import SMALLEST, KeyIntervals, key_intervals, steady_gains
from rfa.ops.problem import Options, Parameters, Prior, Problem, RiccatiWeights, Weight, validate

# A ring of key blocks: each process holds its queries, and the keys and values of all pass by, forward and backward

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
        return keys.rows(self.part(self.rank)).replace(uniform=False)

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


PerToken = dict[str, Any]  # times, key_mask and segment_ids; of a model also position_ids


def ring_filter_attention(
    query: Float[Tensor, "batch heads length channels"],
    key: Float[Tensor, "batch heads length channels"],
    value: Float[Tensor, "batch heads length value_channels"],
    *,
    times: Float[Tensor, "*t length"] | Int[Tensor, "*t length"] | None = None,
    key_mask: Bool[Tensor, "batch length"] | None = None,
    segment_ids: Int[Tensor, "batch length"] | None = None,
    causal: bool = True,
    weight: Weight = "student_t",
    rotate_values: bool = True,
    prior: Prior = "lyapunov",
    gate: bool = True,
    query_noise_in_bias: bool = False,
    return_log_precision: bool = False,
    backend: str = "auto",
    group: dist.ProcessGroup | None = None,
    **dynamics: Any,
) -> (
    Float[Tensor, "batch heads length value_channels"]
    | tuple[Float[Tensor, "batch heads length value_channels"], Float[Tensor, "batch heads length"]]
):
    """`robust_filter_attention` of a sequence in equal shards, one a process, in the order of the ranks.

    Queries stay. Blocks of keys and values go round a ring, and the estimates from them are merged by their log sums:

        s = log sum_b exp(s_b),    out = sum_b exp(s_b - s) out_b.

    A process holds its own shard, the block that passes and the block that arrives, in both directions. Backward
    computes each block again. Times, mask and segments of the whole sequence are gathered: these are at most 24 bytes
    a token. With the Riccati prior the sums C of a shard continue those of the shards before.

    All processes call it together, and all take part in its backward pass, for the same outputs.

    Args:
        query, key, value: of this process's tokens, as of `rfa.robust_filter_attention`.
        times: of this process's tokens; the place in the whole sequence by default. They have no gradient.
        key_mask: of this process's tokens. The estimate of an absent token means nothing: it is that from the shards
            up to its own, whatever its time.
        segment_ids: of this process's tokens. With the Riccati prior the tokens of a segment stand together.
        causal, weight, rotate_values, prior, gate, query_noise_in_bias, return_log_precision, backend: as of
            `rfa.robust_filter_attention`.
        group: the processes; all of them by default.
        **dynamics: the other arguments of `rfa.robust_filter_attention`, `decay` to `inverse_temperature`, `horizon`
            and `noise`, the same on all processes. The gradient on a process is its part. The sum over the processes is
            the whole.

    Returns:
        The filtered values of this process's queries, and their log precision if it is asked for.

    Raises:
        ValueError: as `rfa.robust_filter_attention`, on all processes; also where `torch.distributed` is not
            initialised, and where the shards differ in shape, in dtype, in options or in what is given.

    Source: Liu et al. 2023 (arXiv:2310.01889), for a filter.
    """
    parameters = Parameters(**dynamics, source_rate=None)
    options = Options(causal, weight, rotate_values, prior, gate, query_noise_in_bias, True)
    marks: PerToken = {"times": times, "key_mask": key_mask, "segment_ids": segment_ids}

    def check() -> dict[str, Any]:
        validate(query, key, value, parameters, options)
        batch, heads, length, channels = query.shape
        require(key.shape[2] == length, "key", f"{key.shape[2]} keys", f"{length}, one for each query")
        sizes = {"batch": batch, "length": length, "heads": heads, "channels": channels}
        also = {"value channels": value.shape[-1], "dtype": str(query.dtype), **options._asdict()}
        return sizes | also | {"horizon": parameters.horizon is not None, "noise": parameters.noise is not None}

    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    sequence = whole_sequence(check, device, marks, group, contiguous=prior == "riccati")
    shards = Shards(*sequence, options, backend)
    estimate, log_precision = filtered(query, key, value, parameters, shards)
    return (estimate, log_precision) if return_log_precision else estimate


def filtered(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The estimates and log precisions of this process's queries, `ring_filter_attention` without its checks."""
    states: tuple[Tensor, ...] = (key, value)
    cumulative = None
    if shards.options.prior == "riccati":
        log_gain, cumulative = _riccati_weights(shards, parameters, query.dtype)
        states = (key, value, log_gain, cumulative)
    return Ring.apply(shards, parameters, query, cumulative, len(states), *states, *parameters.tensors().values())


def whole_sequence(
    check: Callable[[], dict[str, Any]],
    device: torch.device,
    marks: PerToken,
    group: dist.ProcessGroup | None,
    contiguous: bool,
) -> tuple[dist.ProcessGroup, int, int, Positions]:
    """The group, this process's rank, the number of processes, and the positions of all tokens.

    Args:
        check: checks what this process was given, and returns the numbers and words in which shards must not differ,
            "batch" and "length" among them.
        device: of the states.
        marks: times, key mask and segments of this process's tokens; also what else says where segments begin.
        group: the processes; None for all.
        contiguous: whether the tokens of a segment have to stand together.

    Raises:
        ValueError: on all processes, if one of them has to.
    """
    check_initialised("group")
    group = dist.group.WORLD if group is None else group
    if group is None or (rank := dist.get_rank(group)) < 0:
        raise ValueError("group: this process is not in it, expected a group of this process")
    refused, alike = None, dict[str, Any]()
    try:
        alike = check()
        _check_marks(alike, device, marks)
    except ValueError as error:  # the others must hear of it: they would wait for this process
        refused = error
    _check_alike(alike, device, marks, group, refused)
    return group, rank, dist.get_world_size(group), _whole_positions(alike, device, marks, group, contiguous)


def _check_marks(sizes: dict[str, Any], device: torch.device, marks: PerToken) -> None:
    times = marks["times"]
    if isinstance(times, Tensor) and times.requires_grad:
        raise ValueError("times: got times with a gradient, expected times without one: shards pass none")
    batch, length = sizes["batch"], sizes["length"]
    checked_positions(batch, length, length, device, times, None, marks["key_mask"], marks["segment_ids"])
    check_flags("position_ids", marks.get("position_ids"), batch, length, device, integer=True)


def _check_alike(
    alike: dict[str, Any], device: torch.device, marks: PerToken, group: dist.ProcessGroup, refused: ValueError | None
) -> None:
    """Raise on all processes where one was refused or where their shards differ: else some would wait for others."""
    kinds = {n: "none" if x is None else f"{x.dtype} {list(x.shape[:-1])}" for n, x in marks.items()}
    said: list[Any] = [None] * dist.get_world_size(group)
    with torch.cuda.device(device if device.type == "cuda" else -1):  # NCCL sends objects by the current device
        dist.all_gather_object(said, None if refused is not None else {**alike, **kinds}, group=group)
    if refused is not None:
        raise refused
    for rank, each in enumerate(said):
        if each is None:
            raise ValueError(f"group: the arguments of rank {rank} were refused, see its error")
    for name in said[0]:
        given = [each[name] for each in said]
        if len(set(given)) > 1:
            raise ValueError(f"group: got {name} {given} on the {len(given)} processes, expected the same on all")


def _whole_positions(
    sizes: dict[str, Any], device: torch.device, marks: PerToken, group: dist.ProcessGroup, contiguous: bool
) -> Positions:
    """Of all tokens. Each process checks the same, so that all raise or none does."""
    batch, total = sizes["batch"], sizes["length"] * dist.get_world_size(group)
    whole = {name: _whole(x, group) for name, x in marks.items()}
    tokens = NewTokens(batch, total, 0, device, whole["key_mask"])
    segment_ids = packed_segments(tokens, whole["segment_ids"], None, whole.get("position_ids"))
    times = whole["times"]
    if times is None and "position_ids" in marks:  # of a model, where padding takes no time
        times = tokens.places()
    positions = checked_positions(batch, total, total, device, times, None, whole["key_mask"], segment_ids)
    groups = positions.query_groups
    if contiguous and groups is not None and total:
        changes = (groups[:, 1:] != groups[:, :-1]).sum(-1)
        if bool((changes != groups.amax(-1)).any()):
            raise ValueError(
                "segment_ids: got a segment in several pieces, expected the tokens of a segment together with "
                "prior='riccati' over several processes"
            )
    return positions.replace(orders=None)


def _whole(given: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
    """`(..., length)` of this process to `(..., all tokens)`."""
    if given is None:
        return None
    kind = torch.uint8 if given.dtype == torch.bool else time_dtype(given.device) if given.is_floating_point() else None
    whole = torch.cat(gathered(given.to(torch.int64 if kind is None else kind), group).unbind(), dim=-1)
    return whole.bool() if given.dtype == torch.bool else whole


def _riccati_weights(shards: Shards, parameters: Parameters, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`log K` of this process's keys and C at them, which continues that of the shards before."""
    intervals, part = key_intervals(shards.positions), shards.part(shards.rank)

    def own(x: Tensor) -> Tensor:
        if intervals.restore is not None:
            x = x.gather(-1, intervals.restore[:, None])
        return x[..., part]

    of_part = KeyIntervals(own(intervals.time), own(intervals.follows), own(intervals.leads), None)
    exact = time_dtype(parameters.decay.device)
    smallest = None if dtype == torch.float64 else SMALLEST
    log_gain, step_down = steady_gains(parameters.to(exact), of_part, exact, smallest)
    return log_gain, ContinuedSum.apply(shards, step_down.cumsum(-1))
