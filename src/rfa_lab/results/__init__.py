"""Result files: their schema, reader and writer, and the attention maps beside them.

`schema.py` defines the content of a result file, `files.py` reads and writes result files and attention maps, and
`folder.py` reads all results of a recipe. `evaluation` and `recipes` write them, `report` reads them.
"""

from rfa.checks import needs

needs("pydantic")

from .files import (
    PLANNED,
    TRIGRAM,
    Planned,
    check_maps,
    read_evaluation,
    read_maps,
    read_planned,
    read_result,
    read_trigram,
    write_maps,
    write_planned,
    write_result,
)
from .folder import Results, read_record, read_results, recipe_of, record_kind, unfinished_runs
from .schema import RESULT_FORMAT

__all__ = [
    "PLANNED",
    "RESULT_FORMAT",
    "TRIGRAM",
    "Planned",
    "Results",
    "check_maps",
    "read_evaluation",
    "read_maps",
    "read_planned",
    "read_record",
    "read_result",
    "read_results",
    "read_trigram",
    "recipe_of",
    "record_kind",
    "unfinished_runs",
    "write_maps",
    "write_planned",
    "write_result",
]
