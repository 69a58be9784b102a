"""The exported folder: weights, configuration, tokenizer, the files for `trust_remote_code`, and the model card."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from rfa.checks import require
from rfa.files import write_whole
from rfa.models.remote_code import auto_map
from rfa.models.saved_files import quiet_transformers
from rfa_lab.results import read_evaluation, read_result
from rfa_lab.training import RunFolder

from .model_card import TEST_SPLIT, Evaluated, model_card

_SAME = ("preset", "seed", "train_length", "parameters")  # of a run and of a result that is its own


def export_run(
    run: str | Path, out: str | Path, *, results: Sequence[str | Path] = (), overwrite: bool = False
) -> list[Path]:
    """Write a run as a folder for `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)`.

    The folder has the weights as safetensors, `config.json`, the generation settings, the tokenizer, two files of code
    that only import the installed `rfa`, and `README.md`, a model card. Nothing else of the run is copied.

    Args:
        run: a run folder, finished or with a checkpoint.
        out: the new folder, whole or absent.
        results: files of `rfa evaluate --json`, for the model card. The result of a recipe's run is found by itself:
            `DIR/results/NAME.json` for `DIR/runs/NAME`, or for `DIR/NAME` of a demo.
        overwrite: replace a folder that an export wrote.

    Returns:
        The result files that the model card shows.

    Raises:
        ValueError: for a folder that is no run or has no model yet, an `out` that exists, or a result of another run.
    """
    folder, out = RunFolder(run), Path(out)
    record, weights = folder.read(), folder.weights()
    inside = folder.owns(out) or out.resolve() == folder.path.resolve()
    require(not inside, "out", str(out), "a folder beside the run's own files")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        require(overwrite, "out", str(out), "a folder that does not exist, or overwrite")
        require(_is_export(out), "out", str(out), "a folder that an export wrote")
    model, tokenizer = cast(Any, folder.load_model(weights)), folder.load_tokenizer()
    about = {"preset": record["spec"]["preset"], "seed": record["spec"]["seed"]}
    about |= {"train_length": record["spec"]["length"], "parameters": model.num_parameters()}
    found = _result_of_recipe(folder.path)
    files = [*([found] if found else []), *map(Path, results)]
    evaluated = [each for file in files for each in _read(file, about)]
    card = model_card(out.resolve().name, record, weights.name, evaluated, about["parameters"])

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
    return files


def _is_export(out: Path) -> bool:
    return out.is_dir() and {"config.json", "modeling_rfa.py", "README.md"} <= {path.name for path in out.iterdir()}


def _result_of_recipe(run: Path) -> Path | None:
    run = run.resolve()
    beside = run.parent.parent if run.parent.name == "runs" else run.parent  # the demo has no folder `runs`
    path = beside / "results" / f"{run.name}.json"
    return path if path.is_file() else None


def _read(file: Path, about: dict[str, Any]) -> list[Evaluated]:
    """The evaluations in a file, which has to be of a run with this preset, seed, training length and size."""
    try:
        of_recipe = "evaluations" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"results: {file} cannot be read ({error}), expected a result file") from error
    result = read_result(file) if of_recipe else read_evaluation(file)
    given = {**result, **(result["training"] if of_recipe else {})}
    for name in _SAME:
        require(
            given[name] == about[name], "results", f"{file} of {name} {given[name]!r}", f"{about[name]!r}, the run's"
        )
    if not of_recipe:
        return [Evaluated(Path(result["data"]).name, result["fingerprint"], result["rows"])]
    text = Path(result["spec"]["data"]).name + TEST_SPLIT
    by_protocol = result["evaluations"].items()
    rows = [{**row, "protocol": protocol} for protocol, evaluation in by_protocol for row in evaluation["rows"]]
    return [Evaluated(text, result["fingerprint"], rows)]
