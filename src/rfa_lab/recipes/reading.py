"""Read YAML, check its keys and types, and collect all faults before one error is raised."""

from rfa.checks import needs

needs("yaml")

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

_KINDS = {str: "text", dict: "a mapping", list: "a list", bool: "true or false", int: "a whole number"}


class RecipeError(ValueError):
    """All faults of a recipe.

    Args:
        path: of the recipe's file.
        faults: one line for each fault.
    """

    def __init__(self, path: str, faults: Sequence[str]):
        super().__init__("\n".join(f"{path}: {fault}" for fault in faults))


class Faults:
    """The faults found in a file so far. A fault that occurs in several places is reported once, at the first."""

    def __init__(self, path: str):
        self._path = path
        self._first_places: dict[str, str] = {}

    def add(self, where: str, message: str) -> None:
        """Record a fault."""
        self._first_places.setdefault(" ".join(message.split()), where)

    def __len__(self) -> int:
        return len(self._first_places)

    def raise_if_any(self) -> None:
        """Raise `RecipeError` with all recorded faults, if there are any."""
        if self._first_places:
            raise RecipeError(self._path, [f"{where}: {message}" for message, where in self._first_places.items()])


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 3e-3 as a number and raises an error for a repeated key."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, f"line {node.start_mark.line + 1}: expected a mapping")
        for key_node in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"line {line}: {key_node.value!r} stands twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # YAML 1.1 requires a point and a sign in such numbers, YAML 1.2 does not
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        RecipeError: if the file is not YAML.
        OSError: if it cannot be read.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date or number
        raise RecipeError(str(path), [f"no YAML: {' '.join(str(error).split())}"]) from error


def recipe_kind(path: str | Path) -> str | None:
    """The `kind` of a recipe: "series", "recall", or None for one of language models.

    Raises:
        RecipeError: if it is not YAML.
        OSError: if it cannot be read.
    """
    given = read_yaml(Path(path))
    kind = given.get("kind") if isinstance(given, dict) else None
    return kind if isinstance(kind, str) else None


def take(
    given: Any, kinds: Mapping[str, type], where: str, faults: Faults, required: Sequence[str] = ()
) -> dict[str, Any]:
    """The known keys of a mapping that have values of the right type. Other keys and missing keys are faults."""
    if not isinstance(given, dict):
        faults.add(where, f"got {given!r:.80}, expected a mapping with {', '.join(required or kinds)}")
        return {}
    for key in given:
        if key not in kinds:
            faults.add(where, f"{key}: unknown key, expected some of {', '.join(kinds)}")
    for key in required:
        if key not in given:
            faults.add(where, f"{key}: missing")
    taken = {}
    for key, kind in kinds.items():
        if key in given and isinstance(given[key], kind):
            taken[key] = given[key]
        elif key in given:
            faults.add(where, f"{key}: got {given[key]!r:.80}, expected {_KINDS[kind]}")
    return taken


_LARGEST = 1e9  # of a recipe's numbers


def check_rates(rates: Sequence[Any], faults: Faults) -> bool:
    """Whether these are learning rates to try; a fault is recorded where they are not."""
    fits = bool(rates) and all(isinstance(rate, float) and 0 < rate < 1 for rate in rates)
    if not fits:
        faults.add("rates", f"got {rates!r:.80}, expected numbers between 0 and 1")
    return fits


def check_seeds(seeds: Sequence[Any], faults: Faults) -> None:
    """Record a fault unless the seeds are different whole numbers, at least one."""
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**31 for seed in seeds)
    if not seeds or not whole or len(set(seeds)) < len(seeds):
        faults.add("seeds", f"got {seeds!r:.80}, expected different whole numbers from 0")


def built(kind: type[Any], given: Any, where: str, faults: Faults) -> Any:
    """A frozen dataclass from a mapping; faults are recorded, and the defaults stand in for what is wrong."""
    known = {field.name for field in fields(kind)}
    for name in given:
        if name not in known:
            faults.add(where, f"{name}: unknown key, expected some of {', '.join(sorted(known))}")
    for field in fields(kind):
        if field.name in given and not _is_of(given[field.name], str(field.type)):
            faults.add(where, f"{field.name}: got {given[field.name]!r:.80}, expected {_words(str(field.type))}")
            return kind()
    try:
        return kind(**{name: value for name, value in given.items() if name in known})
    except (ValueError, TypeError) as error:
        faults.add(where, str(error))
        return kind()


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value has the type of a field, written as text: whole and finite numbers, text, or None."""
    if value is None:
        return "None" in kind
    if "str" in kind:
        return isinstance(value, str)
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return number and ("float" in kind or isinstance(value, int))


def _words(kind: str) -> str:
    number = "a number" if "float" in kind else "a whole number"
    return "text" if "str" in kind else f"{number} between {-_LARGEST:g} and {_LARGEST:g}"


def repeated(names: Sequence[str]) -> list[str]:
    """The names that occur more than once, each once."""
    return [name for name, times in Counter(names).items() if times > 1]
