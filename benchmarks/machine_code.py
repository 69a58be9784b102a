"""Count the machine instructions of the GPU kernels for each pair of a query and a key. No GPU is needed.

    python benchmarks/machine_code.py --arch sm_90 sm_100 --json F
    python benchmarks/machine_code.py --dtype bfloat16 --channels 64 --kind whole --only forward key

It compiles every kernel with a loop over pairs as the operator launches it, and reads the loops. It prints, for each
kernel, instructions a pair of the loop over tiles without a mask, by unit, registers, spills, and shared memory of what
a block of the card has.
Float32 is left out: it has no matrix products. A kernel takes some three seconds.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_code.launches import SHARED_BYTES, Launch, launches
from gpu_code.listings import UNITS, built, compiled

from rfa.checks import installed, require
from rfa.files import check_writable, write_text_whole
from rfa.ops import backends, robust_filter_attention
from rfa.ops.backends import interpreted
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.kernel import TRITON_CHANNELS
from rfa.ops.positions import checked_positions

BATCH, HEADS, LENGTH = 4, 8, 4096  # no instruction depends on them, but whether a number is a multiple of 16 does
ARCHITECTURES = {f"sm_{number}": number for number in SHARED_BYTES}
DTYPES = ("bfloat16", "float16")
KINDS = {  # the kernels of whole problems, and those that go pair by pair
    "whole": {},
    "pairs": {"irregular": True},
    "pairs, exponential": {"irregular": True, "weight": "exponential"},
    "pairs, riccati": {"irregular": True, "prior": "riccati"},
    "pairs, dot product": {"irregular": True, "dot_product": True},
}
LEARNED = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")
Line = dict[str, Any]


def main() -> None:
    """Count what the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_90"], help=f"some of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--dtype", nargs="+", default=DTYPES, help="both by default")
    parser.add_argument("--channels", nargs="+", type=int, default=[64, 128], help="of a head")
    parser.add_argument("--kind", nargs="+", default=["whole", "pairs"], help=f"some of {'; '.join(KINDS)}")
    parser.add_argument("--only", nargs="+", default=[""], help="kernels by the beginnings of their names")
    parser.add_argument("--json", type=Path, help="file for the list of all kernels with all counts")
    given = parser.parse_args()
    try:
        if given.json is not None:
            check_writable("--json", given.json)
        lines = []
        for line in counted(given.arch, given.dtype, given.channels, given.kind, tuple(given.only)):
            lines.append(line)
            print("  ".join(row_of(line)), flush=True)
    except ValueError as error:
        parser.exit(2, f"machine_code: {error}\n")
    if given.json is not None:
        write_text_whole(given.json, "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")


def counted(
    archs: Sequence[str], dtypes: Sequence[str], channels: Sequence[int], kinds: Sequence[str], only: tuple[str, ...]
) -> Iterator[Line]:
    """The line of each kernel with a loop over pairs.

    Raises:
        ValueError: for an unknown value, or where triton is missing or interprets its kernels.
    """
    known = {"arch": (archs, ARCHITECTURES), "dtype": (dtypes, DTYPES), "kind": (kinds, KINDS)}
    for field, (given, expected) in {**known, "channels": (channels, TRITON_CHANNELS)}.items():
        for each in given:
            require(each in expected, field, each, f"one of {', '.join(map(str, expected))}")
    require(installed("triton"), "machine_code", "no triton", "the package triton (Linux only): pip install triton")
    require(not interpreted(), "TRITON_INTERPRET", "1", "that it is not set: kernels are compiled")
    import triton

    for arch, dtype, size, kind in product(archs, dtypes, channels, kinds):
        for name, launch in launched(kind, dtype, size, ARCHITECTURES[arch]):
            if not name.startswith(only):
                continue
            made = compiled(launch, ARCHITECTURES[arch])
            if made.loops:
                case = {"name": name, "kind": kind, "arch": arch, "dtype": dtype, "channels": size}
                case["shared_limit"] = SHARED_BYTES[ARCHITECTURES[arch]]
                loops = [loop._asdict() for loop in made.loops]
                yield {**case, **made._asdict(), "loops": loops, "triton": triton.__version__}


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


def row_of(line: Line) -> list[str]:
    """A line of the table that is printed."""
    case = f"{line['arch']} {line['dtype']} {line['channels']} {line['kind']}: {line['name']}"
    loops = " / ".join(f"{loop['instructions']:.1f}" for loop in line["loops"])
    by_unit = " ".join(f"{unit} {line['loops'][0]['units'].get(unit, 0):.1f}" for unit in UNITS)
    spills = "+".join(str(loop["spills"]) for loop in line["loops"])
    rest = f"{line['registers']} registers, {line['spills']} spills ({spills} in loops)"
    rest += f", {line['shared_bytes']} of {line['shared_limit']} bytes"
    return [f"{case:62}", f"{loops:20}", by_unit, rest]


def markdown(lines: Sequence[Line]) -> str:
    """A Markdown table: a row for a kernel; for a size, instructions a pair in bfloat16 / float16, and registers."""
    sizes = list(dict.fromkeys((line["arch"], line["channels"]) for line in lines))
    found: dict[tuple[str, str], dict[tuple[str, int], list[Line]]] = {}
    for line in lines:
        of_size = found.setdefault((line["kind"], line["name"]), {})
        of_size.setdefault((line["arch"], line["channels"]), []).append(line)
    rows = [["kernel", *(f"{arch}, {channels}" for arch, channels in sizes), "registers", "spills"]]
    rows.append(["---"] * len(rows[0]))
    for (kind, name), by_size in found.items():
        cells = [" / ".join(f"{x['loops'][0]['instructions']:.1f}" for x in by_size.get(size, [])) for size in sizes]
        first = next(iter(by_size.values()))[0]
        in_loop = f"{first['spills']}, {first['loops'][0]['spills']} in the loop"
        rows.append(
            [name if kind in ("whole", "pairs") else f"{name} ({kind})", *cells, str(first["registers"]), in_loop]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main()
