"""Read recipes: YAML, sections whose keys and types are checked, and one error with all faults."""

from rfa.checks import needs

needs("pydantic", "yaml")

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)


class RecipeError(ValueError):
    """All faults of a recipe, one a line."""

    def __init__(self, path: Path, faults: Iterable[str]):
        super().__init__("\n".join(f"{path}: {' '.join(fault.split())}" for fault in faults))


_LARGEST = 100_000  # a recipe of the repository has at most 9,000 characters


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 3e-3 as a number and refuses a repeated key, and aliases that expand without end."""

    def construct_document(self, node):
        _check_size(node, {})
        return super().construct_document(node)

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


def _check_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """The characters and nodes that a node expands to. Raises for too many: a few aliases of aliases make millions."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # for an alias of itself, within itself
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        within = (1 if isinstance(node, yaml.ScalarNode) else _check_size(part, sizes) for part in parts)
        sizes[id(node)] = 1 + sum(within)
    if sizes[id(node)] > _LARGEST:
        line, expected = node.start_mark.line + 1, f"at most {_LARGEST:,} characters with all aliases expanded"
        raise yaml.constructor.ConstructorError(
            None, None, f"line {line}: got {sizes[id(node)]:,}, expected {expected}"
        )
    return sizes[id(node)]


_Loader.add_implicit_resolver(  # YAML 1.1 requires a point and a sign in such numbers, YAML 1.2 does not
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """What a file of YAML holds. Raises `RecipeError` for another file."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date or number
        raise RecipeError(path, [f"no YAML: {error}"]) from error


# Faults, which pydantic collects

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_pattern_mismatch": "letters, digits and _.=+-, at most 100",
    "string_type": "text",
    "too_short": "at least one",
}


def fault_lines(error: ValidationError, keys: Mapping[str, Iterable[str]]) -> list[str]:
    """The faults that pydantic found, each with its place. A fault in several places is reported once, at the first.

    `keys` has the known keys of each section, those of the recipe itself under "".
    """
    places: dict[str, str] = {}
    for each in error.errors(include_url=False):
        at, kind = [*each["loc"]], each["type"]
        if kind == "default_factory_not_called":  # what it depends on has a fault itself
            continue
        if kind == "value_error":
            said = str(each["ctx"]["error"]).partition("\n")[0]
        elif kind == "missing":
            said = kind
        elif kind == "extra_forbidden":
            said = f"unknown key, expected some of {', '.join(keys[str(at[0]) if len(at) > 1 else ''])}"
        else:
            expected = _EXPECTED.get(kind, each["msg"].removeprefix("Input should be "))
            said = f"got {each['input']!r:.80}, expected {expected}"
        if at and isinstance(at[-1], str) and said.startswith(("got ", "missing", "unknown key")):
            said = f"{at.pop()}: {said}"
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at)
        places.setdefault(said, where.removeprefix(".") or "recipe")
    return [f"{where}: {said}" for said, where in places.items()]


class Section(BaseModel):
    """A mapping of a recipe. Unknown keys and values of other types are faults."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid")


def checked_fields(kind: type, *without: str) -> Callable[[Any], dict[str, Any]]:
    """A check of a mapping against the fields of a dataclass, without some; it returns what was given."""
    hints = get_type_hints(kind)
    known: dict[str, Any] = {each.name: (hints[each.name], None) for each in fields(kind) if each.name not in without}
    section = create_model(kind.__name__, __base__=Section, **known)

    def check(given: Any) -> dict[str, Any]:
        section.model_validate(given)
        return dict(given)  # 30 stays 30 in results, where a field is a float

    return check


# Values and names in recipes


def different(values: Sequence[Any]) -> Any:
    """The values. Raises `ValueError` for one that occurs twice."""
    if twice := [value for index, value in enumerate(values) if value in values[:index]]:
        raise ValueError(f"got {twice[0]!r:.80} twice in {values!r:.80}, expected each once")
    return values


def check_names(labels: Iterable[str]) -> None:
    """Raise `ValueError` for labels of which two are the same in names of files."""
    names = [file_name(label) for label in labels]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]}: named {names.count(twice[0])} times, expected once (a label tells them apart)")


def one_of(names: Collection[str]) -> AfterValidator:
    """Validates text as one of some names."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"got {name!r:.80}, expected one of {', '.join(names)}")
        return name

    return AfterValidator(check)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+-]{0,99}$")]  # it becomes part of file names
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,99}$")]  # files have - in the place of spaces
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1), AfterValidator(different)]
Rates = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=1), AfterValidator(different)]
Lengths = Annotated[
    list[Annotated[int, Field(ge=2)]], Field(min_length=1), AfterValidator(different), AfterValidator(sorted)
]


def file_name(label: str) -> str:
    """A label as part of a file name."""
    return label.replace(" ", "-")
