"""Checks of arguments, for all folders: a message names the argument, what was given and what was expected."""


def require(condition: bool, name: str, given: object, expected: str) -> None:
    """Raise `ValueError` unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: got {given!r}, expected {expected}")


def check_range(name: str, given: float | int, least: float | int, most: float | int) -> None:
    """Raise `ValueError` unless a number lies between two others."""
    require(given >= least, name, given, f"at least {least}")
    require(given <= most, name, given, f"at most {most}")
