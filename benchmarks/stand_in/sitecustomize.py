"""A GPU that is not there: `PYTHONPATH=benchmarks/stand_in TRITON_INTERPRET=1 python ... --device cuda`.

Python imports this module when it starts. `torch.cuda` then says that there is a device, tensors that are sent to it
stay on the CPU, and Triton's kernels run under the interpreter. So the host code of a command for a GPU runs here, line
by line. Times and memory mean nothing. Operations that make the host wait for a GPU are refused while a graph is
captured, as CUDA refuses them.
"""

import functools
import sys
import time
import types
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from placement import begin, mark, marked
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CARD = types.SimpleNamespace(name="stand-in", multi_processor_count=1, total_memory=2**30, major=9, minor=0)
_DO_NOTHING = (
    "synchronize",
    "empty_cache",
    "set_device",
    "_lazy_init",
    "_sleep",
    "reset_peak_memory_stats",
    "manual_seed_all",
)
_WAITS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero")


class Event:
    """A time on the host's clock."""

    def __init__(self, enable_timing: bool = False):
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return (end._at - self._at) * 1000

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class Stream:
    """The only order there is."""

    def wait_stream(self, stream: "Stream") -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Any]):
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITS:
            raise RuntimeError(f"{func}: operation not permitted: it waits for the GPU")
        made = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, made))
        return made


_refusing: list[_Recorder] = []


def set_sync_debug_mode(mode: str) -> None:
    """From "error" on, refuse what would wait for the GPU."""
    while _refusing:
        _refusing.pop().__exit__(None, None, None)
    if mode == "error":
        _refusing.append(_Recorder([]))
        _refusing[-1].__enter__()


class CUDAGraph:
    """Operations that were recorded. A replay makes them again, on the same tensors."""

    def __init__(self):
        self.operations: list[Any] = []

    def replay(self) -> None:
        """Make all operations again, and put their results where they were."""
        with torch.no_grad(), _without_it():
            for func, args, kwargs, made in self.operations:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        """Forget them."""
        self.operations.clear()


@contextmanager
def graph(captured: CUDAGraph, **options: Any) -> Any:
    """Record what is called within."""
    with _Recorder(captured.operations):
        yield


@contextmanager
def _as_it_is(*given: Any) -> Any:
    yield


def _no_compiler(*given: Any) -> Any:
    raise RuntimeError("the stand-in has no compiler of CUDA")


def _no() -> bool:
    return False


@contextmanager
def _without_it() -> Any:
    """Within, all is on the CPU, as for a compiler that would look for a real GPU."""
    with torch.overrides._pop_mode_temporarily(), mock.patch.object(torch.cuda, "is_available", new=_no):
        yield


def _checked(check: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _without_it():
        return check(*args, **kwargs)


def _traced(compile: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """What is compiled is traced whole, forward and backward, and then called as it is."""
    traced = compile(function, **{**options, "backend": "aot_eager", "mode": None})

    def call(*args: Any, **kwargs: Any) -> Any:
        if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:
            flex._validate_device = lambda *states: None  # on a CPU it refuses gradients
        with _without_it():
            made = traced(*args, **kwargs)
        return mark(made, any(marked(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)))

    return call


def install() -> None:
    """Put the device that is not there into `torch.cuda`."""
    if torch.cuda.is_available():
        raise SystemExit("stand_in: there is a GPU; nothing stands in for it")
    given: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *device: CARD.name,
        "get_device_properties": lambda *device: CARD,
        "get_device_capability": lambda *device: (CARD.major, CARD.minor),
        "is_bf16_supported": lambda *given, **options: True,
        "memory_allocated": lambda *device: 0,
        "max_memory_allocated": lambda *device: 2**20,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda *device: Stream(),
        "stream": _as_it_is,
        "default_generators": (torch.default_generator,),
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "set_sync_debug_mode": set_sync_debug_mode,
    }
    given |= {name: lambda *given, **options: None for name in _DO_NOTHING}  # Dynamo tells them apart
    for name, value in given.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getDevice = torch.cuda.current_device
    torch.cuda.jiterator._create_jit_fn = _no_compiler
    torch.library.opcheck = functools.partial(_checked, torch.library.opcheck)
    torch.compile = functools.partial(_traced, torch.compile)
    begin()


install()
