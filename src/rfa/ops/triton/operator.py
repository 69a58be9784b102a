"""The registered operators `rfa::filter_forward` and `rfa::filter_backward`, and their launches in order.

Forward: prologue, forward kernel. Backward: delta (with the effects of parameters), keys, queries, epilogue. What a
parameter does not ask for is not computed, nothing waits for the GPU, and nothing is filled with zeros.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rfa.dynamics import rotation_of_heads
from rfa.ops.problem import Parameters, Problem
from rfa.ops.transforms import operator, readable, refuse_forward_mode, register_gradient

from . import prologue, tiles
from .backward import key_kernel, query_kernel
from .forward import forward_kernel
from .parameters import epilogue_kernel
from .prologue import constant, delta_kernel, prologue_kernel

FOLD, TERMS, FUNCTIONALS, SUMS = (x.value for x in (tiles.FOLD, tiles.TERMS, tiles.FUNCTIONALS, tiles.SUMS))
ROWS, EACH = 128, prologue.EACH.value  # rows of a call are padded to as many
# measured on an H100 at 16 x 8 x 2,048 x 64 in bfloat16; 8 warps take longer with every kernel
TILES: dict[str, dict[str, Any]] = {
    "forward": {"ROWS": 64, "STAGES": 3, "EDGE_STAGES": 1, "num_warps": 4, "maxnreg": 168},
    "key": {"ROWS": 64, "STAGES": 1, "EDGE_STAGES": 1, "num_warps": 4},
    "query": {"ROWS": 64, "STAGES": 2, "EDGE_STAGES": 1, "num_warps": 4},
    "query without parameters": {
        "ROWS": 64, "STAGES": 3, "EDGE_STAGES": 1, "num_warps": 4, "maxnreg": 168,
    },
}  # fmt: skip
LEAST_FACTOR = {torch.bfloat16: 2.0**-12, torch.float16: 2.0**-8, torch.float32: 1.0}
NAMES = ("decay", "process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")
LEARNED = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")
_FLAGS = ("rotate_values", "gate", "riccati", "in_bias", "keep", "prior")
_GIVEN = ("query", "key", "value", "key_cos", "key_sin", "query_cos", "query_sin", "key_groups", "query_groups")
_TENSORS = (*_GIVEN, "first_block", *NAMES, "horizon")
_OPTIONAL = (*_GIVEN[3:], "first_block", "horizon")
_SCHEMA = ", ".join(f"Tensor{'?' if name in _OPTIONAL else ''} {name}" for name in _TENSORS)
_SCHEMA += ", " + ", ".join(f"bool {name}" for name in _FLAGS)
_LEARNED_AT = tuple(_TENSORS.index(name) for name in LEARNED)


class Call(NamedTuple):
    """The arguments of the operator. Tensors as in `KernelInputs` and `Parameters`.

    Fields beside these:
        first_block: `(1 or batch, heads, blocks of 64 rows)` int32, the first tile of 64 keys that a block visits; it
            never falls. None: all tiles.
        riccati, in_bias: the options of these meanings.
        keep, prior: what the backward pass needs is returned too; and that of the parameters' gradients.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_cos: Tensor | None
    key_sin: Tensor | None
    query_cos: Tensor | None
    query_sin: Tensor | None
    key_groups: Tensor | None
    query_groups: Tensor | None
    first_block: Tensor | None
    decay: Tensor
    process_noise: Tensor
    key_noise: Tensor
    query_noise: Tensor
    noise_floor: Tensor
    robustness: Tensor
    inverse_temperature: Tensor
    horizon: Tensor | None
    rotate_values: bool
    gate: bool
    riccati: bool
    in_bias: bool
    keep: bool
    prior: bool


class Plan:
    """Sizes, compile-time choices and compiled kernels of all calls of one kind."""

    def __init__(self, call: Call, launches: bool = True):
        query, value = call.query, call.value
        self.batch, self.heads, self.queries, self.channels = query.shape
        self.keys, self.width = value.shape[2:]
        self.rows, self.columns = -(-self.queries // ROWS) * ROWS, -(-self.keys // FOLD) * FOLD
        self.length = self.columns + ROWS + 2 * FOLD
        self.modes, self.dtype, self.device = self.channels // 2, query.dtype, query.device
        self.fast = query.is_cuda
        self.turn = call.key_cos is not None
        first = call.first_block
        self.first_stride = 0 if first is None or first.shape[0] == 1 else first.shape[1]
        self.key_phase, self.query_phase = _phase_strides(call.key_cos), _phase_strides(call.query_cos)
        self.folds = self.dtype != torch.float32 and (self.keys - self.queries) % FOLD == 0
        self.prior = {
            "GATE": call.gate, "RICCATI": call.riccati, "IN_BIAS": call.in_bias, "HORIZON": call.horizon is not None,
            "FOLDS": self.folds, "FAST": self.fast,
        }  # fmt: skip
        self.shared = {
            "CHANNELS": self.channels, "WIDTH": self.width, "GROUPS": call.key_groups is not None,
            "FOLDS": self.folds, "FAST": self.fast,
        }  # fmt: skip
        self.turns = {"TURN": self.turn, "TURN_VALUES": self.turn and call.rotate_values}
        if launches:
            self.matrices = [constant(name, self.device) for name in ("fit", "functions", "spread")]
            self.terms = constant("terms", self.device)
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An empty tensor on the device of the call."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], **constants: Any) -> None:
        """Launch a kernel; a second time without asking what the arguments are."""
        name = kernel, constants.get("LOG_SUM")
        found = self._compiled.get(name)
        if found is None:
            made = kernel[(programs,)](*arguments, **constants)
            if self.fast:
                self._compiled[name] = made, tuple(constants[n] for n in kernel.arg_names[len(arguments) :])
        else:
            found[0][(programs, 1, 1)](*arguments, *found[1])


_plans: dict[Any, Plan] = {}
MOST_PLANS = 512


def _plan(call: Call, *more: Tensor) -> Plan:
    """The plan of a call: its kernels are compiled for shapes, strides and where states begin.

    Where the other tensors begin does not matter: they are made here, or read one number at a time.
    """
    told = [(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in (*call[:3], *more)]
    given = [None if x is None else x.dtype for x in call[10:18]]
    phases = None if call.key_cos is None else call.key_cos.shape[:2]
    first = None if call.first_block is None else call.first_block.shape
    key = (*told, *given, phases, call.key_groups is None, first, *call[18:], call.query.device)
    if key not in _plans:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = Plan(call)
    return _plans[key]


def _phase_strides(phases: Tensor | None) -> tuple[int, int]:
    if phases is None:
        return 0, 0
    return (0 if phases.shape[0] == 1 else phases.stride(0)), (0 if phases.shape[1] == 1 else phases.stride(1))


@operator("filter_forward", f"({_SCHEMA}) -> ({', '.join(['Tensor'] * 15)})", "cuda", "cpu")
def filter_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """The estimate, `log2 sum_j 2^z` in float32 and what the backward pass reads, empty unless it is kept."""
    refuse_forward_mode("triton")
    call = Call(*arguments)
    plan = _plan(call)
    new, dtype, shape = plan.new, plan.dtype, (plan.batch, plan.heads)
    rows, columns, length, heads = plan.rows, plan.columns, plan.length, plan.heads
    query, key = new(*shape, rows, plan.channels, dtype=dtype), new(*shape, columns, plan.channels, dtype=dtype)
    value = new(*shape, columns, plan.width, dtype=dtype)
    query_norms, key_numbers = new(2, *shape, rows), new(2, *shape, columns)
    tables, bits = new(heads, 5, length), new(heads, length, 2 * TERMS, dtype=torch.float16)
    numbers, folds, factors = new(3, heads), new(heads, dtype=torch.int32), new(heads, 3, FOLD)
    out, log_sum = new(*shape, plan.queries, plan.width, dtype=dtype), new(*shape, plan.queries)
    low = new(*out.shape, dtype=torch.float16 if dtype == torch.float32 else dtype) if call.keep else new(0)
    distances, functionals = columns // FOLD, FUNCTIONALS
    effects = new(heads, distances, functionals, TERMS * TERMS) if call.prior else new(0)
    pair_effects = new(heads, 2, functionals, length) if call.prior else new(0)
    table_blocks, effect_blocks = length // FOLD, (distances - (-length // (2 * FOLD))) if call.prior else 0
    key_blocks, query_blocks = -(-columns // (FOLD * EACH)), -(-rows // (FOLD * EACH))
    with torch.cuda.device_of(out):
        plan.launch(
            prologue_kernel,
            heads * (table_blocks + effect_blocks) + plan.batch * heads * (key_blocks + query_blocks),
            (
                *call[:8], *call[10:18], *plan.matrices, query, query_norms[0], query_norms[1], key, value,
                key_numbers[0], key_numbers[1], tables, bits, numbers, folds, factors, effects, pair_effects,
                *call.query.stride(), *call.key.stride(), *call.value.stride(), *plan.key_phase, *plan.query_phase,
                heads, plan.queries, plan.keys, rows, columns, length, plan.modes, table_blocks, key_blocks,
                query_blocks, effect_blocks, distances,
            ),
            CHANNELS=plan.channels, WIDTH=plan.width, GROUPS=call.key_groups is not None, **plan.turns, **plan.prior,
            EFFECTS=call.prior, LEAST_FACTOR=LEAST_FACTOR[dtype], num_warps=8,
        )  # fmt: skip
        blocks = -(-plan.queries // TILES["forward"]["ROWS"])
        plan.launch(
            forward_kernel,
            plan.batch * heads * blocks,
            (
                query, query_norms[1], key, value, key_numbers[1], tables, bits, plan.terms,
                numbers, folds, call.key_groups, call.query_groups, call.first_block, call.query_cos, call.query_sin,
                out, low, log_sum, heads, plan.queries, plan.keys, rows, columns, length, blocks, plan.first_stride,
                *plan.query_phase,
            ),
            TURN=plan.turns["TURN_VALUES"], LOW=call.keep, FIRST=call.first_block is not None, **plan.shared,
            **TILES["forward"],
        )  # fmt: skip
    kept = (
        low,
        query,
        query_norms,
        key,
        value,
        key_numbers,
        tables,
        bits,
        numbers,
        folds,
        factors,
        effects,
        pair_effects,
    )
    return (out, log_sum, *(kept if call.keep else (new(0) for _ in kept)))


@torch.library.register_fake("rfa::filter_forward")
def _(*arguments):
    call = Call(*arguments)
    plan = Plan(call, launches=False)
    new, dtype, shape = call.query.new_empty, plan.dtype, (plan.batch, plan.heads)
    estimate = new(*shape, plan.queries, plan.width), new(*shape, plan.queries, dtype=torch.float32)
    if not call.keep:
        return (*estimate, *(new(0, dtype=torch.float32) for _ in range(13)))
    rounded = torch.float16 if dtype == torch.float32 else dtype
    of_tiles, of_lags = (
        (plan.heads, plan.columns // FOLD, FUNCTIONALS, TERMS**2),
        (plan.heads, 2, FUNCTIONALS, plan.length),
    )
    kept: list[tuple[Any, torch.dtype]] = [
        ((*shape, plan.queries, plan.width), rounded),
        ((*shape, plan.rows, plan.channels), dtype), ((2, *shape, plan.rows), torch.float32),
        ((*shape, plan.columns, plan.channels), dtype), ((*shape, plan.columns, plan.width), dtype),
        ((2, *shape, plan.columns), torch.float32), ((plan.heads, 5, plan.length), torch.float32),
        ((plan.heads, plan.length, 2 * TERMS), torch.float16), ((3, plan.heads), torch.float32),
        ((plan.heads,), torch.int32), ((plan.heads, 3, FOLD), torch.float32),
        *((size if call.prior else (0,), torch.float32) for size in (of_tiles, of_lags)),
    ]  # fmt: skip
    return (*estimate, *(new(size, dtype=kind) for size, kind in kept))


_SAVED = "out log_sum low turned_query query_norms turned_key turned_value key_numbers tables bits"
_SAVED += " numbers folds factors effects pair_effects"


@operator(
    "filter_backward",
    f"(Tensor grad_out, Tensor? grad_log_sum, {', '.join(f'Tensor {n}' for n in _SAVED.split())}, bool prior, "
    f"{_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    "cuda",
    "cpu",
)
def filter_backward(
    grad_out: Tensor, grad_log_sum: Tensor | None, out: Tensor, log_sum: Tensor, low: Tensor, query: Tensor,
    query_norms: Tensor, key: Tensor, value: Tensor, key_numbers: Tensor, tables: Tensor, bits: Tensor,
    numbers: Tensor, folds: Tensor, factors: Tensor, effects: Tensor, pair_effects: Tensor, prior: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and, `(6, heads)`, of the learned parameters; empty without `prior`."""
    call = Call(*arguments)
    plan = _plan(call, grad_out)
    new, shape, heads, dtype = plan.new, (plan.batch, plan.heads), plan.heads, plan.dtype
    queries, keys, rows, columns, length = plan.queries, plan.keys, plan.rows, plan.columns, plan.length
    if grad_log_sum is not None:
        grad_log_sum = grad_log_sum.contiguous()
    turned, row_numbers = new(*shape, rows, plan.width, dtype=dtype), new(2, *shape, rows)
    delta, total, largest = row_numbers[0], row_numbers[1], new(*shape, rows // 64)
    grad_query = new(*shape, queries, plan.channels, dtype=dtype)
    grad_key, grad_value = new(*shape, keys, plan.channels, dtype=dtype), new(*shape, keys, plan.width, dtype=dtype)
    gradients = new(len(LEARNED), heads) if prior else new(0)
    terms, parameters = plan.terms, call[10:18]
    tiles_of_query = TILES["query" if prior else "query without parameters"]
    row_blocks, key_blocks = -(-queries // tiles_of_query["ROWS"]), columns // FOLD
    with torch.cuda.device_of(out):
        plan.launch(
            delta_kernel,
            plan.batch * heads * (rows // 64),
            (
                grad_out, out, low, log_sum, grad_log_sum, call.query_cos, call.query_sin, turned, delta, total,
                largest, *grad_out.stride(), heads, queries, rows, rows // 64, *plan.query_phase,
            ),
            WIDTH=plan.width, ROWS=64, TURN=plan.turns["TURN_VALUES"], LOG_SUM=grad_log_sum is not None, LOW=True,
            num_warps=4,
        )  # fmt: skip
        waves, rates, fit, lags, functions, polynomials = _waves(plan) if prior else [None] * 6
        key_sums = new(*shape, key_blocks, 2) if prior else None
        sums = new(*shape, row_blocks, SUMS) if prior else None
        plan.launch(
            key_kernel,
            plan.batch * heads * key_blocks,
            (
                query, query_norms[0], key, value, key_numbers[0], turned, delta, total, largest, tables, bits,
                terms, numbers, folds, call.key_groups, call.query_groups, call.first_block, call.key_cos, call.key_sin,
                factors, grad_key, grad_value, key_sums, heads, queries, keys, rows, columns, length, key_blocks,
                row_blocks, plan.first_stride, *plan.key_phase,
            ),
            FIRST=call.first_block is not None, **plan.turns, PRIOR=prior, **plan.shared, **TILES["key"],
        )  # fmt: skip
        plan.launch(
            query_kernel,
            plan.batch * heads * row_blocks,
            (
                query, query_norms[0], key, value, key_numbers[0], turned, delta, total, largest, tables, bits, terms,
                numbers, folds, call.key_groups, call.query_groups, call.first_block, call.query_cos, call.query_sin,
                waves, rates, functions, polynomials, effects, pair_effects, grad_query, sums, heads, queries, keys,
                rows, columns, length, row_blocks, key_blocks, plan.first_stride, *plan.query_phase,
            ),
            FIRST=call.first_block is not None, TURN=plan.turn, PRIOR=prior, **plan.shared, **tiles_of_query,
        )  # fmt: skip
        if prior:
            plan.launch(
                epilogue_kernel,
                heads,
                (
                    *parameters, sums, key_sums, numbers, folds, grad_log_sum, fit, lags, gradients, heads, plan.batch,
                    row_blocks, key_blocks, queries, keys, plan.modes,
                ),
                **plan.prior, LOG_SUM=grad_log_sum is not None, num_warps=4,
            )  # fmt: skip
    return grad_query, grad_key, grad_value, gradients


@cache
def _waves(plan: Plan) -> list[Tensor]:
    """The waves of so many lags, their rates, and what fits them."""
    longest = max(ROWS, 1 << (plan.keys - 1).bit_length())
    kind = str(plan.dtype)[6:]
    names = [f"waves-{kind}-{longest}", *(f"{name}-float32-{longest}" for name in ("rates", "fit", "lags"))]
    return [constant(name, plan.device) for name in (*names, f"moments-{kind}", "polynomials")]


@torch.library.register_fake("rfa::filter_backward")
def _(grad_out, grad_log_sum, out, log_sum, *others):
    prior, *arguments = others[13:]
    call = Call(*arguments)
    states = [x.new_empty(x.shape) for x in (call.query, call.key, call.value)]
    return (*states, log_sum.new_empty((len(LEARNED), call.query.shape[1]) if prior else 0))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[: len(_TENSORS)], *output)
    ctx.flags = inputs[len(_TENSORS) :]


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_log_sum: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    tensors, kept = ctx.saved_tensors[: len(_TENSORS)], ctx.saved_tensors[len(_TENSORS) :]
    if grad_out is None:
        grad_out = torch.zeros_like(kept[0])
    learned = [ctx.needs_input_grad[at] for at in _LEARNED_AT]
    *states, gradients = _once(grad_out, grad_log_sum, *kept, any(learned), *tensors, *ctx.flags)
    found: list[Tensor | None] = [*states, *(None,) * (len(_TENSORS) + len(_FLAGS) - 3)]
    for row, (at, needed) in enumerate(zip(_LEARNED_AT, learned, strict=True)):
        if needed:
            found[at] = gradients[row].to(tensors[at].dtype)
    return tuple(found)


def _refused(ctx: object, *grads: object) -> None:
    raise RuntimeError("the triton backend has no second derivatives; backend='reference' has")


_once = filter_backward
register_gradient(filter_forward, _backward, _save)
register_gradient(filter_backward, _refused, lambda ctx, inputs, output: None)


# The public side: which problems are served, and a call


def serves(problem: Problem) -> bool:
    """Whether these kernels serve a problem: causal, Student-t, at uniform times, and few gradients.

    Decay, frequencies and horizon have none.
    """
    parameters, positions, options, riccati = problem
    fixed = (parameters.decay, parameters.frequency, parameters.horizon)
    return (
        positions.uniform
        and options.causal
        and options.weight == "student_t"
        and riccati is None
        and parameters.noise is None
        and positions.clock is None
        and (options.prior == "lyapunov" or positions.key_groups is None)
        and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in fixed))
    )


def filter_attention(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, first_block: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The estimate in the query's dtype, and `log2 sum_j 2^z` in float32, -inf for a row that sees no key."""
    parameters, positions, options, _ = problem
    phases: tuple[Tensor | None, ...] = (None,) * 4
    if not options.in_frame:
        phases = _phases(parameters, problem)
    groups = (positions.key_groups, positions.query_groups)
    if groups[0] is not None:
        batch = query.shape[0]
        of_queries = groups[1] if groups[1] is not None else query.new_zeros(batch, query.shape[2], dtype=torch.int32)
        groups = (groups[0].expand(batch, -1).contiguous(), of_queries.expand(batch, -1).contiguous())
    named = [getattr(parameters, name).contiguous() for name in NAMES]
    prior = torch.is_grad_enabled() and any(x.requires_grad for x in named)
    keep = prior or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    out, log_sum, *_ = filter_forward(
        query, key, value, *phases, *groups, first_block, *named, parameters.horizon,
        options.rotate_values, options.gate, options.prior == "riccati", options.query_noise_in_bias, keep, prior,
    )  # fmt: skip
    return out, log_sum


_made_phases: Any = WeakIdKeyDictionary()


def _phases(parameters: Parameters, problem: Problem) -> tuple[Tensor, ...]:
    """Cosines and sines at keys and queries, made once for frequencies that stay as they are."""
    frequency, times = parameters.frequency, problem.positions.times_of_heads()[0]
    keys, queries = times.shape[-1], problem.positions.query_times.shape[-1]
    known = not frequency.requires_grad and readable(frequency)
    if known:
        size = (frequency._version, keys, queries)
        made = _made_phases.setdefault(frequency, {})
        if size in made:
            return made[size]
    with torch.no_grad():
        cos, sin = (x.to(torch.float32).contiguous() for x in rotation_of_heads(frequency, times))
        first = keys - queries
        phases = cos, sin, *(x if not first else x[..., first:, :].contiguous() for x in (cos, sin))
    if known:
        if len(made) >= 4:
            made.clear()
        made[size] = phases
    return phases
