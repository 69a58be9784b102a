"""The tables of a record: perplexity over context length, the paper's own numbers, differences, runs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rfa_lab.record import Record

from .statistics import Difference, differences, over_seeds, seed_noise

BASELINES = ("b1-rope", "b2-alibi")
_PAPERS_TEXT = {"table1": "wikitext-103", "table2": "wikitext-103-damping", "table3": "babylm-2025-strict"}
_M2, _M3 = ("m2-sc-rfa", "sc-rfa"), "m3-sc-rfa"  # the paper's sweep of the damping has m3 at b = 5
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "backend"}
_MIN_SWEEP = 3  # values of b; m2 and m3 alone are no sweep


_MINUS, _DASH = "\N{MINUS SIGN}", "\N{EN DASH}"


class Table(NamedTuple):
    """A table: the text of its cells, the unrounded numbers behind them, a caption and notes."""

    name: str  # of its files
    caption: str
    text: pd.DataFrame
    numbers: pd.DataFrame
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Caption, table and notes as Markdown. The best number of a column is bold."""
        rows = [[*self.text.columns], ["---", *(["---:"] * (self.text.shape[1] - 1))], *self.text.to_numpy().tolist()]
        body = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"{self.caption}\n\n{body}\n\n{notes}"

    def latex(self) -> str:
        """A LaTeX table, which needs the package booktabs."""
        text = self.text.replace({r"\*\*": "", _MINUS: "-", _DASH: "--"}, regex=True)
        about = {"caption": self.caption, "label": f"tab:{self.name}", "index": False, "escape": True}
        return text.to_latex(**about).replace("±", r"$\pm$")

    def html(self) -> str:
        """An HTML table. The best number of a column is bold."""
        html = self.text.to_html(index=False, border=0, escape=True)
        return html.replace("<td>**", '<td class="best">').replace("**</td>", "</td>")


@cache
def published_results() -> dict[str, Any]:
    """Test perplexities of the paper's tables by text and preset or damping, each a list over `lengths`."""
    return json.loads(files("rfa_lab.report").joinpath("published.json").read_text(encoding="utf-8"))


def damping_of(settings: Mapping[str, Any]) -> float | None:
    """The damping b of a run of SC-RFA; None for another model, or one with other changes than b and its size."""
    spec = settings["spec"]
    options = {name for name in spec["model"] if name not in (*_SIZES, "damping")}
    if spec["preset"] not in (*_M2, _M3) or options or spec.get("one_group"):
        return None
    return float(settings["config"]["attention"]["decay"]["damping"])


def damping_by_label(record: Record) -> dict[str, float]:
    """The damping of each label of a sweep, smallest first; empty where there are fewer than three values of b."""
    found = {label: damping_of(record.of(label)[0]) for label in record.labels()}
    swept = {label: b for label, b in found.items() if b is not None}
    return dict(sorted(swept.items(), key=lambda item: item[1])) if len(set(swept.values())) >= _MIN_SWEEP else {}


def _number(value: float, digits: int = 2, signed: bool = False) -> str:
    return f"{value:{'+' * signed},.{digits}f}".replace("-", _MINUS)


def _with_half(value: float, half: float, digits: int = 2, **form: bool) -> str:
    if math.isnan(value):
        return _DASH
    return _number(value, digits, **form) + ("" if math.isnan(half) else f" ± {half:,.{digits}f}")


def perplexity_table(
    name: str, caption: str, record: Record, protocol: str, names: Mapping[str, str], others: bool = True
) -> Table:
    """Perplexity over context length: means over seeds with halves of 95 % t intervals.

    Args:
        name, caption: of the table.
        record: of the runs.
        protocol: of the evaluation.
        names: the first rows: labels, also those without a run, and how the table names them.
        others: whether all other labels follow.
    """
    by_seed = np.exp(record.values(f"loss {protocol}"))
    means, halves = over_seeds(by_seed)
    labels = list(dict.fromkeys([*names, *(record.labels() if others else ())]))
    means, halves = means.reindex(labels), halves.reindex(labels)
    seeds = by_seed.groupby(level="label").size().reindex(labels, fill_value=0)
    text = pd.DataFrame({"model": [names.get(label, label) for label in labels], "seeds": [str(n) for n in seeds]})
    numbers = text.copy()
    for length in means:
        cells = [_with_half(value, half) for value, half in zip(means[length], halves[length], strict=True)]
        text[f"L = {length:g}"] = _best_in_bold(cells, means[length])
        numbers[f"L = {length:g}"] = means[length].to_numpy()
        numbers[f"L = {length:g} half"] = halves[length].to_numpy()
    notes = [setting(record), "Mean ± half of the 95 % t interval over seeds. Bold: the lowest of its column."]
    notes += _noise_note(record, protocol)
    if absent := [label for label in labels if not seeds[label]]:
        notes.append(f"Not run here: {', '.join(absent)}.")
    return Table(name, caption, text, numbers, tuple(notes))


def _best_in_bold(cells: Sequence[str], values: Iterable[float]) -> list[str]:
    printed = [round(value, 2) for value in values]
    known = [value for value in printed if not math.isnan(value)]
    least = min(known) if len(known) > 1 else math.nan
    return [f"**{cell}**" if value == least else cell for cell, value in zip(cells, printed, strict=True)]


def _paper_table(record: Record) -> str:
    """The paper's table whose models a record has: table 3 for its recipe, or BabyLM's text; otherwise table 1."""
    every = record.settings.values()
    third = any(each["recipe"].startswith("table3") or "babylm" in each["spec"]["data"] for each in every)
    return "table3" if third else "table1"


def models_table(record: Record, protocol: str) -> Table:
    """Perplexity of all models, those of the paper's table 1 or 3 first and in its order. A sweep has its own table."""
    which = _paper_table(record)
    swept = {
        label for label, b in damping_by_label(record).items() if "damping" in record.of(label)[0]["spec"]["model"]
    }
    kept = record.only(label for label in record.labels() if label not in swept)
    caption = f"Test perplexity over context length (the models of the paper's table {which[-1]}). Protocol {protocol}."
    paper = dict.fromkeys(published_results()[_PAPERS_TEXT[which]])
    return perplexity_table(f"{which}-{protocol}", caption, kept, protocol, {label: label for label in paper})


def damping_table(record: Record, protocol: str) -> Table:
    """Perplexity by damping coefficient b (the paper's table 2), with both baselines."""
    swept = {b: label for label, b in damping_by_label(record).items()}
    every = sorted({*swept, *map(float, published_results()[_PAPERS_TEXT["table2"]])})
    names = {label: label for label in BASELINES} | {swept.get(b, f"b={b:g}"): f"b = {b:g}" for b in every}
    caption = f"Test perplexity by damping coefficient b of SC-RFA (as the paper's table 2). Protocol {protocol}."
    return perplexity_table(f"table2-{protocol}", caption, record, protocol, names, others=False)


def published_table(name: str) -> Table:
    """The paper's own table 1, 2 or 3, at its own context lengths. Its models were trained on 512 tokens."""
    published = published_results()
    found = published[_PAPERS_TEXT[name]]
    what = f"over context length on {'BabyLM-2025 strict' if name == 'table3' else 'WikiText-103'}"
    if name == "table2":
        what = "by damping coefficient b on WikiText-103"
        swept = {f"b = {b:g}": row for b, row in sorted((float(b), row) for b, row in found.items())}
        found = {label: published[_PAPERS_TEXT["table1"]][label] for label in BASELINES} | swept
    columns = [f"L = {length}" for length in published["lengths"]]
    numbers = pd.DataFrame(list(found.values()), columns=columns)
    text = pd.DataFrame({"model": list(found)})
    for column in columns:
        text[column] = _best_in_bold([_number(value) for value in numbers[column]], numbers[column])
    numbers.insert(0, "model", list(found))
    caption = f"The paper's table {name[-1]}: test perplexity {what}, trained on 512 tokens."
    return Table(
        f"paper-{name}", caption, text, numbers, ("Protocol blocks; one run each. Bold: the lowest of its column.",)
    )


def difference_table(record: Record, protocol: str) -> Table:
    """Differences of mean loss to each baseline on the same seeds and books, with both intervals."""
    lengths = [*record.values(f"loss {protocol}").columns]
    rows, numbers, fields = list[dict[str, Any]](), list[dict[str, Any]](), ("value", "half", "low", "high", "verdict")
    for baseline in BASELINES:
        for label, of in differences(record, baseline, protocol).items():
            about = {"model": label, "against": baseline, "seeds": str(max(each.seeds for each in of.values()))}
            rows.append(about | {f"L = {length:g}": _difference_cell(of.get(length)) for length in lengths})
            found = {f"L = {x:g} {field}": getattr(each, field) for x, each in of.items() for field in fields}
            numbers.append(about | found)
    notes = (
        "Nats a token, negative: better than the baseline. Mean ± half of the 95 % t interval over seeds, and the 95 % "
        "bootstrap interval over books, which is too narrow where books or authors are few.",
        "Open: one of the intervals holds 0. Within a seed: of one seed, and no larger than the noise of seeds.",
        *_noise_note(record, protocol),
    )
    caption = f"Paired differences of log perplexity. Protocol {protocol}."
    return Table(f"differences-{protocol}", caption, pd.DataFrame(rows), pd.DataFrame(numbers), notes)


def _difference_cell(found: Difference | None) -> str:
    if found is None:
        return _DASH
    cell = _with_half(found.value, found.half, 3, signed=True)
    if not math.isnan(found.low):
        cell += f" [{_number(found.low, 3, True)}, {_number(found.high, 3, True)}]"
    return f"{cell} {found.verdict}".rstrip()


def _noise_note(record: Record, protocol: str) -> list[str]:
    """A note on the noise of seeds, with which a difference of one seed is compared."""
    losses = record.values(f"loss {protocol}")
    known = [
        f"{noise:.3f} at L = {length:g}" for length in losses if not math.isnan(noise := seed_noise(losses[length]))
    ]
    said = "One seed: two models that differ by less, in nats, are within a seed: "
    return [f"{said}{', '.join(known)}."] if known else []


def runs_table(record: Record) -> Table:
    """All runs: parameters, tokens, learning rate, speed, and validation perplexity at the end."""
    runs = record.runs()
    settings = [record.settings[run] for run in runs["run"]]
    training = pd.DataFrame([each["training"] for each in settings])
    numbers = pd.DataFrame({"model": runs["label"], "seed": runs["seed"]})
    numbers[["parameters", "tokens"]] = training[["parameters", "tokens"]]
    numbers["rate"] = [each.get("learning_rate", each["spec"]["learning_rate"]) for each in settings]
    numbers[["tokens/s", "validation perplexity"]] = training[["tokens_per_second", "valid_perplexity"]]
    text = numbers.assign(rate=[f"{rate:g}" for rate in numbers["rate"]])
    for column, places in {"parameters": 0, "tokens": 0, "tokens/s": 0, "validation perplexity": 2}.items():
        text[column] = [_DASH if pd.isna(value) else _number(value, places) for value in numbers[column]]
    note = "Speeds are of the machine under whatever else it did. `rfa bench` compares models in turns."
    return Table("runs", "The runs.", text.astype(str), numbers, (note,))


def setting(record: Record) -> str:
    """A sentence with text, tokenizer, sizes and tokens; where runs differ, each value with its number of runs."""
    every = list(record.settings.values())
    found = {
        "text": [PurePath(each["spec"]["data"]).name for each in every],
        "tokenizer": [each["spec"]["tokenizer"] for each in every],
        "layers": [each["config"]["num_hidden_layers"] for each in every],
        "width": [each["config"]["hidden_size"] for each in every],
        "trained on windows of": [f"{each['train_length']} tokens" for each in every],
        "tokens a run": [f"{each['training']['tokens']:,}" for each in every],
    }
    return f"Here: {', '.join(f'{name} {_values_with_counts(values)}' for name, values in found.items())}."


def _values_with_counts(values: Sequence[Any]) -> str:
    counts = pd.Series([str(value) for value in values]).value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    return " and ".join(f"{value} ({count} runs)" for value, count in counts.items())


def record_tables(record: Record) -> list[Table]:
    """All tables of a record, in their order on the page. A sweep of the damping alone has table 2 alone."""
    tables, swept = list[Table](), damping_by_label(record)
    of_models = not swept or any(label not in (*swept, *BASELINES) for label in record.labels())
    for protocol in record.protocols():
        tables += [models_table(record, protocol)] if of_models else []
        tables += [damping_table(record, protocol)] if swept else []
        if (compared := difference_table(record, protocol)).text.size:
            tables.append(compared)
    tables += [published_table(_paper_table(record))] if of_models else []
    tables += [published_table("table2")] if swept else []
    return [*tables, runs_table(record)]
