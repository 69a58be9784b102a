"""The pilot's tables of docs/context.md, from results/context/pilot: `python docs/context_record.py`.

A file of the pilot is a run of `b1-rope`. Its entries are

- `format` (1), `kind` ("pilot"), `run` (a name), `setting` (text and sizes), `environment` (or None),
- `steps_done`: how far the training went,
- `measures`: None for a run that was not finished. Losses and gains are in nats a token.
  `trigram_loss` is on the model's test tokens, `trigram_loss_of_first_tokens` on the first 400,000 of the test text.
  `repeat` and `passkey` are by the distance in tokens. `accuracy` is the share of 64 trials.
"""

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from rfa.files import write_text_whole
from rfa.report.layout import Cell, NumberCell, Table, markdown, replace_between
from rfa.report.records import is_number

PAGE = Path(__file__).with_name("context.md")
PILOT = Path(__file__).parents[1] / "results" / "context" / "pilot"
LEAST_GAIN, LEAST_REPEAT = 0.5, 1.5  # nats a token: what a setting must reach for its models to use their context
_SIZES = ("vocabulary", "layers", "hidden_size", "heads", "length", "batch_size", "steps")
_PARTS = ("first_half", "second_quarter", "second_half")
_NUMBERS = (
    *("parameters", "tokens", "passes", "seconds", "valid_perplexity"),
    *("loss", "trigram_loss", "trigram_loss_of_first_tokens"),
)
Run = Mapping[str, Any]


def read_pilot(folder: Path) -> list[dict[str, Any]]:
    """The runs of the pilot: those with measures first, then in the order of their names.

    Raises:
        ValueError: for a file without the entries above, or a folder without files.
    """
    runs = []
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text("utf-8"))
        if not (isinstance(run, dict) and run.get("run") == path.stem and _is_pilot(run)):
            raise ValueError(f"pilot: {path} is damaged, expected the entries that docs/context_record.py names")
        runs.append(run)
    if not runs:
        raise ValueError(f"folder: {folder} has no files, expected those of the pilot")
    return sorted(runs, key=lambda run: run["measures"] is None)


def _is_pilot(run: Run) -> bool:
    setting, measures, done = run.get("setting"), run.get("measures"), run.get("steps_done")
    if (run.get("format"), run.get("kind")) != (1, "pilot") or not isinstance(setting, dict):
        return False
    if not isinstance(setting.get("text"), str) or not all(is_number(setting.get(size), 1) for size in _SIZES):
        return False
    if not is_number(done, 0, setting["steps"]):
        return False
    return measures is None or (done == setting["steps"] and isinstance(measures, dict) and _is_measured(measures))


def _is_measured(measures: Run) -> bool:
    parts, repeat, passkey = (measures.get(name) for name in ("loss_by_part", "repeat", "passkey"))
    if not all(isinstance(each, dict) for each in (parts, repeat, passkey)):
        return False
    numbers = [measures.get(name) for name in _NUMBERS] + [parts.get(part) for part in _PARTS]
    numbers += [row.get(name) for row in repeat.values() for name in ("gain", "standard_error")]
    numbers += [row.get(name) for row in passkey.values() for name in ("gain", "accuracy")]
    return all(is_number(number) for number in numbers) and repeat.keys() == passkey.keys()


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
    """The run with the least training time of those that meet all conditions."""
    met = [run for run in runs if run["measures"] and all(conditions(run))]
    return min(met, key=lambda run: run["measures"]["seconds"])


def _named(run: Run) -> str:
    of = run["setting"]
    sizes = f"{of['vocabulary']:,}, {of['layers']} layers, d {of['hidden_size']}, {of['length']}"
    return f"{of['text']}, {sizes}, {of['steps']:,} steps"


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


def written(page: str, pilot: Path = PILOT) -> str:
    """The page with the pilot's tables, each between its marks. Raises `ValueError` for a page without them."""
    runs = read_pilot(pilot)
    for table in (losses(runs), probes(runs)):
        begin, end = f"<!-- {table.name}: docs/context_record.py -->", f"<!-- end of {table.name} -->"
        page = replace_between(page, begin, end, f"\n{markdown(table, '').strip()}\n")
    return page


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
