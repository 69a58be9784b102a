"""The schema of run.json: what is read from it later. Further entries are allowed everywhere."""

import json
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from rfa.checks import check_fields

from .spec import TrainingSpec

FORMAT = 1
_CONFIG = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Versions = dict[str, str | int | None]


class RunData(TypedDict):
    """The text of a run. Tokens are those of each split."""

    corpus: str
    split: NotRequired[str]
    fingerprint: str
    test_fingerprint: str
    tokens: NotRequired[dict[str, Count]]


class RunOutcome(TypedDict):
    """What a finished run measured. A run that took no time has no speed."""

    valid_loss: float
    valid_perplexity: float
    tokens: Count
    tokens_per_second: Annotated[float, Field(ge=0)] | None
    parameters: Count
    best_step: NotRequired[Count]


class RunRecord(TypedDict):
    """The content of run.json."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    format: int
    spec: dict[str, Any]
    config: dict[str, Any]
    data: RunData
    environment: Versions
    processes: NotRequired[Annotated[int, Field(ge=1)]]
    finished: bool
    steps: Count
    result: NotRequired[RunOutcome]
    resumed: NotRequired[list[Versions]]


_RECORD: TypeAdapter[RunRecord] = TypeAdapter(RunRecord)


def check_record(record: Any) -> None:
    """Raise `ValueError` that names the first field that is missing or has a value of another kind."""
    check_fields(_RECORD, record)
    if record["finished"] and "result" not in record:
        raise ValueError("result: got none, expected that of a finished run")
    TrainingSpec.from_dict(record["spec"])
    json.dumps(record, ensure_ascii=False).encode()  # raises for half of a surrogate pair, which UTF-8 cannot hold
