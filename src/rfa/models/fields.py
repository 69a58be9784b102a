"""Frozen dataclasses that check the types of their fields, and read and write them as JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Self

from rfa.checks import require

_LARGEST = 10**300  # the largest integer that is stored as a float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedFields:
    """Base class of the parts of a configuration. A subclass adds its own rules in `__post_init__`.

    A field of type `float` accepts an integer too, and stores it as a `float`.

    Raises:
        ValueError: for a value of another type.
    """

    # names for messages, recipes and overrides, of fields whose own name is unclear without the class
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
        """The name of a field in messages, recipes and overrides."""
        return cls.flat_names.get(field, field)

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON. Nested parts are dictionaries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: object, where: str) -> Self:
        """The object of `to_dict`'s dictionary. Missing fields have their defaults.

        Args:
            given: the dictionary.
            where: name of the dictionary in messages.

        Raises:
            ValueError: for anything but a dictionary, an unknown field, or a value that does not fit.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: got {given!r:.80}, expected an object with {', '.join(hints(cls))}")
        values = dict(given)
        for name in values:
            kind = hints(cls).get(name)
            if kind is None:
                raise ValueError(f"{where}: got the field {name!r:.80}, expected some of {', '.join(hints(cls))}")
            if is_part(kind):
                values[name] = kind.from_dict(values[name], f"{where}.{name}")
        return cls(**values)


def hints(cls: type[CheckedFields]) -> dict[str, Any]:
    """The type of each field, by name."""
    found = get_type_hints(cls)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def is_part(kind: Any) -> bool:
    """Whether a field's type is a nested part with fields of its own."""
    return isinstance(kind, type) and issubclass(kind, CheckedFields)


def has_kind(value: object, kind: Any) -> bool:
    """Whether a value is of a field's type. Unlike in Python, True is not an integer here."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kinds := get_args(kind):
        return any(has_kind(value, each) for each in kinds)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def kind_in_words(kind: Any) -> str:
    """The name of a field's type, for messages."""
    if get_origin(kind) is Literal:
        *others, last = map(repr, get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if kinds := get_args(kind):
        return " or ".join(map(kind_in_words, kinds))
    return "None" if kind is type(None) else kind.__name__
