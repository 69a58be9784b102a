"""Calls of the kernels as bytes, for another program (`replay.cpp`) that makes them again."""

import ctypes
import subprocess
from contextlib import contextmanager

import numpy as np
import torch

from rfa.ops.cpu import decoding, operator
from rfa.ops.cpu.operator import Strided

ENTRIES = ("forward", "backward", "phases", "decode", "enter", "token")  # in the order of replay.cpp
WRITTEN = {
    "forward": ("out", "log_sum"),
    "backward": (
        *("grad_query", "grad_key", "grad_value", "grad_tables", "grad_scalars"),
        *("grad_key_path", "grad_query_path", "grad_key_bias"),
    ),
    "phases": ("cos", "sin"),
    "decode": ("out", "log_sum"),
    "enter": ("new_query", "keys", "values", "norms"),
    "token": ("out", "keys_of_cache", "values_of_cache", "norms_of_cache"),
}


DOUBLE = ("log_sum", "grad_tables", "grad_scalars", "grad_key_path", "grad_query_path", "grad_key_bias")
STORED = ("keys", "values", "keys_of_cache", "values_of_cache")  # in the cache's number


class Call:
    """One call: its structure, the memory behind each of its pointers before the call, and what it wrote there."""

    def __init__(self, entry, problem):
        self.entry, self.problem, self.number = entry, bytes(problem), getattr(problem, "number", 0)
        self.extents = {name: size for name, size in _extents(entry, problem).items() if size and _at(problem, name)[1]}
        self.offsets = {name: _at(problem, name)[0] for name in self.extents}
        self.before = {name: ctypes.string_at(_at(problem, name)[1], size) for name, size in self.extents.items()}
        self.after = {}

    def finish(self, problem):
        for name in WRITTEN[self.entry]:
            if name in self.extents:
                self.after[name] = ctypes.string_at(_at(problem, name)[1], self.extents[name])

    def numbers(self, contents):
        """The bytes of each written field as numbers."""
        return {name: self._numbers(name, content) for name, content in contents.items()}

    def _numbers(self, name, content):
        if name in STORED and self.number:
            dtype = operator.NUMBERS[self.number]
            return torch.frombuffer(bytearray(content), dtype=dtype).float().numpy()
        return np.frombuffer(content, np.float64 if name in DOUBLE else np.float32)

    def pack(self):
        """The bytes for replay.cpp, and where each field is in its memory."""
        problem, places, memory = np.frombuffer(self.problem, np.int64).copy(), {}, bytearray()
        for name, content in self.before.items():
            places[name] = slice(len(memory), len(memory) + len(content))
            problem[self.offsets[name] // 8] = len(memory)
            memory += content + bytes(-len(content) % 64)
        header = [ENTRIES.index(self.entry), len(self.problem), len(self.offsets), len(memory)]
        numbers = np.array([*header, *problem, *self.offsets.values()], np.int64)
        return numbers.tobytes() + bytes(memory), places, len(memory)


@contextmanager
def recording(monkeypatch):
    """A list that fills with the calls made meanwhile."""
    calls = []

    def run(entry, problem):
        call = Call(entry, problem)
        operator.run_kernel(entry, problem)
        call.finish(problem)
        calls.append(call)

    with monkeypatch.context() as patched:
        patched.setattr(operator, "bfloat16_products", lambda: None)  # another program has other addresses
        for module in (operator, decoding):
            patched.setattr(module, "run_kernel", run)
        yield calls


def replay(command, calls, folder):
    """What the fields that each call writes hold after the program has made it again."""
    given, made = folder / "calls", folder / "results"
    packed = [call.pack() for call in calls]
    given.write_bytes(b"".join(content for content, _, _ in packed))
    subprocess.run([*command, str(given), str(made)], check=True, timeout=600)
    results, at, found = made.read_bytes(), 0, []
    for call, (_, places, size) in zip(calls, packed, strict=True):
        memory = results[at : at + size]
        found.append({name: memory[places[name]] for name in call.after})
        at += size
    return found


def _at(problem, name):
    """The offset of a pointer in its structure, and the address."""
    offset, value = getattr(type(problem), name).offset, getattr(problem, name)
    return offset, (value.data if isinstance(value, Strided) else value) or 0


def _extents(entry, p):
    """Bytes behind each pointer."""
    if entry in ("forward", "backward", "decode"):
        return _of_kernel(p)
    if entry == "phases":
        made = 4 * p.batch * p.heads * p.length * p.modes
        times = 8 * p.batch * p.time_heads * p.length
        return {"times": times, "frequency": 8 * p.heads * p.modes, "cos": made, "sin": made}
    one = {name: (p.batch, p.heads, 1, p.channels) for name in ("query", "key", "value", "out")}
    if entry == "token":
        one |= {name: (p.batch, p.heads, p.keys, p.channels) for name in ("keys_of_cache", "values_of_cache")}
        one |= {"norms_of_cache": (p.batch, p.heads, p.keys, 1), **_factors(p, 1)}
        return {"tables": 4 * 3 * p.heads * p.lags, "coefficient": 4 * p.heads, **_of_states(p, one)}
    new = ("query", "key", "value", "new_query", "keys", "values")
    states = {name: (p.batch, p.heads, p.length, p.channels) for name in new}
    return _of_states(p, states | {"norms": (p.batch, p.heads, p.length, 1), **_factors(p, p.length)})


def _factors(p, length):
    return {name: (p.batch if getattr(p, name).batch else 1, p.heads, length, p.channels) for name in ("cos", "sin")}


def _of_kernel(p):
    each, pairs = p.batch * p.heads, p.path_rows * p.path_batch * p.heads
    shapes = {name: (p.batch, p.heads, p.queries, p.channels) for name in ("query", "grad_query")}
    shapes |= {name: (p.batch, p.heads, p.queries, p.value_channels) for name in ("out", "grad_out")}
    shapes |= {name: (p.batch, p.heads, p.keys, p.channels) for name in ("key", "grad_key")}
    shapes |= {name: (p.batch, p.heads, p.keys, p.value_channels) for name in ("value", "grad_value")}
    shapes |= {name: (p.batch, p.heads, p.keys, p.channels // 2) for name in ("key_cos", "key_sin")}
    shapes |= {name: (p.batch, p.heads, p.queries, p.channels // 2) for name in ("query_cos", "query_sin")}
    shapes["key_norm"] = (p.batch, p.heads, 1, p.keys)
    found = _of_states(p, shapes)
    if p.slices > 1 and "grad_query" in found:
        found["grad_query"] += 4 * p.query_slice * (p.slices - 1)
    scalars = 6 if p.path_rows else 1
    return found | {
        "log_sum": 8 * each * p.queries,
        "grad_log_sum": 4 * each * p.queries,
        "scalars": 4 * scalars * p.heads,
        "bound": 4 * p.heads,
        "tables": 4 * 3 * p.heads * p.lags,
        "key_path": 8 * pairs * p.keys,
        "query_path": 8 * pairs * p.queries,
        "key_bias": 4 * p.path_batch * p.heads * p.keys,
        "key_times": 8 * p.times_batch * p.keys,
        "query_times": 8 * p.times_batch * p.queries,
        "key_groups": 4 * p.batch * p.keys,
        "query_groups": 4 * p.batch * p.queries,
        "grad_tables": 8 * each * p.slices * 3 * p.lags,
        "grad_scalars": 8 * each * p.slices * 6,
        "grad_key_path": 8 * p.path_rows * each * p.keys,
        "grad_query_path": 8 * p.slices * p.path_rows * each * p.queries,
        "grad_key_bias": 8 * each * p.keys,
    }


def _of_states(p, shapes):
    """Bytes from the first to the last number of strided states."""
    found = {}
    for name, (batch, heads, rows, channels) in shapes.items():
        at = getattr(p, name)
        last = (batch - 1) * at.batch + (heads - 1) * at.head + (rows - 1) * at.row + channels
        of_token = name == "query" and not hasattr(p, "queries")
        half = getattr(p, "number", 0) and (name in ("key", "value", *STORED) or of_token)
        found[name] = (2 if half else 4) * last if at.data and min(batch, heads, rows, channels) else 0
    return found
