"""The tables and the figure of context.md, of the pilot and of the records: `python docs/record/context_record.py`.

They are made from results/context, those of the pilot from results/context/pilot, those of bytes from results/bytes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from provenance import made_by
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from rfa.checks import check_fields
from rfa.files import write_text_whole
from rfa.forecasting.style import save
from rfa_lab.recipes import load_recipe
from rfa_lab.recipes.run_result import trial_loss, trials_by_run
from rfa_lab.report.figures.curves import loss_over_position
from rfa_lab.report.layout import Cell, NumberCell, Table, first_number, markdown, replace_between
from rfa_lab.report.measurements import (
    TRIGRAM_LABEL,
    Retrieval,
    lengths_of,
    retrieval_scores,
    seed_noise,
    trigram_of,
)
from rfa_lab.report.runs import by_label, perplexity_by_length
from rfa_lab.report.statistics import interval_cell
from rfa_lab.report.tables import difference_table
from rfa_lab.results import read_results

PAGE = Path(__file__).with_name("context.md")
FIGURE = Path(__file__).parents[1] / "figures" / "context.png"
RECORD = Path(__file__).parents[2] / "results" / "context"
BYTES = RECORD.with_name("bytes")
PILOT, RECIPE = RECORD / "pilot", Path(__file__).parents[2] / "recipes" / "context.yaml"
TEXT = "code (61.0M)"  # of the record, with its training tokens
LEAST_GAIN, LEAST_REPEAT = 0.5, 1.5  # nats a token: what a setting must reach for its models to use their context
COMPARED = "x2-riccati-alibi no-innovation"  # with all others: it had the least loss when it was chosen
PROTOCOLS = ("matched", "blocks")
STEPS = (1000, 1500, 2000, 3500, 5000)  # of a training: where its validation loss is told
USUAL_RATE = 0.003  # the peak of most runs; a setting names another one
_PARTS = ("first_half", "second_quarter", "second_half")
Run = Mapping[str, Any]


class Setting(TypedDict):
    """The text and the sizes of a run of the pilot."""

    text: str
    vocabulary: int
    layers: int
    hidden_size: int
    heads: int
    length: int
    batch_size: int
    steps: int
    learning_rate: float


class Repeat(TypedDict):
    """The gain from a repeated passage at one distance, in nats a token."""

    gain: float
    standard_error: float


class Passkey(TypedDict):
    """The gain from a passkey at one distance, and the share of 64 trials that were right."""

    gain: float
    accuracy: float


class Measures(TypedDict):
    """What was measured of a finished run. Losses and gains are in nats a token; probes are by distance in tokens.

    trigram_loss is on the model's test tokens, trigram_loss_of_first_tokens on the first 400,000 of the test text.
    """

    parameters: int
    tokens: int
    passes: float
    seconds: float
    valid_perplexity: float
    loss: float
    trigram_loss: float
    trigram_loss_of_first_tokens: float
    loss_by_part: dict[Literal["first_half", "second_quarter", "second_half"], float]
    repeat: dict[str, Repeat]
    passkey: dict[str, Passkey]


class Pilot(TypedDict):
    """A file of the pilot: a run of `b1-rope`, how far its training went, and None as measures of an unfinished one."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)  # type: ignore[misc]
    format: Literal[1]
    kind: Literal["pilot"]
    run: str
    setting: Setting
    environment: dict[str, Any] | None
    steps_done: int
    measures: Measures | None


_PILOT = TypeAdapter(Pilot)


def read_pilot(folder: Path) -> list[dict[str, Any]]:
    """The runs of the pilot: those with measures first, then in the order of their names.

    Raises:
        ValueError: for a file without the entries of `Pilot`.
    """
    runs = []
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text("utf-8"))
        try:
            check_fields(_PILOT, run)
        except ValueError as error:
            raise ValueError(f"pilot: {path} is damaged: {error}") from None
        runs.append(run)
    return sorted(runs, key=lambda run: run["measures"] is None)


def conditions(run: Run) -> tuple[bool, bool, bool]:
    """Whether a run is (a) below the trigram, (b) copies over half a window, (c) falls in the second half.

    (c) compares the second half of the window with its second quarter, because the first tokens have no context.
    """
    measures, half = run["measures"], str(run["setting"]["length"] // 2)
    parts = measures["loss_by_part"]
    return (
        measures["trigram_loss"] - measures["loss"] >= LEAST_GAIN,
        measures["repeat"][half]["gain"] >= LEAST_REPEAT,
        parts["second_half"] < min(parts["second_quarter"], parts["first_half"]),
    )


def chosen(runs: list[dict[str, Any]]) -> Run:
    """The run with the least training time of those that meet all conditions on the text of the record.

    The text is that of the installed packages. The first runs of the pilot had others.
    """
    met = [run for run in runs if run["setting"]["text"] == TEXT and run["measures"] and all(conditions(run))]
    return min(met, key=lambda run: run["measures"]["seconds"])


def _named(run: Run) -> str:
    of = run["setting"]
    sizes = f"{of['vocabulary']:,}, {of['layers']} layers, d {of['hidden_size']}, {of['length']}"
    rate = "" if of["learning_rate"] == USUAL_RATE else f", peak {of['learning_rate']:g}"
    return f"{of['text']}, {sizes}, {of['steps']:,} steps of {of['batch_size']}{rate}"


def losses(runs: list[dict[str, Any]]) -> Table:
    """Loss, trigram and loss by position of each run, and which conditions it meets."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        measures = run["measures"]
        done = f"{100 * run['steps_done'] / run['setting']['steps']:.0f} %"
        if measures is None:
            rows.append((_named(run), done, *[None] * 8))
            continue
        parts, loss, trigram = measures["loss_by_part"], measures["loss"], measures["trigram_loss"]
        met = ", ".join(name for name, holds in zip("abc", conditions(run), strict=True) if holds)
        numbers = (loss, trigram, trigram - loss, *(parts[part] for part in _PARTS))
        minutes = NumberCell(measures["seconds"] / 60, digits=0)
        rows.append((_named(run), done, minutes, *(NumberCell(number) for number in numbers), met))
    columns = ("setting", "trained", "minutes", "loss", "trigram", "below it", "first half", "second quarter")
    return Table("losses", "", (*columns, "second half", "meets"), tuple(rows))


def probes(runs: list[dict[str, Any]]) -> Table:
    """The gain from a repeated passage, and the accuracy of the passkey, by distance in windows."""
    rows: list[tuple[Cell, ...]] = []
    measured = [run for run in runs if run["measures"]]
    lengths = {(int(at), run["setting"]["length"]) for run in measured for at in run["measures"]["repeat"]}
    shares = sorted({Fraction(*each) for each in lengths})
    for run in measured:
        at = [str(int(share * run["setting"]["length"])) for share in shares]
        gains = [run["measures"]["repeat"][distance] for distance in at]
        cells = [NumberCell(row["gain"], row["standard_error"]) for row in gains]
        rows.append((_named(run), *cells, *(NumberCell(run["measures"]["passkey"][d]["accuracy"]) for d in at)))
    columns = [f"{kind} {share}" for kind in ("repeat", "passkey") for share in shares]
    return Table("probes", "", ("setting", *columns), tuple(rows))


def record_of(results: Sequence[Run]) -> list[Table]:
    """Losses, differences, gains and passkeys of the record's models: means over seeds with half of the t interval."""
    near = [at for at in _distances(results) if at <= 2 * results[0]["train_length"]]
    found: list[tuple[Cell, ...]] = []
    for label, runs in by_label(results).items():
        found.append((label, str(len(runs)), *(interval_cell([_accuracy(run, at) for run in runs], 2) for at in near)))
    return [
        *(over_length(f"{protocol} losses", results, protocol) for protocol in PROTOCOLS),
        *(ends_against(COMPARED, results, protocol) for protocol in PROTOCOLS),
        gains("gains", results),
        learning(results),
        Table("passkeys", "", ("model", "seeds", *(f"passkey {at}" for at in near)), tuple(found)),
    ]


def gains(name: str, results: Sequence[Run]) -> Table:
    """The gain of each model from a passage that stood so many tokens before: means, half of the t interval."""
    distances = _distances(results)
    rows: list[tuple[Cell, ...]] = []
    for label, runs in by_label(results).items():
        scores = [retrieval_scores([run], "repeat") for run in runs]
        rows.append(
            (label, str(len(runs)), *(interval_cell([_gain(each, at) for each in scores], 2) for at in distances))
        )
    return Table(name, "", ("model", "seeds", *(f"repeat {at}" for at in distances)), tuple(rows))


def learning(results: Sequence[Run]) -> Table:
    """The validation loss of each model after so many steps: means, half of the t interval.

    Models with a shorter training are left out.
    """
    rows: list[tuple[Cell, ...]] = []
    for label, runs in by_label([run for run in results if run["spec"]["max_steps"] == STEPS[-1]]).items():
        curves = [{point["step"]: point["valid_loss"] for point in run["curve"]} for run in runs]
        rows.append((label, str(len(runs)), *(interval_cell([curve[at] for curve in curves], 3) for at in STEPS)))
    return Table("learning", "", ("model", "seeds", *(f"{at:,}" for at in STEPS)), tuple(rows))


def _distances(results: Sequence[Run]) -> list[int]:
    return sorted({at for run in results for at in retrieval_scores([run], "repeat").distances})


def over_length(
    name: str, results: Sequence[Run], protocol: str, of: Callable[[float], float] = math.log, digits: int = 3
) -> Table:
    """`of(perplexity)` of each model by length, by default the loss in nats a token: means, half of the t interval.

    The last row is the trigram's, if it is known.
    """
    lengths = lengths_of(results, protocol)
    models = [(label, str(len(runs)), runs) for label, runs in by_label(results).items()]
    known = trigram_of(results)
    rows: list[tuple[Cell, ...]] = []
    for label, seeds, runs in (*models, *([(TRIGRAM_LABEL, "", [known])] if known else ())):
        by_seed = [perplexity_by_length(run, protocol) for run in runs]
        measured = {length for length in lengths if all(length in each for each in by_seed)}
        means = {length: interval_cell([of(each[length]) for each in by_seed], digits) for length in measured}
        rows.append((label, seeds, *map(means.get, lengths)))
    return Table(name, "", ("model", "seeds", *(f"{length:,}" for length in lengths)), tuple(rows))


def ends_against(label: str, results: Sequence[Run], protocol: str) -> Table:
    """`difference_table` to one model by one protocol, at the trained and at the greatest length."""
    table = difference_table(results, [label], protocol=protocol)
    rows = tuple((model, seeds, near, far) for model, _, seeds, near, *_, far in table.rows)
    columns = (table.columns[0], "seeds", table.columns[3], table.columns[-1])
    return Table(f"{protocol} differences", "", columns, rows)


def noise(results: Sequence[Run]) -> str:
    """A sentence with the noise of seeds at the ends of each protocol."""
    said = []
    for protocol in PROTOCOLS:
        lengths = lengths_of(results, protocol)
        found = {length: seed_noise(results, length, protocol) for length in (*lengths[:1], *lengths[-1:])}
        parts = [f"{width:.3f} nats at {length:,}" for length, width in found.items() if width is not None]
        said += [f"by `{protocol}` {', '.join(parts)}"] if parts else []
    return f"The noise of seeds is {'; '.join(said)}." if said else "The noise of seeds is not known."


def _gain(scores: Retrieval, distance: int) -> float:
    return float(np.mean(scores.trials[scores.distances.index(distance)]))


def _accuracy(run: Run, distance: int) -> float:
    return next(row["accuracy"] for row in run["passkey"]["passkey"]["rows"] if row["distance"] == distance)


def trials_of(folder: Path) -> Table:
    """The validation loss of each trial of a learning rate, by model."""
    labels = {trial.name: trial.label for trials in trials_by_run(load_recipe(RECIPE)).values() for trial in trials}
    losses: dict[str, dict[float, float]] = {}
    for path in folder.glob("*/run.json"):
        record = json.loads(path.read_text("utf-8"))
        if (loss := trial_loss(record)) is not None:
            losses.setdefault(labels[path.parent.name], {})[record["spec"]["learning_rate"]] = loss
    rates = sorted({rate for of in losses.values() for rate in of})
    rows: list[tuple[Cell, ...]] = []
    for label, of in sorted(losses.items()):
        best = min(of.values())
        rows.append((label, *(_trial(of[rate], of[rate] == best) if rate in of else None for rate in rates)))
    return Table("trials", "", ("model", *(f"{rate:g}" for rate in rates)), tuple(rows))


def _trial(loss: float, best: bool) -> Cell:
    return "diverged" if math.isinf(loss) else NumberCell(loss, digits=3, best=best)


def best_first(table: Table) -> Table:
    """The same table, its rows in the order of their first number."""
    return replace(table, rows=tuple(sorted(table.rows, key=lambda row: first_number(row, 2))))


def state(results: Sequence[Run]) -> str:
    """How many runs of the recipe are done, and what made them."""
    planned = load_recipe(RECIPE).runs
    done = f"{len(results)} of {len(planned)} runs are done, each model's trials of learning rates before its first."
    return f"{done}\n\n{made_by(map(_environments, results))}" if results else done


def _environments(run: Run) -> list[Mapping[str, Any]]:
    made = (run["environment"], *run.get("resumed", []), run["evaluation_environment"])
    return [one for one in made if one]


def written(page: str, pilot: Path = PILOT, record: Path = RECORD) -> str:
    """The page with all tables, each between its marks. Raises `ValueError` for a page without them."""
    runs = read_pilot(pilot)
    texts = {table.name: markdown(table, "") for table in (losses(runs), probes(runs))}
    results = read_results(record).runs if (record / "results").is_dir() else []
    texts["state"] = state(results)
    texts["trials"] = markdown(trials_of(record / "trials"), "")
    names = [f"{protocol} {kind}" for protocol in PROTOCOLS for kind in ("losses", "differences")]
    made = {table.name: markdown(table, "") for table in record_of(results)} if results else {}
    texts |= dict.fromkeys((*names, "gains", "learning", "passkeys"), "Not run yet.") | made
    texts["noise"] = noise(results) if results else "Not run yet."
    bytes_read = read_results(BYTES).runs
    texts["bytes"] = markdown(best_first(over_length("bytes", bytes_read, "matched", of=float, digits=2)), "")
    texts["bytes gains"] = markdown(gains("bytes gains", bytes_read), "")
    for name, text in texts.items():
        begin, end = f"<!-- {name}: docs/record/context_record.py -->", f"<!-- end of {name} -->"
        page = replace_between(page, begin, end, f"\n{text.strip()}\n")
    return page


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
    if made := read_results(RECORD).runs:
        save(loss_over_position(made), FIGURE)
