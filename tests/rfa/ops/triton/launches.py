"""Record the Triton kernels that host code launches, as a CUDA device would get them, and compile them; no device.

The host code runs on fake tensors, which have a shape, a dtype and no memory, and which say that they are on a CUDA
device. So it takes the branches that it takes there, at any size. A launch is not run: its arguments pass through
Triton's own specialisation (integers that are 1 or multiples of 16, aligned pointers) and are kept.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rfa.ops import backends, robust_filter_attention
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import checked_positions
from rfa.ops.transforms import BODIES

# Shared memory that a block may ask for, in bytes, by compute capability: CUDA's programming guide, table of
# technical specifications, less the 1 KB that the system keeps of each block
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
BATCH, HEADS, LENGTH = 4, 8, 4096  # no instruction depends on them, but whether a number is a multiple of 16 does
ARCHITECTURES = {f"sm_{number}": number for number in SHARED_BYTES}
KINDS = {  # the kernels of whole problems, and those that go pair by pair
    "whole": {},
    "pairs": {"irregular": True},
    "pairs, exponential": {"irregular": True, "weight": "exponential"},
    "pairs, riccati": {"irregular": True, "prior": "riccati"},
    "pairs, dot product": {"irregular": True, "dot_product": True},
}
LEARNED = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")


class Launch(NamedTuple):
    """A kernel with everything that its machine code depends on, in the terms of `triton.compile`.

    Fields:
        function: of `triton.jit`.
        signature: the type of each argument.
        constants: values of the arguments that are known when it is compiled, by place.
        attributes: what else is known of the others, by place.
        options: warps, stages and others.
    """

    function: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name in words."""
        return str(self.function.__name__).removesuffix("_kernel").replace("_", " ")

    @property
    def identity(self) -> str:
        """Equal for launches that run the same machine code."""
        return repr((self.function.__module__, self.function.__name__, *self[1:]))


class _Operators(TorchDispatchMode):
    """Runs the body of a registered operator of `rfa`, which fake tensors would leave out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rfa":
            with self:  # a kernel's operator may call others
                return BODIES[func._schema.name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    """Of a fake tensor: up to a multiple of 512 bytes, where PyTorch's allocations start."""
    return int(tensor.storage_offset()) * tensor.itemsize


@contextmanager
def fake_device(arch: int) -> Iterator[None]:
    """New tensors are fake and say that they are on a CUDA device, and the operators of `rfa` run on them.

    They are on the CPU for PyTorch itself: without CUDA it has no automatic gradients for others.
    """
    with ExitStack() as stack:
        for name in ("_exchange_device", "_maybe_exchange_device"):
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=-1))
        capability = divmod(arch, 10)
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=capability))
        properties = SimpleNamespace(shared_memory_per_block_optin=SHARED_BYTES[arch])
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
        if torch.version.cuda is None:
            stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.dict("rfa.ops.triton.operator._plans", clear=True))  # they hold what ran before
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", True))
        stack.enter_context(mock.patch.object(Tensor, "data_ptr", _address))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Operators())
        yield


def launches(call: Callable[[], object], arch: int) -> list[Launch]:
    """The different launches of a call on a fake device, in order."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = CUDABackend(GPUTarget("cuda", arch, 32))
    found: dict[str, Launch] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        _, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
        launch = Launch(self, signature, constants, attributes, dict(options))
        found.setdefault(launch.identity, launch)

    with warnings.catch_warnings(), fake_device(arch), mock.patch.object(JITFunction, "run", record):
        warnings.simplefilter("ignore")
        call()
    return list(found.values())


def built(launch: Launch, number: int) -> Any:
    """What Triton makes of a launch for a compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source, target=GPUTarget("cuda", number, 32), options=launch.options)


def too_large(arch: str, dtype: str, channels: int, kind: str) -> dict[str, int]:
    """The kernels that a card cannot launch, and the bytes of shared memory that they need.

    `dtype` may be "float32" too, and a problem's kernels around the loops over pairs are among them.
    """
    number = ARCHITECTURES[arch]
    needed = {name: built(launch, number).metadata.shared for name, launch in launched(kind, dtype, channels, number)}
    return {name: size for name, size in needed.items() if size > SHARED_BYTES[number]}


def launched(kind: str, dtype: str, channels: int, number: int) -> list[tuple[str, Launch]]:
    """The kernels of a forward and a backward pass by name, then those that give gradients of parameters too."""
    found: dict[str, tuple[str, Launch]] = {}
    for learned in (False, True):
        for launch in launches(lambda learned=learned: call(kind, dtype, channels, learned), number):
            found.setdefault(launch.identity, (launch.name + " with parameters" * learned, launch))
    return list(found.values())


def call(kind: str, dtype: str, channels: int, learned: bool) -> None:
    """Estimates and gradients; of the parameters too where they are `learned`."""
    options: dict[str, Any] = dict(KINDS[kind])
    times = torch.empty(LENGTH) if options.pop("irregular", False) else None
    states = [
        torch.empty(BATCH, HEADS, LENGTH, channels, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3)
    ]
    fixed = {"decay": torch.empty(HEADS), "frequency": torch.empty(HEADS, channels // 2)}
    with mock.patch.object(backends, "choose_backend", return_value="triton"):  # which there is no device for
        if options.pop("dot_product", False):
            positions = checked_positions(BATCH, LENGTH, LENGTH, states[0].device, times)
            slopes = torch.empty(HEADS, requires_grad=learned)
            given = {**fixed, "slopes": slopes, "rotate_values": True}
            estimate = decayed_dot_product_attention(*states, positions=positions, **given)
        else:
            given = {**fixed, **{name: torch.empty(HEADS, requires_grad=learned) for name in LEARNED}}
            estimate = robust_filter_attention(*states, **given, times=times, **options)
    estimate.backward(torch.empty_like(estimate))
