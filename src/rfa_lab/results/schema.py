"""The schemas of result files: all entries that tables and figures read. Further entries are allowed everywhere."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

RESULT_FORMAT = 1  # of result files, and of what `rfa evaluate --json` writes
_CONFIG = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
_LARGEST = 2**63 - 1  # of NumPy's integers
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]  # a very short run can have 0 after rounding
Share = Annotated[float, Field(ge=0, le=1)]
Score = Annotated[float, Field(ge=-1e300, le=1e300)] | None  # None: not finite
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
    """The evaluation by one protocol. `books` holds the sum of losses and the targets by book and context length."""

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
    loss_by_token: NotRequired[list[NonNegative]]  # of the key without its first copy; older files lack it
    scores: Annotated[list[float], Field(min_length=2)]


class Probe(TypedDict):
    """A retrieval probe. A probe without candidate answers has neither accuracy nor chance."""

    trials: Annotated[int, Field(ge=2, le=_LARGEST)]
    chance: Share | None
    rows: list[ProbeRow]


class TrainingOutcome(TypedDict):
    """The result of training."""

    valid_perplexity: Positive | None
    tokens: Count
    tokens_per_second: NonNegative | None
    parameters: Count
    steps: Count
    best_step: NotRequired[Count]  # of the model that is evaluated, with `keep_best`
    seconds: NonNegative | None


class CurvePoint(TypedDict):
    """One validation during training."""

    step: Count
    tokens: Count
    valid_loss: float


class LayerDynamics(TypedDict):
    """Parameters of one layer over training. A parameter that the model does not have is absent."""

    process_noise: ValuesByStep
    decay: ValuesByStep
    alpha: ValuesByStep


class Dynamics(TypedDict):
    """Parameters by layer and name: for each of `steps` a list over heads. Empty for a model without dynamics."""

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
    """The texts that the run was trained and tested on."""

    fingerprint: str
    test_fingerprint: str | None


class HeadSummary(TypedDict):
    """The weights of a head: the fraction that did not decay, its mean lag, the fraction beyond the training length."""

    kept: float
    mean_lag: float
    beyond_training: float


class AttentionSummary(TypedDict):
    """The weights of the last layer's heads on one window."""

    length: Count
    heads: list[HeadSummary]


class RequestedEvaluation(TypedDict):
    """The evaluation that the recipe asked for."""

    lengths: list[Count]
    protocols: dict[str, Count | None]


def _check_one_value_a_head(dynamics: Dynamics) -> Dynamics:
    steps = len(dynamics["steps"])
    if len(dynamics["tokens"]) != steps:
        raise ValueError(f"tokens: expected one for each of {steps} steps")
    if steps and not dynamics["layers"]:
        raise ValueError(f"expected a layer of {steps} steps")
    for layer, parameters in dynamics["layers"].items():
        values_by_step = cast("Mapping[str, ValuesByStep]", parameters).values()
        shapes = {(len(values), *{len(heads) for heads in values}) for values in values_by_step}
        if len(shapes) > 1 or any(len(shape) != 2 or shape[0] != steps for shape in shapes):
            raise ValueError(f"layer {layer}: expected {steps} steps of one number a head")
    return dynamics


def _check_accuracy(probes: dict[str, Probe]) -> dict[str, Probe]:
    passkey = probes.get("passkey")
    if passkey is not None and None in (passkey["chance"], *(row["accuracy"] for row in passkey["rows"])):
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
    learning_rate: NotRequired[Positive]  # older results have it in `spec` alone
    trials: NotRequired[dict[str, float | None]]  # validation loss by learning rate; None where training diverged
    versions: NotRequired[list[str]]  # all versions and commits of rfa that had a part in the run
    training: TrainingOutcome
    environment: dict[str, Any]
    resumed: list[dict[str, Any]]
    evaluation_environment: dict[str, Any] | None
    data: TextFingerprints
    fingerprint: str
    curve: list[CurvePoint]
    dynamics: Annotated[Dynamics, AfterValidator(_check_one_value_a_head)]
    evaluations: dict[str, Evaluation]
    by_position: ByPosition | None
    passkey: Annotated[dict[str, Probe], AfterValidator(_check_accuracy)] | None
    attention: str | None
    attention_summary: NotRequired[AttentionSummary | None]


class ProtocolRow(EvaluationRow):
    """One context length of an evaluation by a protocol."""

    protocol: str


class EvaluationResult(TypedDict):
    """What `rfa evaluate --json` writes."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    format: int
    preset: str
    seed: Count
    train_length: Annotated[int, Field(ge=2, le=_LARGEST)]
    parameters: Count
    data: str
    fingerprint: str
    environment: dict[str, Any]
    rows: list[ProtocolRow]


class KeyLosses(TypedDict):
    """Losses in nats of the tokens of a probe's keys, at one distance."""

    distance: Count
    loss_by_token: Annotated[list[NonNegative], Field(min_length=1)]


class TrigramProbe(TypedDict):
    """The losses of a probe's keys by distance."""

    rows: list[KeyLosses]


class TrigramResult(TypedDict):
    """The file of the 3-gram that was trained on the tokens of a recipe's runs, and scored on their targets."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    format: int
    recipe: Name
    train_length: Annotated[int, Field(ge=2, le=_LARGEST)]
    tokens: Count
    vocabulary: Count
    seed: Count
    data: TextFingerprints
    fingerprint: str
    valid_perplexity: Positive
    tokenizer: NotRequired[str]  # older files lack this and the next entry
    evaluation: NotRequired[dict[str, Any]]  # how it was to be scored
    evaluations: dict[str, Evaluation]
    by_position: ByPosition | None
    passkey: dict[str, TrigramProbe] | None


class SeriesScores(TypedDict):
    """Scores of one part of a series in one setting."""

    mse: Score
    nll: Score
    crps: Score
    coverage: Score


class SeriesResult(TypedDict):
    """A result of series: scores by setting and part, or the fault by which training stopped."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    environment: NotRequired[dict[str, Any]]
    recipe: str
    label: str
    seed: int
    scores: dict[str, Annotated[dict[Literal["filter", "forecast"], SeriesScores], Field(min_length=1)]]
    fault: NotRequired[str | None]


def _check_scored_or_stopped(result: SeriesResult) -> SeriesResult:
    if bool(result["scores"]) == bool(result.get("fault")):
        raise ValueError("expected either scores or a fault")
    return result


class RecallScores(TypedDict):
    """The share of right answers, and the loss in nats."""

    accuracy: Share
    loss: Score


class LearningPoint(RecallScores):
    """Scores after so many steps and tokens of training."""

    step: Annotated[float, Field(ge=1)]
    tokens: Annotated[float, Field(ge=1)]


class RecallResult(TypedDict):
    """A result of recall: scores by length and over training. The task becomes part of file names."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    environment: NotRequired[dict[str, Any]]
    recipe: str
    title: str
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,99}$")]
    label: str
    seed: int
    chance: Share
    tests: dict[Annotated[str, Field(pattern=r"^[0-9]+$")], RecallScores]
    curve: list[LearningPoint]


SCHEMAS: dict[str, TypeAdapter[Any]] = {
    "text": TypeAdapter(Result),
    "evaluation": TypeAdapter(EvaluationResult),
    "trigram": TypeAdapter(TrigramResult),
    "series": TypeAdapter(Annotated[SeriesResult, AfterValidator(_check_scored_or_stopped)]),
    "recall": TypeAdapter(RecallResult),
}
