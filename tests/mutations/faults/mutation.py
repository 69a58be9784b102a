"""What a mutation is."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: in `file`, below `src/rfa`, the text `old` becomes `new`; `breaks` says what is wrong then."""

    file: str
    old: str
    new: str
    breaks: str
    tests: str
