"""Frozen dataclasses that check the types of their fields, and read and write them as JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Self

from rfa.nn.checks import require

_LARGEST = 10**300  # of the whole numbers that become a float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedFields:
    """Base of the parts of a configuration. A subclass adds its own rules in `__post_init__`.

    A whole number is accepted where a field is a `float`, and stored as a `float`.

    Raises:
        ValueError: for a value of another type.
    """

    # where a field's name says too little without its class: the name in messages, recipes and overrides
    flat_names: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name, kind in hints(type(self)).items():
            value = getattr(self, name)
            if type(value) is int and float in (kind, *get_args(kind)) and abs(value) < _LARGEST:
                object.__setattr__(self, name, float(value))
            elif not has_kind(value, kind):
                require(False, self.flat_name(name), value, kind_in_words(kind))

    @classmethod
    def flat_name(cls, field: str) -> str:
        """A field's name where no class stands beside it."""
        return cls.flat_names.get(field, field)

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON, with parts as dictionaries of their own."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: object, place: str) -> Self:
        """From `to_dict`'s dictionary; fields that it lacks keep their defaults.

        Args:
            given: the dictionary.
            place: what messages call it.

        Raises:
            ValueError: for anything but a dictionary, an unknown field, or a value that does not fit.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"{place}: got {given!r:.80}, expected an object with {', '.join(hints(cls))}")
        values = dict(given)
        for name in values:
            kind = hints(cls).get(name)
            if kind is None:
                raise ValueError(f"{place}: got the field {name!r:.80}, expected some of {', '.join(hints(cls))}")
            if is_part(kind):
                values[name] = kind.from_dict(values[name], f"{place}.{name}")
        return cls(**values)


def hints(cls: type[CheckedFields]) -> dict[str, Any]:
    """The type of each field, by name."""
    found = get_type_hints(cls)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def is_part(kind: Any) -> bool:
    """Whether a field's type is a part with fields of its own."""
    return isinstance(kind, type) and issubclass(kind, CheckedFields)


def has_kind(value: object, kind: Any) -> bool:
    """Whether a value is of a field's type; unlike in Python, True is no whole number."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kinds := get_args(kind):
        return any(has_kind(value, each) for each in kinds)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def kind_in_words(kind: Any) -> str:
    """A field's type, for messages."""
    if get_origin(kind) is Literal:
        *others, last = map(repr, get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if kinds := get_args(kind):
        return " or ".join(map(kind_in_words, kinds))
    return "None" if kind is type(None) else kind.__name__
