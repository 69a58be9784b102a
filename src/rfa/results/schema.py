"""What the parts of a result file hold, as far as tables and figures read them; more is allowed everywhere."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

RESULT_FORMAT = 1  # of result files, and of what `rfa evaluate --json` writes
_CONFIG = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
_LARGEST = 2**63 - 1  # of NumPy's integers
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]  # rounded: 0 for a run of moments
Share = Annotated[float, Field(ge=0, le=1)]
ValuesByStep = list[list[float | None]]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,249}$")]  # it becomes part of file names


class EvaluationRow(TypedDict):
    """One context length of an evaluation."""

    length: Annotated[int, Field(ge=1, le=_LARGEST)]
    loss: float
    perplexity: Positive
    targets: Count
    stderr: float | None


class Evaluation(TypedDict):
    """One protocol; `books` has loss sums and targets by book and context length."""

    rows: list[EvaluationRow]
    books: dict[str, dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]]]


class ByPosition(TypedDict):
    """Losses in nats at the positions 1, 2, ... of the longest window."""

    loss: list[float]
    stderr: NotRequired[list[float] | None]


class ProbeRow(TypedDict):
    """One distance of a retrieval probe."""

    distance: Count
    score: float
    stderr: float
    accuracy: Share | None
    scores: Annotated[list[float], Field(min_length=2)]


class Probe(TypedDict):
    """A retrieval probe. One without candidate answers has neither accuracy nor chance."""

    trials: Annotated[int, Field(ge=2, le=_LARGEST)]
    chance: Share | None
    rows: list[ProbeRow]


class TrainingOutcome(TypedDict):
    """The outcome of training."""

    valid_perplexity: Positive | None
    tokens: Count
    tokens_per_second: NonNegative | None
    parameters: Count
    steps: Count
    seconds: NonNegative | None


class CurvePoint(TypedDict):
    """A validation."""

    step: Count
    tokens: Count
    valid_loss: float


class LayerDynamics(TypedDict):
    """Parameters of one layer over training. Parameters that a model does not have are absent."""

    process_noise: ValuesByStep
    decay: ValuesByStep
    alpha: ValuesByStep


class Dynamics(TypedDict):
    """Parameters by layer and name, at each of `steps` a list over heads; empty where a model has none."""

    steps: list[Count]
    tokens: list[Count]
    layers: dict[str, LayerDynamics]


class ConfigFields(TypedDict):
    """The fields of `RFAConfig` that the report reads."""

    prior: str
    damping: float
    num_hidden_layers: Count
    num_attention_heads: Count
    hidden_size: Count


class SpecFields(TypedDict):
    """The fields of `TrainingSpec` that the report reads."""

    preset: str
    model: dict[str, Any]
    data: str
    tokenizer: str
    split_by: str


class TextFingerprints(TypedDict):
    """Which text the run was trained and tested on."""

    fingerprint: str
    test_fingerprint: str | None


class HeadSummary(TypedDict):
    """Where a head looks: the share of its weights that did not decay, their mean lag, how much lies far back."""

    kept: float
    mean_lag: float
    beyond_training: float


class AttentionSummary(TypedDict):
    """Where the heads of the last layer look, on one window."""

    length: Count
    heads: list[HeadSummary]


class RequestedEvaluation(TypedDict):
    """What the recipe asked of the evaluation."""

    lengths: list[Count]
    protocols: dict[str, Count | None]


def _one_value_a_head(dynamics: Dynamics) -> Dynamics:
    steps = len(dynamics["steps"])
    if len(dynamics["tokens"]) != steps:
        raise ValueError(f"tokens: expected one for each of {steps} steps")
    if steps and not dynamics["layers"]:
        raise ValueError(f"expected a layer of {steps} steps")
    for layer, parameters in dynamics["layers"].items():
        courses = cast("Mapping[str, ValuesByStep]", parameters).values()
        shapes = {(len(values), *{len(heads) for heads in values}) for values in courses}
        if len(shapes) > 1 or any(len(shape) != 2 or shape[0] != steps for shape in shapes):
            raise ValueError(f"layer {layer}: expected {steps} steps of one number a head")
    return dynamics


def _with_accuracy(probes: dict[str, Probe]) -> dict[str, Probe]:
    chosen = probes.get("passkey")
    if chosen is not None and None in (chosen["chance"], *(row["accuracy"] for row in chosen["rows"])):
        raise ValueError("passkey: expected its chance, and an accuracy at every distance")
    return probes


class Result(TypedDict):
    """A result file."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    format: int
    recipe: Name
    run: Name
    label: Name
    preset: Name
    seed: Count
    train_length: Annotated[int, Field(ge=2, le=_LARGEST)]
    spec: SpecFields
    config: ConfigFields
    evaluation: RequestedEvaluation
    training: TrainingOutcome
    environment: dict[str, Any]
    resumed: list[dict[str, Any]]
    evaluation_environment: dict[str, Any] | None
    data: TextFingerprints
    fingerprint: str
    curve: list[CurvePoint]
    dynamics: Annotated[Dynamics, AfterValidator(_one_value_a_head)]
    evaluations: dict[str, Evaluation]
    by_position: ByPosition | None
    passkey: Annotated[dict[str, Probe], AfterValidator(_with_accuracy)] | None
    attention: str | None
    attention_summary: NotRequired[AttentionSummary | None]


_RESULT: TypeAdapter[Result] = TypeAdapter(Result)


def check_result(result: Any) -> None:
    """Raise `ValueError` with the first fault and the number of the others."""
    try:
        _RESULT.validate_python(result)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        place, more = ".".join(map(str, first["loc"])), f", and {len(others)} more faults" if others else ""
        raise ValueError(f"{place}: {first['msg']}{more}") from error
