"""A forecaster's state as a file of JSON and numbers: reading it runs nothing, whoever has written it."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

import narwhals as nw
import numpy as np

from rfa.checks import require

_HEAD = b"rfa forecaster 1\n"
LIBRARIES = ("pandas", "polars", "pyarrow")  # of tables: others would be imported by their name
_PLAIN = (str, int, float, bool, type(None))


def packed(value: Any, types: tuple[type, ...]) -> bytes:
    """A value as bytes: named tuples and dataclasses of `types`, lists, tuples, dictionaries, arrays, plain values.

    Raises:
        ValueError: for a value of another type.
    """
    arrays: list[bytes] = []

    def tree(each: Any) -> Any:
        if isinstance(each, np.ndarray | bytes):
            array = np.frombuffer(each, np.uint8) if isinstance(each, bytes) else np.ascontiguousarray(each)
            arrays.append(array.tobytes())
            return {"bytes" if isinstance(each, bytes) else "array": [array.dtype.str, array.shape]}
        if type(each) in types:
            names = [field.name for field in fields(each)] if is_dataclass(each) else each._fields
            return {type(each).__name__: [tree(getattr(each, name)) for name in names]}
        if isinstance(each, list | tuple):
            return {type(each).__name__: [tree(part) for part in each]}
        if isinstance(each, dict):
            return {"dict": [[tree(key), tree(part)] for key, part in each.items()]}
        if isinstance(each, np.generic):
            return each.item()
        if isinstance(each, nw.dtypes.DType) or (isinstance(each, type) and issubclass(each, nw.dtypes.DType)):
            details = [list(each.categories)] if isinstance(each, nw.Enum) else _details(each)
            return {"dtype": [str(each).partition("(")[0].rpartition(".")[2].rstrip("'>"), *details]}
        if isinstance(each, nw.Series):
            return {"series": [each.name, each.implementation.value, tree(each.dtype), tree(each.to_list())]}
        require(isinstance(each, _PLAIN), "saved", each, "text, numbers, flags and dates")
        return each

    header = json.dumps(tree(value)).encode()
    return b"".join([_HEAD, len(header).to_bytes(8, "little"), header, *arrays])


def _details(dtype: Any) -> list[Any]:
    return [getattr(dtype, name, None) for name in ("time_unit", "time_zone")]


def unpacked(content: bytes, types: tuple[type, ...]) -> Any:
    """What `packed` was given.

    Raises:
        ValueError: for other bytes.
    """
    known = {each.__name__: each for each in types}
    place = len(_HEAD) + 8

    def value(each: Any) -> Any:
        nonlocal place
        kind: Any
        if not isinstance(each, dict):
            return each
        ((name, parts),) = each.items()
        if name in ("array", "bytes"):
            dtype, shape = np.dtype(str(parts[0])), tuple(int(n) for n in parts[1])
            require(dtype.kind in "iufb" and min(shape, default=0) >= 0, "array", parts, "numbers")
            count = int(np.prod(shape))
            found = np.frombuffer(content, dtype, count, place).reshape(shape).copy()
            place += found.nbytes
            return found.tobytes() if name == "bytes" else found
        if name == "dict":
            return {value(key): value(part) for key, part in parts}
        if name in ("list", "tuple"):
            return [value(part) for part in parts] if name == "list" else tuple(value(part) for part in parts)
        if name == "series":
            require(parts[1] in LIBRARIES, "library", parts[1], " or ".join(LIBRARIES))
            column, kind = nw.new_series(parts[0], value(parts[3]), backend=parts[1]), value(parts[2])
            return column if kind in (nw.Object, column.dtype) else column.cast(kind)
        if name == "dtype":
            kind = getattr(nw, str(parts[0]), None)
            good = isinstance(kind, type) and issubclass(kind, nw.dtypes.DType)
            require(good, "dtype", parts[0], "one of narwhals")
            return kind(*parts[1:]) if kind in (nw.Datetime, nw.Enum) else kind
        return known[name](*map(value, parts))

    try:
        require(content.startswith(_HEAD), "file", content[: len(_HEAD)], "a saved forecaster")
        size = int.from_bytes(content[len(_HEAD) : place], "little")
        header, place = json.loads(content[place : place + size]), place + size
        found = value(header)
        require(place == len(content), "file", f"{len(content)} bytes", f"{place}")
        return found
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"file: {error!r}") from None
