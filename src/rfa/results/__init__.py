"""What a result file is: its schema, its reader and its writer, and the attention maps beside it.

`schema.py` says what a result file holds, `files.py` reads and writes one, `maps.py` does the same for attention maps,
and `folder.py` reads all results of a recipe. `evaluation` and `experiments` write them, `report` reads them.
"""

from .files import (
    PLANNED,
    Planned,
    check_maps,
    read_maps,
    read_planned,
    read_result,
    write_maps,
    write_planned,
    write_result,
)
from .folder import Results, read_results
from .schema import RESULT_FORMAT, check_result

__all__ = [
    "PLANNED",
    "RESULT_FORMAT",
    "Planned",
    "Results",
    "check_maps",
    "check_result",
    "read_maps",
    "read_planned",
    "read_result",
    "read_results",
    "write_maps",
    "write_planned",
    "write_result",
]
