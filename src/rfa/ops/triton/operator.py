"""The operators `rfa::filter_forward` and `rfa::filter_backward`: their launches in order, and who calls them.

Forward: prologue, forward kernel. Backward: delta (with the effects of parameters), keys, queries, epilogue. What a
parameter does not ask for is not computed, nothing waits for the GPU, and nothing is filled with zeros.

A call runs the operator's body from one `torch.autograd.Function`. Only a compiler, a dispatch mode or a transform
gets the registered operator.
"""

import math
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rfa.dynamics import rotation_of_heads
from rfa.ops.positions import Positions
from rfa.ops.prior import eps_of
from rfa.ops.problem import Problem
from rfa.ops.transforms import (
    BODIES,
    forward_mode,
    operator,
    plain,
    refuse_gradient,
    register_gradient,
    transform_error,
)

from . import prologue, tiles
from .backward import key_kernel, query_kernel
from .forward import forward_kernel, windows_kernel
from .parameters import epilogue_kernel
from .prologue import constant, delta_kernel, phase_strides, prologue_kernel

FOLD, TERMS, FUNCTIONALS, SUMS = (x.value for x in (tiles.FOLD, tiles.TERMS, tiles.FUNCTIONALS, tiles.SUMS))
ROWS, EACH = 128, prologue.EACH.value  # rows of a call are padded to as many
# measured on an H100 and an H200 at 16 x 8 x 2,048 x 64 in bfloat16; 8 warps take longer with every kernel
TILES: dict[str, dict[str, Any]] = {
    "forward": {"ROWS": 64, "STAGES": 3, "EDGE_STAGES": 1, "num_warps": 4, "maxnreg": 168},
    "key": {"ROWS": 64, "STAGES": 1, "EDGE_STAGES": 1, "num_warps": 4},
    "wide key": {"ROWS": 32, "STAGES": 1, "EDGE_STAGES": 1, "num_warps": 4},  # of 128 channels: 64 rows would spill
    "query": {"ROWS": 64, "STAGES": 3, "EDGE_STAGES": 1, "num_warps": 4},
    "query without parameters": {"ROWS": 64, "STAGES": 3, "EDGE_STAGES": 1, "num_warps": 4, "maxnreg": 168},
}
THREE_STAGES = 160 * 1024  # bytes of shared memory a block, for 128 channels; cards of 99 KiB hold two stages
LEAST_FACTOR = {torch.bfloat16: 2.0**-12, torch.float16: 2.0**-8}  # of a key within its tile
LEARNED = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")
# The arguments of a call. Tensors as in `KernelInputs` and `Parameters`. `riccati` and `in_bias` are the options of
# these meanings. `keep` says that there will be a backward pass, and `prior` that it is asked for gradients of
# parameters. `eps` is that of certified windows, 0 to visit all keys
_LEAVES = ("query", "key", "value", "decay", *LEARNED)
_OPTIONAL = ("horizon", "key_cos", "key_sin", "query_cos", "query_sin", "key_groups", "query_groups")
_FLAGS = ("rotate_values", "gate", "riccati", "in_bias", "keep", "prior")
_KINDS = {"Tensor": _LEAVES, "Tensor?": _OPTIONAL, "bool": _FLAGS, "float": ("eps",)}
_SCHEMA = ", ".join(f"{kind} {name}" for kind, names in _KINDS.items() for name in names)
_TENSORS, _LEARNED, _PARAMETERS, _OTHERS = 17, slice(4, 10), slice(3, 11), slice(11, 17)
_NO_GRADIENTS = (None,) * len((*_OPTIONAL, *_FLAGS, "eps"))


class Launch:
    """A kernel, whose arguments are tensors, numbers and constants, with all that two calls of one kind share."""

    def __init__(self, kernel: Any, programs: int, numbers: tuple[float, ...], **constants: Any):
        self._kernel, self._programs, self._numbers, self._constants = kernel, programs, numbers, constants
        self._compiled: Any = None

    def __call__(self, stream: int | None, *tensors: Tensor | None) -> None:
        """Launch it; a second time, on a stream of a GPU, without asking what the arguments are."""
        if self._compiled is not None:
            run, function, packed, rest = self._compiled
            run(self._programs, 1, 1, stream, function, packed, None, None, None, *tensors, *rest)
            return
        made = self._kernel[(self._programs,)](*tensors, *self._numbers, **self._constants)
        if stream is not None:
            names = self._kernel.arg_names[len(tensors) + len(self._numbers) :]
            rest = (*self._numbers, *(self._constants[name] for name in names))
            self._compiled = made.run, made.function, made.packed_metadata, rest


class Plan:
    """Sizes of all calls of one kind, and their launches.

    What a call keeps are two buffers, which it cuts into pieces: states in the common frame, and numbers in float32.
    """

    def __init__(self, given: tuple[Any, ...]):
        query, key, value, *_, horizon = given[: _PARAMETERS.stop]
        key_cos, _, query_cos, _, key_groups, _ = given[_OTHERS]
        self.rotate_values, self.gate, self.riccati, self.in_bias, self.keep, self.prior, self.eps = given[_TENSORS:]
        self.batch, self.heads, self.queries, self.channels = query.shape
        self.keys, self.width = value.shape[2:]
        self.rows, self.columns = -(-self.queries // ROWS) * ROWS, -(-self.keys // FOLD) * FOLD
        self.length = self.columns + ROWS + 2 * FOLD
        self.dtype, self.device, self.fast = query.dtype, query.device, query.is_cuda
        self.strides = (*query.stride(), *key.stride(), *value.stride())
        self.turn = key_cos is not None
        self.key_phase, self.query_phase = phase_strides(key_cos), phase_strides(query_cos)
        self.horizon, self.groups = horizon is not None, key_groups is not None
        pairs, distances = self.batch * self.heads, self.columns // FOLD
        self.states = _pieces(  # query, key, value, low
            pairs * self.rows * self.channels, pairs * self.columns * self.channels, pairs * self.columns * self.width,
            pairs * self.queries * self.width * self.keep,
        )  # fmt: skip
        self.numbers = _pieces(
            *(pairs * self.rows,) * 2, *(pairs * self.columns,) * 2,  # of queries and keys, for gradients and estimate
            self.heads * 5 * self.length, self.heads * self.length * TERMS,  # tables, bits in float16
            5 * self.heads, self.heads, self.heads * 3 * FOLD,  # numbers, folds as int32, factors
            pairs * -(-self.queries // FOLD) * (self.eps > 0),  # first_block as int32: the first tile of so many rows
            self.heads * distances * FUNCTIONALS * TERMS**2 * self.prior,  # effects
            self.heads * 2 * FUNCTIONALS * self.length * self.prior,  # pair_effects
        )  # fmt: skip
        blocks = -(-self.queries // TILES["query"]["ROWS"])
        self.scratch = _pieces(  # delta, total, largest, sums of keys and of rows
            *(pairs * self.rows,) * 2, pairs * self.rows // FOLD, pairs * distances * 2, pairs * blocks * SUMS
        )
        self.sizes = sum(self.states), sum(self.numbers), sum(self.scratch)
        self._backward: dict[Any, list[Launch]] = {}

    def _tiles(self, name: str) -> dict[str, Any]:
        """Tiles, stages and warps of a kernel, on the call's device."""
        wide, found = self.channels == 128 or self.width == 128, TILES[name]
        if wide and found["STAGES"] == 3 and self.fast:
            card: Any = torch.cuda.get_device_properties(self.device)  # PyTorch's types lack the limit
            return found | {"STAGES": 3 if card.shared_memory_per_block_optin >= THREE_STAGES else 2}
        return TILES["wide key"] if wide and name == "key" else found

    def results(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Room for what the forward pass returns."""
        shape, (states, numbers, _) = (self.batch, self.heads, self.queries), self.sizes
        out, log_sum = query.new_empty((*shape, self.width)), query.new_empty(shape, dtype=torch.float32)
        return out, log_sum, query.new_empty(states), query.new_empty(numbers, dtype=torch.float32)

    def gradients(self, given: tuple[Any, ...], learns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Room for what the backward pass returns."""
        query, key, value = [x.new_empty(x.shape) for x in given[:3]]
        return query, key, value, query.new_empty((len(LEARNED), self.heads) if learns else 0, dtype=torch.float32)

    def cut(self, states: Tensor, numbers: Tensor) -> list[Tensor]:
        """The pieces of the buffers."""
        pieces = [*states.split_with_sizes(self.states), *numbers.split_with_sizes(self.numbers)]
        pieces[9] = pieces[9].view(torch.float16)
        pieces[11], pieces[13] = pieces[11].view(torch.int32), pieces[13].view(torch.int32)
        return pieces

    def stream(self) -> int | None:
        """The current stream of the call's device; None on a CPU."""
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.device.type == "cuda" else None

    @cached_property
    def constants(self) -> list[Tensor]:
        """What the prologue fits the prior with, and the terms of its expansion."""
        return [constant(name, self.device) for name in ("fit", "functions", "spread", "terms")]

    @cached_property
    def of_parameters(self) -> list[Tensor]:
        """The waves of so many lags, their rates, what fits them, and the polynomials of a tile."""
        longest = max(ROWS, 1 << (self.keys - 1).bit_length())
        kind = str(self.dtype)[6:]
        names = [f"waves-{kind}-{longest}", *(f"{name}-float32-{longest}" for name in ("rates", "fit", "lags"))]
        return [constant(name, self.device) for name in (*names, f"moments-{kind}", "polynomials")]

    @cached_property
    def _shared(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Constants of all kernels, of those that visit pairs and of those that know the prior."""
        every = {"FOLDS": (self.keys - self.queries) % FOLD == 0, "FAST": self.fast}
        pairs = {"CHANNELS": self.channels, "WIDTH": self.width, "GROUPS": self.groups}
        prior = {"FORM": (self.gate, self.riccati, self.in_bias), "HORIZON": self.horizon}
        turns = {"TURN": self.turn, "TURN_VALUES": self.turn and self.rotate_values}
        return {**every, **pairs, "FIRST": self.eps > 0}, {**every, **prior}, turns

    @cached_property
    def forward(self) -> list[Launch]:
        """The launches of the prologue, of certified windows where they are asked for, and of the forward kernel."""
        visits, prior, turns = self._shared
        sizes = (self.heads, self.queries, self.keys, self.rows, self.columns, self.length)
        table_blocks, distances = self.length // FOLD, self.columns // FOLD
        effect_blocks = distances - (-self.length // (2 * FOLD)) if self.prior else 0
        key_blocks, query_blocks = -(-self.columns // (FOLD * EACH)), -(-self.rows // (FOLD * EACH))
        tables = Launch(
            prologue_kernel,
            self.heads * (table_blocks + effect_blocks) + self.batch * self.heads * (key_blocks + query_blocks),
            (
                *self.strides, *self.key_phase, *self.query_phase, *sizes, self.channels // 2, table_blocks,
                key_blocks, query_blocks, effect_blocks, distances,
            ),
            **prior, **turns, CHANNELS=self.channels, WIDTH=self.width, GROUPS=self.groups, EFFECTS=self.prior,
            LEAST_FACTOR=LEAST_FACTOR[self.dtype], num_warps=8,
        )  # fmt: skip
        blocks = -(-self.queries // TILES["forward"]["ROWS"])
        estimate = Launch(
            forward_kernel, self.batch * self.heads * blocks, (*sizes, blocks, *self.query_phase),
            **visits, TURN=turns["TURN_VALUES"], LOW=self.keep, **self._tiles("forward"),
        )  # fmt: skip
        if not self.eps:
            return [tables, estimate]
        windows = Launch(
            windows_kernel, self.batch * self.heads * blocks, (*sizes, blocks, math.log2(self.eps)),
            CHANNELS=self.channels, FOLDS=visits["FOLDS"], FAST=self.fast, num_warps=4,
        )  # fmt: skip
        return [tables, windows, estimate]

    def backward(self, grad_out: Tensor, log_sum: bool, prior: bool) -> list[Launch]:
        """The launches of delta, keys, queries and, with the prior's gradients, the epilogue."""
        kind = (grad_out.stride(), grad_out.data_ptr() % 16, log_sum, prior)
        if kind not in self._backward:
            self._backward[kind] = self._of_gradients(grad_out.stride(), log_sum, prior)
        return self._backward[kind]

    def _of_gradients(self, strides: tuple[int, ...], log_sum: bool, prior: bool) -> list[Launch]:
        visits, of_prior, turns = self._shared
        pairs, sizes = self.batch * self.heads, (self.heads, self.queries, self.keys, self.rows, self.columns)
        tiles_of_query = self._tiles("query" if prior else "query without parameters")
        row_blocks, key_blocks = -(-self.queries // tiles_of_query["ROWS"]), self.columns // FOLD
        launches = [
            Launch(
                delta_kernel, pairs * (self.rows // FOLD),
                (*strides, self.heads, self.queries, self.rows, self.rows // FOLD, *self.query_phase),
                WIDTH=self.width, ROWS=64, TURN=turns["TURN_VALUES"], LOG_SUM=log_sum, LOW=True, num_warps=4,
            ),
            Launch(
                key_kernel, pairs * key_blocks,
                (*sizes, self.length, key_blocks, row_blocks, *self.key_phase),
                **visits, **turns, PRIOR=prior, **self._tiles("key"),
            ),
            Launch(
                query_kernel, pairs * row_blocks,
                (*sizes, self.length, row_blocks, key_blocks, *self.query_phase),
                **visits, TURN=self.turn, PRIOR=prior, **tiles_of_query,
            ),
        ]  # fmt: skip
        if prior:
            numbers = (self.heads, self.batch, row_blocks, key_blocks, self.queries, self.keys, self.channels // 2)
            launches.append(Launch(epilogue_kernel, self.heads, numbers, **of_prior, LOG_SUM=log_sum, num_warps=4))
        return launches


_plans: dict[Any, Plan] = {}
MOST_PLANS = 512


def _plan(given: tuple[Any, ...]) -> Plan:
    """The plan of a call: its kernels are compiled for shapes, strides, dtypes and where states begin.

    Where the other tensors begin does not matter: they are made here, or read one number at a time.
    """
    query, key, value = given[:3]
    key_cos, *_, groups, _ = given[_OTHERS]
    kind = (
        query.shape, query.stride(), query.data_ptr() % 16, key.shape, key.stride(), key.data_ptr() % 16, value.shape,
        value.stride(), value.data_ptr() % 16, query.dtype, key.dtype, value.dtype, query.device, query.is_cuda,
        given[_TENSORS:], groups is None, *[None if x is None else x.dtype for x in given[_PARAMETERS]],
        None if key_cos is None else key_cos.shape,
    )  # fmt: skip
    plan = _plans.get(kind)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[kind] = Plan(given)
    return plan


def _pieces(*sizes: int) -> list[int]:
    """Numbers of the pieces of a buffer: each begins where a kernel may read many at once."""
    return [-(-size // 64) * 64 for size in sizes]


@operator("filter_forward", f"({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)", "cuda", "cpu")
def filter_forward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The estimate, `log2 sum_j 2^z` in float32, and the buffers of states and of numbers for the backward pass."""
    plan, query = _plan(given), given[0]
    key_cos, key_sin, query_cos, query_sin, key_groups, query_groups = given[_OTHERS]
    out, log_sum, states, numbers = found = plan.results(query)
    (
        turned_query, turned_key, turned_value, low, query_norm, query_marked, key_number, key_marked, tables, bits,
        of_heads, folds, factors, first_block, effects, pair_effects,
    ) = plan.cut(states, numbers)  # fmt: skip
    prepare, *windows, estimate = plan.forward
    fit, functions, spread, terms = plan.constants
    with torch.cuda.device_of(query):
        stream = plan.stream()
        prepare(
            stream, *given[:3], key_cos, key_sin, query_cos, query_sin, key_groups, *given[_PARAMETERS], fit, functions,
            spread, turned_query, query_norm, query_marked, turned_key, turned_value, key_number, key_marked, tables,
            bits, of_heads, folds, factors, effects, pair_effects,
        )  # fmt: skip
        for launch in windows:
            launch(stream, turned_query, query_marked, turned_key, key_marked, tables, of_heads, folds, first_block)
        estimate(
            stream, turned_query, query_marked, turned_key, turned_value, key_marked, tables, bits, terms, of_heads,
            folds, key_groups, query_groups, first_block, query_cos, query_sin, out, low, log_sum,
        )  # fmt: skip
    return found


@torch.library.register_fake("rfa::filter_forward")
def _(*given):
    return Plan(given).results(given[0])


@operator(
    "filter_backward",
    "(Tensor grad_out, Tensor? grad_log_sum, Tensor out, Tensor log_sum, Tensor states, Tensor numbers, bool learns, "
    f"{_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    "cuda",
    "cpu",
)
def filter_backward(
    grad_out: Tensor, grad_log_sum: Tensor | None, out: Tensor, log_sum: Tensor, states: Tensor, numbers: Tensor,
    learns: bool, *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and, `(6, heads)`, of the learned parameters; empty where none of them learns."""
    plan, query = _plan(given), given[0]
    key_cos, key_sin, query_cos, query_sin, *groups = given[_OTHERS]
    if grad_log_sum is not None:
        grad_log_sum = grad_log_sum.contiguous()
    (
        turned_query, turned_key, turned_value, low, query_norm, _, key_number, _, tables, bits, of_heads, folds,
        factors, first_block, effects, pair_effects,
    ) = plan.cut(states, numbers)  # fmt: skip
    turned = query.new_empty((plan.batch, plan.heads, plan.rows, plan.width))
    scratch = query.new_empty(plan.sizes[2], dtype=torch.float32)
    delta, total, largest, key_sums, sums = scratch.split_with_sizes(plan.scratch)
    grad_query, grad_key, grad_value, gradients = found = plan.gradients(given, learns)
    waves, rates, fit, lags, functions, polynomials = plan.of_parameters if learns else [None] * 6
    of_delta, of_keys, of_queries, *epilogue = plan.backward(grad_out, grad_log_sum is not None, learns)
    with torch.cuda.device_of(query):
        stream = plan.stream()
        of_delta(stream, grad_out, out, low, log_sum, grad_log_sum, query_cos, query_sin, turned, delta, total, largest)
        shared = (
            turned_query, query_norm, turned_key, turned_value, key_number, turned, delta, total, tables, bits,
            plan.constants[3], of_heads, folds, *groups, first_block,
        )  # fmt: skip
        of_keys(stream, *shared, key_cos, key_sin, factors, grad_key, grad_value, key_sums)
        of_queries(
            stream, *shared, largest, query_cos, query_sin, waves, rates, functions, polynomials, effects, pair_effects,
            grad_query, sums,
        )  # fmt: skip
        for launch in epilogue:
            launch(stream, *given[_PARAMETERS], sums, key_sums, of_heads, folds, grad_log_sum, fit, lags, gradients)
    return found


@torch.library.register_fake("rfa::filter_backward")
def _(grad_out, grad_log_sum, out, log_sum, states, numbers, learns, *given):
    return Plan(given).gradients(given, learns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.flags = inputs[_TENSORS:]


def _gradients(
    ctx: Any, grad_out: Tensor | None, grad_log_sum: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    saved, learns = ctx.saved_tensors, True in ctx.needs_input_grad[_LEARNED]
    kept = saved[_TENSORS:]
    if grad_out is None:
        grad_out = torch.zeros_like(kept[0])
    direct = not torch.is_grad_enabled() and plain(grad_out, grad_log_sum)
    run = _backward_body if direct else filter_backward
    *states, gradients = run(grad_out, grad_log_sum, *kept, learns, *saved[:_TENSORS], *ctx.flags)
    learned: list[Tensor | None] = [None] * 6
    if learns:
        rows = zip(gradients.unbind(), saved[_LEARNED], strict=True)
        learned = [row if row.dtype == x.dtype else row.to(x.dtype) for row, x in rows]
    return *states, None, *learned, *_NO_GRADIENTS


register_gradient(filter_forward, _gradients, _save)
refuse_gradient(filter_backward, "triton")
_forward_body, _backward_body = BODIES["rfa::filter_forward"], BODIES["rfa::filter_backward"]


class _Attention(torch.autograd.Function):
    """The bodies of both operators, of leaves and a tuple of all other arguments: each argument costs time."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *leaves, others = given
        output = _forward_body(*leaves, *others)
        _save(ctx, (*leaves, *others), output)
        return output

    backward = staticmethod(_gradients)  # type: ignore[assignment]


# The public side: which problems are served, and a call


def serves(query: Tensor, problem: Problem) -> bool:
    """Whether these kernels serve a problem: half precision, causal, Student-t, at uniform times, and few gradients.

    Decay, frequencies and horizon have none. In float32 `T - c log2 g` would lose digits where c is large.
    """
    parameters, positions, options, riccati = problem
    fixed = (parameters.decay, parameters.frequency, parameters.horizon)
    return (
        query.dtype in LEAST_FACTOR
        and positions.uniform
        and options.causal
        and options.weight == "student_t"
        and riccati is None
        and parameters.noise is None
        and positions.clock is None
        and (options.prior == "lyapunov" or positions.key_groups is None)
        and not (torch.is_grad_enabled() and True in [x is not None and x.requires_grad for x in fixed])
    )


def filter_attention(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """The estimate in the query's dtype, and `log2 sum_j 2^z` in float32, -inf for a row that sees no key."""
    parameters, positions, options, _ = problem
    direct = plain(query)
    phases = (None,) * 4 if options.in_frame else _phases(parameters.frequency, positions, direct)
    groups = (positions.key_groups, positions.query_groups)
    if groups[0] is not None:
        batch = query.shape[0]
        of_queries = groups[1] if groups[1] is not None else query.new_zeros(batch, query.shape[2], dtype=torch.int32)
        groups = (groups[0].expand(batch, -1).contiguous(), of_queries.expand(batch, -1).contiguous())
    noises = (parameters.process_noise, parameters.key_noise, parameters.query_noise, parameters.noise_floor)
    learned = (*noises, parameters.robustness, parameters.inverse_temperature)
    leaves = (query, key, value, *[x.contiguous() for x in (parameters.decay, *learned)])
    prior = keep = False
    if torch.is_grad_enabled():
        prior = True in [x.requires_grad for x in learned]
        keep = prior or query.requires_grad or key.requires_grad or value.requires_grad
    others = (
        parameters.horizon, *phases, *groups, options.rotate_values, options.gate,
        options.prior == "riccati", options.query_noise_in_bias, keep, prior,
        eps_of(options, query.dtype) if key.shape[2] > 1 else 0.0,
    )  # fmt: skip
    if not direct:
        if forward_mode():  # a compiled caller has not asked again
            raise transform_error("triton")
        out, log_sum, _, _ = filter_forward(*leaves, *others)
    elif keep:
        out, log_sum, _, _ = _Attention.apply(*leaves, others)
    else:
        out, log_sum, _, _ = _forward_body(*leaves, *others)
    return out, log_sum


_made_phases: Any = WeakIdKeyDictionary()
MOST_PHASES = 4  # lengths, of one tensor of frequencies


def _phases(frequency: Tensor, positions: Positions, direct: bool) -> tuple[Tensor, ...]:
    """Cosines and sines at keys and queries, made once for frequencies that stay as they are."""
    keys, queries = positions.key_times.shape[-1], positions.query_times.shape[-1]
    made: dict[Any, tuple[Tensor, ...]] | None = None
    kind = (0, keys, queries)
    if fixed := direct and not frequency.requires_grad and not frequency.is_inference():
        made, kind = _made_phases.get(frequency), (frequency._version, keys, queries)
        if made is not None and kind in made:
            return made[kind]
    with torch.inference_mode(False) if fixed else nullcontext(), torch.no_grad():  # they serve training too
        of_keys = rotation_of_heads(frequency, positions.times_of_heads()[0])
        cos, sin = (x.to(torch.float32).contiguous() for x in of_keys)
        phases = cos, sin, *(x if queries == keys else x[..., keys - queries :, :].contiguous() for x in (cos, sin))
    if fixed:
        if made is None or len(made) >= MOST_PHASES:
            made = _made_phases[frequency] = {}
        made[kind] = phases
    return phases
