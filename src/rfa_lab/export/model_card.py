"""The model card: YAML for the Hub, and Markdown tables of what the run itself recorded."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from rfa.checks import install_command
from rfa.models import describe

TEST_SPLIT = " (test split)"  # ends the name of a text that is a run's own test split
_PROTOCOLS = {
    "blocks": "non-overlapping windows of the context length; all tokens but the first are scored",
    "matched": "windows of every length end at the same tokens and score the same targets; only the context differs",
    "strided": "windows overlap by half, and each scores the tokens that the one before did not",
}
_MARKUP = re.compile(r"[\\`*\[\]!|~#]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.", re.IGNORECASE)  # the last two begin links
_USE = """Install the library first: {install}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = {name!r}  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

`trust_remote_code` lets transformers run the two Python files of this folder. They only import the installed `rfa`.
"""


class Evaluated(NamedTuple):
    """Perplexities of the model on one text: its name, its fingerprint, and the rows of the result file."""

    text: str
    fingerprint: str
    rows: Sequence[Mapping[str, Any]]


def model_card(
    name: str, record: Mapping[str, Any], weights: str, evaluated: Sequence[Evaluated], parameters: int
) -> str:
    """The text of README.md. Each number in it is from the run's record or from a result file.

    Args:
        name: of the model.
        record: content of run.json.
        weights: `model`, or the name of the checkpoint of an unfinished run.
        evaluated: what result files hold.
        parameters: number of the model's parameters.
    """
    spec, config, environment = record["spec"], record["config"], record["environment"]
    corpus = Path(record["data"]["corpus"]).name
    preset = spec["preset"]
    changed = ", ".join(f"{field} = {value}" for field, value in spec["model"].items())
    tokens = record["data"].get("tokens", {})
    result = record.get("result") or {}
    state = "finished" if record["finished"] else f"not finished: the weights are those of {weights}"
    speed = result.get("tokens_per_second")
    machine = f"{environment.get('device')}; {environment.get('machine')}"
    perplexity = result.get("valid_perplexity")
    model_rows = {
        "model": f"{preset} ({describe(preset)})",
        "fields that differ from the preset": changed or "none",
        "parameters": f"{parameters:,}",
        "layers, heads, hidden size": ", ".join(
            str(config.get(field)) for field in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        ),
        "tokenizer": f"{spec['tokenizer'].partition(':')[0]}, {config.get('vocab_size')} tokens",
        "training length": f"{spec['length']} tokens",
    }
    training_rows = {
        "text": f"{corpus}, split by: {record['data'].get('split', spec['split_by'])}",
        "fingerprint of the text": record["data"]["fingerprint"],
        "tokens of the splits": ", ".join(f"{split} {count:,}" for split, count in tokens.items()) or "not recorded",
        "run": state,
        "optimiser steps": f"{record['steps']:,}, each of {spec['batch_size'] * spec['accumulate']} blocks a process",
        "step of the weights": result.get("best_step"),
        "processes": record.get("processes", 1),
        "tokens seen": f"{result['tokens']:,}" if "tokens" in result else None,
        "peak learning rate, seed": f"{spec['learning_rate']:g}, {spec['seed']}",
        "precision": "bfloat16 autocast" if spec["bf16"] else "float32",
        "validation perplexity": f"{perplexity:.2f}" if perplexity is not None else None,
        "speed": f"{speed:,.0f} tokens/s on {machine}" if speed else None,
    }
    versions = {key: environment.get(key) for key in ("rfa", "commit", "python", "torch", "transformers", "tokenizers")}
    parts = [
        f"# {_escaped(name)}",
        "A language model whose attention is a robust filter. `rfa export` wrote this card from the run's own record "
        "and result files.",
        "## Use",
        _USE.format(name=name, install=install_command("hf")),
        "## Model",
        _two_columns(model_rows),
        "## Training",
        _two_columns(training_rows),
        "## Perplexity",
        _perplexities(evaluated),
        "## Versions",
        _two_columns(versions),
        "## What is not known",
        "The licence of the weights and of the text, and the language, are not in the run's record: add them. Nothing "
        "beside the perplexities above was measured.",
    ]
    body = "\n\n".join(part.strip() for part in parts)
    return f"---\n{_front_matter(name, spec['preset'], evaluated).to_yaml()}\n---\n{body}\n"


def _front_matter(name: str, preset: str, evaluated: Iterable[Evaluated]) -> ModelCardData:
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=_on_one_line(each.text.removesuffix(TEST_SPLIT)),
            dataset_name=_on_one_line(each.text),
            dataset_split="test" if each.text.endswith(TEST_SPLIT) else None,
            dataset_args={"fingerprint": each.fingerprint},
            metric_type="perplexity",
            metric_name=f"perplexity, {row['protocol']}, {row['length']} tokens",
            metric_value=round(row["perplexity"], 4),
        )
        for each in evaluated
        for row in each.rows
    ]
    named: dict[str, Any] = {"model_name": _on_one_line(name), "eval_results": results} if results else {}
    tags = ["rfa", "robust-filter-attention", preset]
    return ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=tags, **named)


def _perplexities(evaluated: Sequence[Evaluated]) -> str:
    if not evaluated:
        return "Not evaluated: `rfa evaluate RUN --json FILE` measures it, and `rfa export --results FILE` shows it."
    lines = ["| text | protocol | context length | scored tokens | loss (nats) | standard error | perplexity |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for each in evaluated:
        for row in each.rows:
            error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
            numbers = f"{row['length']} | {row['targets']:,} | {row['loss']:.4f} | {error} | {row['perplexity']:.2f}"
            lines.append(f"| {_escaped(each.text)} | {_escaped(row['protocol'])} | {numbers} |")
    named = dict.fromkeys(row["protocol"] for each in evaluated for row in each.rows)
    said = [f"- `{protocol}`: {_PROTOCOLS[protocol]}." for protocol in named if protocol in _PROTOCOLS]
    return "\n".join([*lines, "", *said])


def _two_columns(rows: Mapping[str, Any]) -> str:
    shown = [f"| {name} | {_escaped(value)} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "| --- | --- |", *shown])


def _on_one_line(value: object) -> str:
    """Text without line breaks and without characters that show nothing or turn the text around them."""
    return "".join(letter for letter in " ".join(str(value).split()) if letter.isprintable())


def _escaped(value: object) -> str:
    """Text on one line that Markdown shows as it is: it ends no cell, and makes no HTML, link, image or emphasis."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(_on_one_line(value), quote=False))
