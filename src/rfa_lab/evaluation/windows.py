"""Evaluation protocols: which tokens are scored, and with how much context, as a list of windows.

`blocks` is the paper's protocol (appendix F). `matched` and `strided` are additions of this library.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from rfa_lab.data import evenly_spaced

Protocol = Literal["blocks", "matched", "strided"]
PROTOCOLS: tuple[str, ...] = get_args(Protocol)


class Window(NamedTuple):
    """The tokens `start .. stop - 1`, of which the last `targets` are scored."""

    start: int
    stop: int
    targets: int


def check_protocol(protocol: str) -> None:
    """Raise `ValueError` for an unknown protocol."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol: got {protocol!r}, expected one of {', '.join(PROTOCOLS)}")


def windows(protocol: str, tokens: int, length: int, lengths: list[int]) -> Iterator[Window]:
    """The windows of a protocol at one context length.

    - `blocks`: non-overlapping windows of `length`. All tokens but the first are scored (the paper's protocol).
    - `matched`: for every length in `lengths` the windows end at the same tokens and score the same targets: the last
      half of the shortest length. Only the context differs.
    - `strided`: a window starts every `length / 2` tokens, and scores the tokens that the window before it did not.

    Args:
        protocol: one of these.
        tokens: length of the stream.
        length: tokens of a window.
        lengths: all lengths that are compared with each other.

    Raises:
        ValueError: for an unknown protocol, a length below 2 or a stream that is too short.
    """
    check_protocol(protocol)
    for given in {length, *lengths}:
        if given < 2:
            raise ValueError(f"lengths: got {given}, expected at least 2")
    longest = max(lengths) if protocol == "matched" else length
    if tokens < longest:
        raise ValueError(f"lengths: got {longest} for a text of {tokens} tokens, expected at most {tokens}")
    return {"blocks": _blocks, "matched": _matched, "strided": _strided}[protocol](tokens, length, lengths)


def spread(every: list[Window], tokens: int, segment: int, scored: int) -> list[Window]:
    """The windows of a protocol that end in evenly spaced segments of the text, so that every part is represented.

    Under `blocks`, all lengths that divide the segment score the same tokens. Under `matched`, all lengths do.

    Args:
        every: all windows of the stream.
        tokens: length of the stream.
        segment: tokens of a segment: the longest of the compared lengths.
        scored: score about this many tokens, in whole segments, at least one.
    """
    segments = tokens // segment
    if scored // segment >= segments:
        return every
    chosen = set(evenly_spaced(segments, scored // segment))
    return [window for window in every if (window.stop - 1) // segment in chosen]


def _blocks(tokens: int, length: int, _: list[int]) -> Iterator[Window]:
    for start in range(0, tokens - length + 1, length):
        yield Window(start, start + length, length - 1)


def _matched(tokens: int, length: int, lengths: list[int]) -> Iterator[Window]:
    targets = max(1, min(lengths) // 2)
    for stop in range(max(lengths), tokens + 1, targets):
        yield Window(stop - length, stop, targets)


def _strided(tokens: int, length: int, _: list[int]) -> Iterator[Window]:
    yield Window(0, length, length - 1)
    stride, scored = max(1, length // 2), length
    while scored < tokens:
        stop = min(scored + stride, tokens)
        yield Window(stop - length, stop, stop - scored)
        scored = stop
