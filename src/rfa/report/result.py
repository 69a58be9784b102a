"""One result file: what tables and figures are made from, years later and without the model."""

import json
from pathlib import Path
from typing import Any

import rfa.version
from rfa.models.flat import flat_record

from .schema import check_result

RESULT_FORMAT = 1


def read_result(path: str | Path) -> dict[str, Any]:
    """The contents of a result file.

    Raises:
        ValueError: if it was cut off, is no result or was written by another version.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        written = result["format"]
        if written == RESULT_FORMAT:
            if "config" in result:  # in the form of older files, which the report reads
                result["config"] = flat_record(result["config"])
            check_result(result)
            # refuses half a character, which JSON can name and no page can hold
            json.dumps(result, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"result: {path} is damaged ({error}), expected a whole result; delete it to make it anew"
        ) from error
    if written != RESULT_FORMAT:
        expected = f"{RESULT_FORMAT}, that of rfa {rfa.version.__version__}"
        raise ValueError(f"result: {path} has format {written!r}, expected {expected}")
    return result
