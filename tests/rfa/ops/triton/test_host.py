"""What the host does for a call of the lean kernels: calls, launches, synchronisation, compilers.

Most tests launch nothing: what stands for a compiled kernel notes its name.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cover import slow
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rfa.nn import FilterCache, RobustFilterAttention
from rfa.ops import robust_filter_attention, transforms
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Options, Parameters, Problem

from ..cpu.compiled import python

operator = pytest.importorskip("rfa.ops.triton.operator")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, CHANNELS = 2, 2, 16


class Compiled:
    """What stands for a kernel: it notes its launches in `names` and computes nothing."""

    function = packed_metadata = None

    def __init__(self, name: str, names: list[str]):
        self.name, self.names = name, names

    def __call__(self, *arguments: Any, **constants: Any) -> "Compiled":
        """The first launch, which compiles."""
        self.names.append(self.name)
        return self

    def run(self, *arguments: Any) -> None:
        """Another launch."""
        self.names.append(self.name)


def recorded(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched from now on, none of which runs."""
    names: list[str] = []
    kind = type(operator.forward_kernel)
    patch.setattr(kind, "__getitem__", lambda kernel, grid: Compiled(kernel.__name__, names))
    patch.setattr(operator, "_plans", {})
    return names


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As `recorded`, for a test."""
    return recorded(monkeypatch)


def states(length: int = 70, dtype: torch.dtype = torch.bfloat16, queries: int | None = None) -> list[Tensor]:
    """Query, key and value that ask for gradients."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, HEADS, n, CHANNELS) for n in (queries or length, length, length)]
    return [torch.randn(x, generator=generator).to(DEVICE, dtype).requires_grad_() for x in shapes]


def parameters(learned: bool = True) -> dict[str, Tensor]:
    """Those of the public function."""
    generator = torch.Generator().manual_seed(0)
    numbers = {name: 0.5 + torch.rand(HEADS, generator=generator) for name in operator.LEARNED}
    numbers["decay"] = torch.tensor([0.0, 0.05])
    made = {name: x.to(DEVICE).requires_grad_(learned and name in operator.LEARNED) for name, x in numbers.items()}
    return made | {"frequency": torch.rand(HEADS, CHANNELS // 2, generator=generator).to(DEVICE)}


def located(held: dict[str, Tensor], length: int = 70, **options: Any) -> Problem:
    """At uniform times."""
    positions = checked_positions(BATCH, length, length, torch.device(DEVICE), None)
    return Problem(Parameters(**held), positions, Options(**options))


@pytest.mark.parametrize(
    ("learned", "wanted", "certified", "count"),
    [(True, True, None, 6), (False, True, None, 5), (False, False, None, 2), (True, True, 1e-3, 7)],
)
def test_launches(launches: list[str], learned: bool, wanted: bool, certified: float | None, count: int) -> None:
    """Six of a forward and backward pass, five where no parameter asks, two of a forward pass; PyTorch has none.

    Certified windows take one more.
    """
    problem, given = located(parameters(learned), prior="riccati", certified=certified), states()
    with torch.set_grad_enabled(wanted):
        for _ in range(2):  # the first makes phases and constants
            launches.clear()
            with Operators() as seen:
                out = located_filter_attention(*given, problem, backend="triton")
                if wanted:
                    torch.autograd.grad(out, given, torch.ones_like(out))
    assert len(launches) == count
    assert set(seen.counts) <= {"new_empty", "split_with_sizes", "unbind", "view", "detach", "ones_like"}


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators unnoticed, and raises where one waits for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "repeat_interleave.Tensor")

    def __enter__(self) -> "Operators":
        """Also hides the mode from what asks whether a program is recorded, and that these tensors are on a CPU."""
        self.counts: Counter[str] = Counter()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(transforms, "_recorded", lambda: False)
        self.patch.setattr(Tensor, "is_cpu", False)
        self.patch.setattr(Tensor, "tolist", lambda x: x.sum().item())  # an operator
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Takes all back."""
        super().__exit__(*error)
        self.patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        name = str(func).removeprefix("aten.").removesuffix(".default")
        assert name not in self.WAITS, name
        masks = [x for x in args[1] or () if x is not None and x.dtype == torch.bool] if name == "index.Tensor" else ()
        assert not masks, "a mask as an index"
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


MARKS: dict[str, dict[str, Any]] = {
    "windows": {"prior": "riccati", "certified": 1e-3, "return_log_precision": True},
    "padding": {"key_mask": torch.arange(70)[None] >= torch.tensor([0, 3])[:, None]},
    "riccati at given times, packed": {
        "prior": "riccati", "times": torch.arange(70), "segment_ids": torch.arange(70)[None].expand(2, -1) // 30,
    },
}  # fmt: skip


@pytest.mark.parametrize("marks", MARKS)
def test_the_public_call_waits_for_nothing(launches: list[str], marks: str) -> None:
    """As on a GPU, where values are not checked."""
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in MARKS[marks].items()}
    leaves = states()
    with Operators():
        out = robust_filter_attention(*leaves, **parameters(), **given, backend="triton")
        out = out if isinstance(out, Tensor) else out[0]
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert launches


def test_a_layer_waits_for_nothing(launches: list[str]) -> None:
    """Nor does decoding, which the lean kernels serve too: two launches a call."""
    layer = RobustFilterAttention(CHANNELS * HEADS // 2, HEADS, prior="lyapunov", step="precision", backend="triton")
    layer = layer.to(DEVICE, torch.bfloat16)
    x = torch.randn(BATCH, 70, CHANNELS * HEADS // 2, device=DEVICE, dtype=torch.bfloat16)
    with Operators():
        layer(x).sum().backward()
        launches.clear()
        cache = FilterCache()
        with torch.no_grad():
            for start, stop in ((0, 64), (64, 65), (65, 70)):
                layer(x[:, start:stop], past_key_values=cache)
    assert launches == ["prologue_kernel", "forward_kernel"] * 3


def test_a_cache_gives_what_a_whole_sequence_does() -> None:
    """Token by token in the frame; with the Riccati prior the cache has tables too, by which it drops old keys."""
    torch.manual_seed(0)
    layer = RobustFilterAttention(CHANNELS * HEADS // 2, HEADS, backend="triton").to(DEVICE, torch.bfloat16)
    x, cache = torch.randn(1, 9, CHANNELS * HEADS // 2, device=DEVICE, dtype=torch.bfloat16), FilterCache()
    with torch.no_grad():
        parts = [layer(x[:, start:stop], past_key_values=cache) for start, stop in ((0, 7), (7, 8), (8, 9))]
        torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), rtol=2e-2, atol=2e-2)
    assert cache.layers[0].decoding.tables is not None


def test_a_second_launch_hands_over_what_the_first_did() -> None:
    """Tensors, numbers and constants in the order of the kernel's arguments, on the stream."""

    class Kernel:
        arg_names = ("x", "y", "length", "FAST", "ROWS", "num")
        calls: list[Any] = []  # noqa: RUF012
        function, packed_metadata = "function", "packed"

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def first(x: Any, y: Any, length: int, *, FAST: bool, ROWS: int, num: int, num_warps: int) -> Any:
                self.calls.append((*grid, 1, 1, 7, "function", "packed", *(None,) * 3, x, y, length, FAST, ROWS, num))
                return self

            return first

        def run(self, *given: Any) -> None:
            self.calls.append(given)

    kernel = Kernel()
    launch = operator.Launch(kernel, 5, (70,), ROWS=64, num_warps=4, num=1, FAST=True)
    for _ in range(2):
        launch(7, "x", None)
    assert kernel.calls[0] == kernel.calls[1]


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
def test_a_wrong_parameter_that_is_not_checked_gives_nan() -> None:
    """In its head alone."""
    held, name = parameters(learned=False), "process_noise"
    held[name][1] = -0.01
    out = robust_filter_attention(*states(20), **held, backend="triton", check_values=False)
    assert isinstance(out, Tensor)
    assert out[:, 0].isfinite().all()
    assert out[:, 1].isnan().all()
    with pytest.raises(ValueError, match=name):
        robust_filter_attention(*states(20), **held, backend="triton", check_values=True)


def test_phases_are_made_once(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For frequencies that stay as they are, in inference mode too; a change makes them anew."""
    held, made = parameters(), []
    problem, rotation = located(held), operator.rotation_of_heads
    monkeypatch.setattr(operator, "rotation_of_heads", lambda *given: made.append(1) or rotation(*given))
    with torch.inference_mode():
        located_filter_attention(*states(), problem, backend="triton")
    for _ in range(2):
        located_filter_attention(*states(), problem, backend="triton").sum().backward()
    assert len(made) == 1
    held["frequency"].mul_(2)
    located_filter_attention(*states(), problem, backend="triton")
    assert len(made) == 2


@pytest.mark.parametrize("learned", [True, False])
def test_fake_tensors(launches: list[str], learned: bool) -> None:
    """Every output of both operators has the shape, the strides and the dtype of the real one."""

    def results(given: list[Tensor], held: dict[str, Tensor]) -> list[Tensor]:
        positions = checked_positions(BATCH, 60, 70, given[0].device, None)
        problem = Problem(Parameters(**held), positions, Options())
        out, log_sum = operator.filter_attention(*given, problem)
        leaves = [*given, *(held[name] for name in operator.LEARNED if learned)]
        return [out, log_sum, *torch.autograd.grad([out.sum(), log_sum.sum()], leaves)]

    given, held = states(queries=60), parameters(learned)
    real = results(given, held)
    with FakeTensorMode() as mode:
        fake_held = {n: mode.from_tensor(x).requires_grad_(x.requires_grad) for n, x in held.items()}
        fake = results([mode.from_tensor(x).requires_grad_() for x in given], fake_held)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]


def test_several_cotangents_at_once() -> None:
    """As one after the other; and there is no second derivative."""
    problem, given = located(parameters(), 20), states(20)
    out = located_filter_attention(*given, problem, backend="triton")
    assert isinstance(out, Tensor)
    leaves, cotangents = [*given, problem.parameters.robustness], torch.stack([out.detach(), -2 * out.detach()])
    together = torch.autograd.grad(out, leaves, cotangents, is_grads_batched=True, retain_graph=True)
    alone = torch.autograd.grad(out, leaves, cotangents[0], create_graph=True)
    for both, one in zip(together, alone, strict=True):
        torch.testing.assert_close(both, torch.stack([one, -2 * one]))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        alone[0].sum().backward()


def one_graph() -> None:
    """A training step of a layer compiles into one graph, with the same loss and gradients."""
    torch.manual_seed(0)
    layer = RobustFilterAttention(CHANNELS, HEADS, backend="triton").to(DEVICE, torch.bfloat16)
    x, target = torch.randn(2, 1, 20, CHANNELS, device=DEVICE, dtype=torch.bfloat16)

    def loss(x: Tensor) -> Tensor:
        return (x + layer(x) - target).square().mean()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        value = function(x)
        value.backward()
        found.append([value, *(p.grad for p in layer.parameters())])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=2e-2, atol=1e-4)


@slow
def test_one_graph(tmp_path: Path) -> None:
    """In a process of its own: the shape checks of the tests, which users do not have, cannot be traced."""
    done = python("from ops.triton import test_host; test_host.one_graph()", tmp_path)
    assert done.returncode == 0, done.stderr
