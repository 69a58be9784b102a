"""Checks of arguments, of what is installed and of what runs, for all folders.

A message says what was given and what is expected.
"""

import importlib.util
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    import numpy as np
    from pydantic import TypeAdapter

PACKAGE = "robust-filter-attention"
_MODULES = {
    "hf": ("accelerate", "huggingface_hub", "safetensors", "tokenizers", "transformers"),
    "onnx": ("onnx", "onnxscript"),
    "series": ("matplotlib", "narwhals", "pandas", "scipy"),
    "sktime": ("sktime",),
    "darts": ("darts",),
    "fugue": ("fugue",),
    "statsforecast": ("statsforecast",),
    "stonesoup": ("stonesoup",),
    "lab": ("datasets", "jinja2", "pyarrow", "pydantic", "rich", "tensorboard", "typer", "yaml"),
}
EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules}


class MissingExtra(ModuleNotFoundError):
    """An optional library is not installed. The message is one line that says how to install it."""


def require(condition: bool, name: str, given: object, expected: str) -> None:
    """Raise `ValueError` unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: got {given!r}, expected {expected}")


def require_each(good: Any, name: str, fault: str, entries: Any, expected: str) -> None:
    """Raise `ValueError` unless the condition holds for each entry. It names the first other one and its row."""
    import numpy as np

    if not np.all(good):
        place = tuple(np.argwhere(~np.atleast_1d(good))[0].tolist())
        entry = np.atleast_1d(np.asarray(entries() if callable(entries) else entries))[place]
        require(False, name, f"{fault}, {entry!s:.40} in row {place[0]}, counted from 0", expected)


def as_array(given: Any, name: str = "times") -> "np.ndarray":
    """What a caller gives as an array, with NaN or NaT for masked entries of `numpy.ma`, None and the NA of pandas."""
    import numpy as np

    if isinstance(given, np.ma.MaskedArray):
        kind = given.dtype.kind
        if kind == "M":
            return given.filled(np.datetime64("NaT"))
        given = np.ma.filled(given.astype(given.dtype if kind == "f" else float if kind in "iu" else object), np.nan)
    try:
        found = np.asarray(given)
    except ValueError:
        raise ValueError(f"{name}: got rows of different lengths, expected equal ones") from None
    if found.dtype == object:
        missing = [value is None or type(value).__name__ == "NAType" or value is np.ma.masked for value in found.flat]
        found = np.where(np.array(missing, dtype=bool).reshape(found.shape), np.nan, found)
    return found


def check_range(name: str, given: float | int, least: float | int, most: float | int) -> None:
    """Raise `ValueError` unless a number lies between two others."""
    require(given >= least, name, given, f"at least {least}")
    require(given <= most, name, given, f"at most {most}")


def check_choice(name: str, given: object, choices: Any) -> None:
    """Raise `ValueError` unless it is one of the choices, a tuple or a `Literal`."""
    expected = get_args(choices) or choices
    require(given in expected, name, given, f"one of {', '.join(map(repr, expected))}")


def check_fields(kind: "TypeAdapter[Any]", content: object) -> None:
    """Raise `ValueError` with the first fault of a file's content and the number of the others."""
    from pydantic import ValidationError  # of the extra `lab`

    try:
        kind.validate_python(content)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        entry, more = ".".join(map(str, first["loc"])), f", and {len(others)} more faults" if others else ""
        raise ValueError(f"{entry}: {first['msg']}{more}") from error


def exported() -> bool:
    """Whether a program is being exported, which must serve longer sequences than its example's too."""
    import torch

    return getattr(torch.compiler, "is_exporting", bool)()  # PyTorch 2.6 lacks it


def installed(module: str) -> bool:
    """Whether a library can be imported. It is not imported for the answer."""
    return importlib.util.find_spec(module) is not None


def install_command(extra: str) -> str:
    """How to install an extra, in words. Nothing is published yet: this is the only place that knows."""
    return f"pip install -e '.[{extra}]' in a clone of {PACKAGE}, or pip install 'FILE.whl[{extra}]' with a wheel"


def needs(*modules: str) -> None:
    """Check that optional libraries are installed, before they are imported.

    Args:
        modules: names of `EXTRAS`.

    Raises:
        MissingExtra: with the `install_command` that brings the first one that is missing.
    """
    for module in modules:
        if not installed(module):
            raise MissingExtra(f"{module} is not installed: {install_command(EXTRAS[module])}", name=module)
