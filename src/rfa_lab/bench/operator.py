"""The operator, forward only and with its backward pass, compared with its peers."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rfa.checks import require
from rfa.models import preset
from rfa.nn import RobustFilterAttention
from rfa.nn.dynamics import softplus_inverse
from rfa.ops import robust_filter_attention
from rfa.ops.certified import allowed
from rfa_lab.results.files import read_result

from .bound import attention_work, bound_fields
from .measurement import (
    TOLERANCES,
    ActualAndExpected,
    Case,
    Setting,
    StateShape,
    Tick,
    compare,
    compare_with_tolerances,
    in_turns,
)
from .peers import peers

PASSES = ("forward", "forward_backward")
ALL_KEYS = "all-keys"  # the operator itself without certified windows
_CHECKED_SCORES = 2**20  # maximum number of scores of the reference; with gradients they need about 200 MB
_CHECKED_ROWS, _DENSE_LENGTH = 64, 251


class Trained(NamedTuple):
    """The dynamics of one layer of a trained model: the run, the layer's number, and a number a head for each name."""

    run: str
    layer: int
    values: Mapping[str, list[float]]


def trained_layers(path: Path) -> tuple[str, list[Trained]]:
    """The preset of a run and the dynamics of its layers, from its result file. `ValueError` where it has none."""
    result = read_result(path)
    dynamics = result.get("dynamics") or {"layers": {}}
    require(bool(dynamics["layers"]), "--trained", str(path), "the result file of a run with the dynamics of heads")
    known = ("process_noise", "key_noise", "query_noise", "robustness", "inverse_temperature", "decay", "noise_floor")
    return result["preset"], [
        Trained(result["run"], int(layer), {name: values[name][-1] for name in known if name in values})
        for layer, values in dynamics["layers"].items()
    ]


def filter_layer(
    name: str, heads: int, channels: int, device: str = "cpu", trained: Trained | None = None
) -> RobustFilterAttention:
    """The attention layer of a preset. The operator is measured with its dynamics and options.

    Its decay has a gradient, learned or not: who calls the operator may ask for it. Raises `ValueError` for a preset
    without a filter, invalid sizes, or trained dynamics of another number of heads.
    """
    require(heads >= 1, "heads", heads, "at least 1")
    require(channels >= 4 and channels % 4 == 0, "channels", channels, "a multiple of 4: pairs of complex modes")
    layer = preset(name, hidden_size=heads * channels // 2, num_attention_heads=heads).build_attention()
    require(isinstance(layer, RobustFilterAttention), "preset", name, "a filter, for anything but a training step")
    layer = cast(RobustFilterAttention, layer).to(device)  # first: moved later, a buffer with a gradient is no leaf
    held = layer.dynamics.state_dict()
    for field, values in {} if trained is None else trained.values.items():
        require(len(values) == heads, "heads", heads, f"{len(values)}, those of the trained model")
        number = torch.tensor(values, device=device)
        if field in held:
            held[field].copy_(number)
        else:
            held[f"raw_{field}"].copy_(softplus_inverse(number))
    for _, tensor in _wanted(layer):
        tensor.requires_grad_()
    return layer


class OperatorProblem:
    """Random states, a random gradient of the estimate, and a layer whose dynamics need gradients."""

    def __init__(
        self,
        shape: StateShape,
        name: str,
        setting: Setting,
        *,
        certified: float | None = None,
        trained: Trained | None = None,
    ):
        torch.manual_seed(0)
        self.shape, self.setting, self.certified = shape, setting, certified
        self.layer = filter_layer(name, shape.heads, shape.channels, setting.device, trained)
        states = torch.randn(4, *shape, dtype=torch.float32).to(setting.device, setting.torch_dtype)
        *self.states, self.grad = (state.clone() for state in states)
        self.logarithm = self.layer.options.weight == "student_t"
        for state in self.states:
            state.requires_grad_()

    @property
    def wanted(self) -> dict[str, Tensor]:
        """The tensors whose gradients are computed: the states, the parameters of the layer's dynamics, the decay."""
        return dict(zip(("query", "key", "value"), self.states, strict=True)) | dict(_wanted(self.layer))

    def estimate(self) -> Tensor:
        """One call of the public operator."""
        return call_operator(self.layer, self.states, self.setting.backend, certified=self.certified)

    def with_all_keys(self) -> "OperatorProblem":
        """The same problem without certified windows."""
        other = copy.copy(self)
        other.certified = None
        return other

    def gradients(self) -> tuple[Tensor, ...]:
        """One call and its backward pass."""
        return torch.autograd.grad(self.estimate(), [*self.wanted.values()], self.grad)

    def check(self) -> dict[str, Any]:
        """Check values and gradients of this problem at some rows, and of a shorter problem at all rows."""
        batch, heads, length, _ = self.shape
        rows = max(1, min(_CHECKED_ROWS, length, _CHECKED_SCORES // (batch * heads * length)))
        # only late rows: the gradient of the first row is pure rounding error, and would hide those of the others
        late = torch.linspace(length // 2, length - 1, rows).round().long().unique()
        groups = self._compared(length, batch, late)
        if rows < length:
            short = min(length, _DENSE_LENGTH)
            dense = self._compared(short, 1, torch.arange(short))
            groups |= {f"{name}, {short} tokens": group for name, group in dense.items()}
        return compare_with_tolerances(groups)

    def _compared(self, length: int, batch: int, rows: Tensor) -> dict[str, tuple[ActualAndExpected, float]]:
        """Actual and expected values at the given rows, for a part of the states.

        The loss is `<estimate, grad>` over these rows. Half of `grad` is the estimate itself. With pure noise a
        parameter's gradient, a sum over all pairs, would cancel, and only the rounding of single pairs would remain.
        """
        rows = rows.to(self.setting.device)
        states = [state.detach()[:batch, :, :length].clone().requires_grad_() for state in self.states]
        exact = copy.deepcopy(self.layer).double()
        exact_states = [state.detach().double().requires_grad_() for state in states]
        query, key, value = exact_states
        expected = call_operator(exact, [query[:, :, rows], key, value], "reference", query_times=rows)
        signal = expected.detach() / expected.detach().square().mean().sqrt()
        grad = torch.zeros_like(states[0])
        grad[:, :, rows] = self.grad[:batch, :, rows] + signal.to(grad.dtype)
        wanted = [*exact_states, *(tensor for _, tensor in _wanted(exact))]
        expected_gradients = torch.autograd.grad(expected, wanted, grad[:, :, rows].double())

        actual = call_operator(self.layer, states, self.setting.backend, certified=self.certified)
        gradients = torch.autograd.grad(actual, [*states, *(tensor for _, tensor in _wanted(self.layer))], grad)
        pairs = list(zip(gradients, expected_gradients, strict=True))
        tolerance = TOLERANCES[self.setting.torch_dtype]
        return {
            "estimate": ([(actual[:, :, rows], expected)], tolerance.estimate),
            "gradients of states": (pairs[:3], tolerance.states),
            "gradients of parameters": (pairs[3:], tolerance.parameters),
        }


def _wanted(layer: RobustFilterAttention) -> list[tuple[str, Tensor]]:
    """The tensors of a layer's dynamics that have gradients, by name."""
    decay = [(name, tensor) for name, tensor in layer.dynamics.named_buffers() if name == "decay"]  # where not learned
    return [*layer.dynamics.named_parameters(), *decay]


def call_operator(layer: RobustFilterAttention, states: list[Tensor], backend: str, **options: Any) -> Tensor:
    """Call the public operator with a layer's dynamics and options."""
    query, key, value = states
    chosen = ("weight", "rotate_values", "prior", "gate", "query_noise_in_bias")
    given: dict[str, Any] = {name: getattr(layer.options, name) for name in chosen}
    given |= {**layer.dynamics(), **options}
    estimate = robust_filter_attention(query, key, value, **given, backend=backend)
    return cast(Tensor, estimate)  # a tuple only with return_log_precision


@dataclass(frozen=True)
class StatesCase(Case):
    """A case of random states of one shape, with the layer of a preset.

    Fields:
        certified: leave out keys by the layer's certificate, and stand beside the same with all keys too.
        trained: dynamics of a trained layer instead of the initial ones.
    """

    shape: StateShape
    preset: str
    setting: Setting
    certified: bool = False
    trained: Trained | None = None

    @property
    def title(self) -> str:
        """For the progress bar."""
        return f"{self.benchmark} {self.shape}" + ("" if self.trained is None else f", layer {self.trained.layer}")

    @property
    def eps(self) -> float | None:
        """What keys that are left out may weigh; None to visit all."""
        return allowed("auto", self.setting.torch_dtype) if self.certified else None

    def problem(self, shape: StateShape) -> OperatorProblem:
        """The states and the layer."""
        return OperatorProblem(shape, self.preset, self.setting, certified=self.eps, trained=self.trained)

    def prepared(self) -> Any:
        """The states and the layer."""
        return self.problem(self.shape)

    def described(self) -> dict[str, Any]:
        """The fields of every line."""
        backend = self.setting.resolved((self.shape.channels,))
        what: dict[str, Any] = {"preset": self.preset, **self.shape._asdict(), **self.setting.fields()}
        what |= {"certified": self.eps} if self.certified else {}
        what |= {} if self.trained is None else {"trained": {"run": self.trained.run, "layer": self.trained.layer}}
        return {**what, "backend": backend}

    def check(self, shared: OperatorProblem) -> dict[str, Any]:
        """Compare the operator with float64."""
        return shared.check()


@dataclass(frozen=True)
class OperatorCase(StatesCase):
    """The time of one preset at one shape, with a line of results for each pass and peer.

    Fields:
        peers: names of `rfa_lab.bench.peers.PEERS`. Those that cannot run are named in each line as "refused".
    """

    benchmark = "operator"
    peers: tuple[str, ...] = ("sdpa",)

    @property
    def rounds(self) -> int:
        """How often `lines` ticks."""
        return len(PASSES) * self.setting.repeats

    def measured(self, shared: OperatorProblem, tick: Tick) -> Iterator[dict[str, Any]]:
        """Both passes, beside each peer."""
        problem, setting = shared, self.setting
        for each in PASSES:
            backward = each == "forward_backward"
            found = peers(self.peers, problem.layer, problem.states, problem.grad, setting, backward)
            part: dict[str, Any] = {"pass": each, **({"gradients": list(problem.wanted)} if backward else {})}
            part |= {"refused": found.refused} if found.refused else {}
            if not found.calls:
                yield {**part, "peer": "none"}
                continue
            contestants = {"rfa": _call(problem, backward), **found.calls}
            if self.certified:
                contestants[ALL_KEYS] = _call(problem.with_all_keys(), backward)
            with torch.set_grad_enabled(backward):
                seconds = in_turns(contestants, setting.repeats, setting.device, tick)
            itemsize = problem.grad.itemsize
            work = attention_work(self.shape, backward, problem.logarithm, itemsize)
            plain = attention_work(self.shape, backward, False, itemsize)
            for name, check in found.checks.items():
                works = {"rfa": work, "peer": work if name in found.filters else plain}
                bounds = {} if self.certified else bound_fields(works, setting)  # of all keys
                yield {**part, **compare(seconds, name), "peer_check": check, **bounds}
            if self.certified:
                yield {**part, **compare(seconds, ALL_KEYS), "peer_check": problem.with_all_keys().check()}


def _call(problem: OperatorProblem, backward: bool) -> Callable[[], object]:
    return problem.gradients if backward else problem.estimate
