"""A run as a folder that transformers loads, with a model card of the run's own results."""

from rfa.checks import needs

needs("transformers")

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedTokenizerFast

from rfa.checks import require
from rfa.files import write_whole
from rfa.models import describe
from rfa.models.configuration import auto_map
from rfa.models.saved_files import quiet_transformers
from rfa_lab.training import RunFolder

_TEST_SPLIT = " (test split)"  # ends the name of a text that is a run's own test split
_SAME_RUN = ("preset", "seed", "train_length", "parameters")  # of a run and of an evaluation that is its own
_MARKUP = re.compile(r"[\\`*\[\]!|~#]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.", re.IGNORECASE)  # the last two begin links
_CARD = """# {title}

A language model whose attention is a robust filter. `rfa export` wrote this card from the run's own record and results.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer  # after: pip install robust-filter-attention

folder = {literal}  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

`trust_remote_code` lets transformers run the two Python files of this folder. They only import the installed `rfa`.

| | |
| --- | --- |
{facts}

{results}

The licence of the weights and of the text, and the language, are not in the run's record: add them.
"""
_RESULTS = """| text | protocol | context length | scored tokens | loss (nats) | perplexity |
| --- | --- | ---: | ---: | ---: | ---: |
"""
_NO_RESULTS = "Not evaluated: `rfa evaluate RUN --json FILE` measures it, and `rfa export --results FILE` shows it."


def export_run(
    run: str | Path, out: str | Path, *, results: Sequence[str | Path] = (), overwrite: bool = False
) -> None:
    """Write a run as a folder for `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)`.

    The folder has the weights as safetensors, `config.json`, the generation settings, the tokenizer, two files of code
    that only import the installed `rfa`, and `README.md`, a model card. Nothing else of the run is copied.

    Args:
        run: a run folder, finished or with a checkpoint.
        out: the new folder, whole or absent.
        results: files of `rfa evaluate --json`, for the model card.
        overwrite: replace a folder that an export wrote.

    Raises:
        ValueError: for a folder that is no run or has no model yet, an `out` that exists, or a result of another run.
    """
    folder, out = RunFolder(run), Path(out)
    record, weights = folder.read(), folder.weights()
    inside = folder.owns(out) or out.resolve() == folder.path.resolve()
    require(not inside, "out", str(out), "a folder beside the run's own files")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        require(overwrite, "out", str(out), "a folder that does not exist, or overwrite")
        written = {path.name for path in out.iterdir()} if out.is_dir() else set()
        ours = {"config.json", "modeling_rfa.py", "README.md"} <= written
        require(ours, "out", str(out), "a folder that an export wrote")
    model, tokenizer = cast(Any, folder.load_model(weights)), folder.load_tokenizer()
    spec = record["spec"]
    about = {"preset": spec["preset"], "seed": spec["seed"], "train_length": spec["length"]}
    about["parameters"] = model.num_parameters()
    rows = [row for file in map(Path, results) for row in _evaluations(file, about)]
    card = model_card(out.resolve().name, record, weights.name, about["parameters"], rows)

    model.config.auto_map = auto_map(model.config.model_type)
    model.config.use_cache = model.generation_config.use_cache = True  # training switches it off
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.eos_token,  # with padding on the left, for batches of prompts
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )

    def write(path: Path) -> None:
        with quiet_transformers():
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
        (path / "README.md").write_text(card, encoding="utf-8")

    write_whole(out.resolve(), write)


def _evaluations(file: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The evaluations in a file, which has to be of a run with this preset, seed, training length and size."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        text, fingerprint = Path(given["data"]).name, given["fingerprint"]
        names = ("protocol", "length", "loss", "perplexity", "targets")
        rows = [
            {"text": text, "fingerprint": fingerprint, **{name: row[name] for name in names}} for row in given["rows"]
        ]
        numbers = all(isinstance(row[name], int | float) for row in rows for name in names[1:])
        require(numbers, "results", "rows without numbers", "numbers")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"results: {file} cannot be read ({error}), expected what `rfa evaluate --json` wrote"
        ) from error
    for name in _SAME_RUN:
        same = given.get(name) == about[name]
        require(same, "results", f"{file} of {name} {given.get(name)!r}", f"{about[name]!r}, the run's")
    return rows


def model_card(name: str, record: dict[str, Any], weights: str, parameters: int, rows: Sequence[dict[str, Any]]) -> str:
    """The text of README.md. Each number in it is from the run's record or from a result."""
    spec, config, environment = record["spec"], record["config"], record["environment"]
    result = record.get("result") or {}
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    facts = {
        "model": f"{spec['preset']} ({describe(spec['preset'])})",
        "fields that differ from the preset": ", ".join(f"{key} = {value}" for key, value in spec["model"].items()),
        "parameters": f"{parameters:,}",
        "layers, heads, hidden size": ", ".join(str(config[size]) for size in sizes),
        "tokenizer": f"{spec['tokenizer'].partition(':')[0]}, {config['vocab_size']} tokens",
        "training length": f"{spec['length']} tokens",
        "text": f"{Path(record['data']['corpus']).name}, split by {record['data'].get('split', spec['split_by'])}",
        "fingerprint of the text": record["data"]["fingerprint"],
        "run": "finished" if record["finished"] else f"not finished: the weights are those of {weights}",
        "optimiser steps": f"{record['steps']:,}",
        "tokens seen": result.get("tokens"),
        "peak learning rate, seed": f"{spec['learning_rate']:g}, {spec['seed']}",
        "precision": "bfloat16 autocast" if spec["bf16"] else "float32",
        "validation perplexity": f"{result['valid_perplexity']:.2f}" if result else None,
        "machine": f"{environment.get('device')}; {environment.get('machine')}",
        **{key: environment.get(key) for key in ("rfa", "commit", "python", "torch", "transformers", "tokenizers")},
    }
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=_on_one_line(row["text"].removesuffix(_TEST_SPLIT)),
            dataset_name=_on_one_line(row["text"]),
            dataset_args={"fingerprint": row["fingerprint"]},
            metric_type="perplexity",
            metric_name=f"perplexity, {row['protocol']}, {row['length']} tokens",
            metric_value=round(row["perplexity"], 4),
        )
        for row in rows
    ]
    named: dict[str, Any] = {"model_name": _on_one_line(name), "eval_results": results} if results else {}
    tags = ["rfa", "robust-filter-attention", spec["preset"]]
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=tags, **named)
    digits = {"text": "", "protocol": "", "length": "", "targets": "", "loss": ".4f", "perplexity": ".2f"}
    told = "\n".join(f"| {key} | {_markdown_text(value)} |" for key, value in facts.items() if value)
    cells = ([_markdown_text(format(row[key], form)) for key, form in digits.items()] for row in rows)
    table = _RESULTS + "\n".join(f"| {' | '.join(row)} |" for row in cells) if rows else _NO_RESULTS
    body = _CARD.format(title=_markdown_text(name), literal=repr(name), facts=told, results=table)
    return f"---\n{data.to_yaml()}\n---\n{body}"


def _on_one_line(value: object) -> str:
    """Text without line breaks and without characters that show nothing or turn the text around them."""
    return "".join(letter for letter in " ".join(str(value).split()) if letter.isprintable())


def _markdown_text(value: object) -> str:
    """Text on one line that Markdown shows as it is: it ends no cell, and makes no HTML, link, image or emphasis."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(_on_one_line(value), quote=False))
