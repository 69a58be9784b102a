"""The application to which commands are added, what they share, progress bars, and the entry point."""

import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as rich_progress
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from rfa.checks import MissingExtra
from rfa.files import check_writable
from rfa.version import __version__


def one_line(text: str) -> str:
    """The text on one line, without the control characters on which a terminal would act."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


class _PlainFlags:
    """A command, or commands, of which flags do not show `<bool>` in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param.metavar = "" if getattr(param, "is_flag", False) else param.metavar
        return params


class Commands(_PlainFlags, TyperGroup):
    """The commands."""


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Start with: rfa demo",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"rfa {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Robust Filter Attention: language models whose attention is a robust filter, and forecasts of series."""


console = Console(markup=False, emoji=False)
UsageError: Any = typer.BadParameter.__mro__[1]  # click's class, which some versions of Typer do not export
errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


_VALUES: dict[str, Callable[[str], bool]] = {  # what goes on with a list; else all that begins with no dash
    "--lengths": str.isdigit,
    "--missing": lambda value: re.match("-+[A-Za-z]", value) is None,  # numbers below 0 among them
    "--time": lambda value: not (value.startswith("-") or os.path.exists(value)),  # a file is the argument
    "--set": lambda value: "=" in value and not value.startswith("-"),
}


class ManyValues(_PlainFlags, TyperCommand):
    """A command whose options that are lists take several values in a row."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--lengths 512 1024` as `--lengths 512 --lengths 1024`."""
        spread: list[str] = []
        option = ""
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        for arg in args:
            if arg in lists:
                option = arg
            elif option and (_VALUES[option](arg) if option in _VALUES else not arg.startswith("-")):
                if spread[-1] != option:
                    spread.append(option)
            else:
                option = ""
            spread.append(arg)
        return super().parse_args(ctx, spread)


def check_out(path: Path | None, name: str = "--out") -> None:
    """Raise `ValueError` unless a command can write there. It comes before anything is read. None is no place."""
    if path is not None:
        check_writable(name, path)


def say(text: str) -> None:
    """Print a line as it is. The terminal breaks it where it is too long."""
    console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Print one line that says how to go on, where Ctrl-C stops what has nothing left to save."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(f"rfa: stopped; {hint}")
        raise SystemExit(130) from None


LINE_SECONDS = 10.0  # at least, between lines of progress if there is no terminal


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """Progress on standard error. The yielded function takes a description, the amount done and the total.

    If standard error is no terminal, as in a pipe or the log of a batch job, there is a line now and then and no bar.
    """
    console = Console(stderr=True)
    with _bars(console) if console.is_terminal else nullcontext(_lines(console)) as bar:
        yield bar


@contextmanager
def _bars(console: Console) -> Iterator[Callable[..., None]]:
    description = rich_progress.TextColumn("{task.description}", markup=False)
    columns = rich_progress.BarColumn(), rich_progress.MofNCompleteColumn(), rich_progress.TimeRemainingColumn()
    progress = rich_progress.Progress(description, *columns, console=console)
    tasks: dict[str, Any] = {}

    def bar(description: str, done: int, total: int, key: str | None = None) -> None:
        key = key or description
        if not tasks:  # start only now, so that an earlier error is printed without bars
            progress.start()
        if key not in tasks:
            tasks[key] = progress.add_task(description, total=total)
        progress.update(tasks[key], completed=done, total=total, description=description)

    try:
        yield bar
    finally:
        if tasks:
            progress.stop()


def _lines(console: Console) -> Callable[..., None]:
    said = -math.inf

    def line(description: str, done: int, total: int, key: str | None = None) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            console.print(f"{description}: {done}/{total}", highlight=False, markup=False, soft_wrap=True)

    return line


def main() -> None:
    """The entry point. An error is printed in one line with exit status 2; Ctrl-C has exit status 130."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # print a sample even if the terminal lacks a character
    try:
        status = app(standalone_mode=False)
    except UsageError as error:
        if not error.format_message():  # no command was given, and the help was printed
            sys.exit(2)
        _fail(error.format_message())
    except (ValueError, OSError, MissingExtra) as error:
        if os.environ.get("RFA_DEBUG"):
            raise
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception as error:
        if os.environ.get("RFA_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (RFA_DEBUG=1 shows where)")
    if status == 130:  # Typer too returns it for Ctrl-C
        errors.print("rfa: stopped")
    sys.exit(status)


def _fail(message: str) -> None:
    errors.print(f"rfa: {one_line(message)}")
    sys.exit(2)
