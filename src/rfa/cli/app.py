"""The application that commands join, what they share, and the entry point."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Robust Filter Attention: train, evaluate and sample language models whose attention is a robust filter.",
    epilog="Start with: rfa demo",
)
console = Console(markup=False, emoji=False)
UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which some versions of Typer keep to themselves
errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


MANY: dict[str, Callable[[str], bool]] = {
    "--lengths": str.isdigit,
    "--only": lambda value: not value.startswith("-"),
    "--presets": lambda value: not value.startswith("-"),
    "--set": lambda value: "=" in value and not value.startswith("-"),
}


class ManyValues(TyperCommand):
    """Lets `--lengths`, `--only`, `--presets` and `--set` take several values in a row."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--lengths 512 1024` as `--lengths 512 --lengths 1024`."""
        spread: list[str] = []
        option = ""
        for arg in args:
            if arg in MANY:
                option = arg
            elif option and MANY[option](arg):
                if spread[-1] != option:
                    spread.append(option)
            else:
                option = ""
            spread.append(arg)
        return super().parse_args(ctx, spread)


def assignment(text: str) -> tuple[str, Any]:
    """`field=value`, the value as JSON where it is that, else as text."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ValueError(f"--set: got {text!r}, expected field=value")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return name, None if value == "None" else value
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in thousands of lists
        raise ValueError(f"{name}: got {value:.40}..., expected a value of the model") from error


@contextmanager
def stoppable(hint: str) -> Iterator[None]:
    """Say in one line where a run was stopped and how to go on."""
    from rfa.training import Stopped

    try:
        yield
    except Stopped as stopped:
        errors.print(f"rfa: {stopped}; {hint}")
        raise SystemExit(130) from None


def main() -> None:
    """The entry point: errors come as one line and exit status 2, Ctrl-C as 130."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # no sample is lost to a character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = app(standalone_mode=False)
    except UsageError as error:
        if not error.format_message():  # no command: its help has been shown
            sys.exit(2)
        _fail(error.format_message())
    except (ValueError, OSError) as error:
        if os.environ.get("RFA_DEBUG"):
            raise
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception as error:
        if os.environ.get("RFA_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (RFA_DEBUG=1 shows where)")
    if status == 130:  # Typer's own answer to Ctrl-C
        errors.print("rfa: stopped")
    sys.exit(status)


def one_line(text: str) -> str:
    """On one line, without signs that a terminal would obey."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _fail(message: str) -> None:
    errors.print(f"rfa: {one_line(message)}")
    sys.exit(2)
