"""The command for this machine."""

import math

from rich.table import Table

from .app import ManyValues, app, console, say


@app.command(cls=ManyValues)
def doctor() -> None:
    """Print versions, devices, backends, the backend that `auto` chooses on each device, and why others are missing."""
    import warnings

    import torch

    from rfa.environment import environment
    from rfa.files import cache_folder
    from rfa.models import PRESETS, describe
    from rfa.ops import available_backends, choose_backend
    from rfa.ops.backends import BACKENDS, missing

    table = Table(show_header=False, box=None)
    devices = ["cpu"] + [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    found = {
        **environment(),
        "devices": ", ".join(devices),
        "backends": ", ".join(available_backends()),
        "kernels": _kernels(),
        "certified windows": _certified_windows(),
        "cache": cache_folder(),
    }
    for name, value in found.items():
        table.add_row(name, str(value))
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing backend is printed below
            table.add_row("auto chooses", f"{device} -> {choose_backend('auto', device)}")
    console.print(table)
    for name in BACKENDS:
        if (reason := missing(name)) is not None:
            say(f"{name} is missing: {' '.join(reason.split())}")
    presets = Table("preset", "model", title="presets")
    for name in PRESETS:
        presets.add_row(name, describe(name))
    console.print(presets)


def _certified_windows() -> str:
    """What certified="auto" does on this machine, in words."""
    import torch

    from rfa.ops.backends import missing
    from rfa.ops.prior import eps_of_dtype

    found = [name for name in ("cpu", "triton in half precision") if missing(name.split()[0]) is None]
    if not found:
        return "none: only the backends cpu and triton leave keys out"
    single, half = (round(math.log2(eps_of_dtype("auto", dtype) or 1)) for dtype in (torch.float32, torch.float16))
    kinds = " and ".join(found)
    return f"{kinds}: eps 2^{single} in float32, 2^{half} in half precision; other backends visit all keys"


def _kernels() -> str:
    """Where the kernels of the CPU come from, in words. They are compiled for the answer where the wheel has none."""
    from rfa.ops.backends import missing

    if missing("cpu") is not None:
        return "none for the CPU"
    from rfa.ops.cpu.build import describe_library
    from rfa.ops.cpu.operator import library

    return describe_library(library())
