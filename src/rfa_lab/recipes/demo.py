"""The demo: train four small models on the standard library's text, and compare them over context length."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rfa.files import write_text_whole
from rfa.forecasting.style import save
from rfa.progress import Stage, StageProgress
from rfa_lab.evaluation import evaluate
from rfa_lab.report.figures.curves import training_and_extrapolation
from rfa_lab.results import write_result
from rfa_lab.training import RunFolder, TrainingSpec, train
from rfa_lab.training import resume as resume_run
from rfa_lab.training.callbacks import read_metrics

from .recipe import EvaluationPlan, PlannedRun, Recipe
from .run_result import make_result

MODELS = ("b1-rope", "b2-alibi", "m2-sc-rfa", "m3-sc-rfa")
LENGTHS = (1, 2, 4, 8)  # times the training length

# Bytes, short blocks and a higher learning rate than the protocol's. A model shows its behaviour beyond the training
# length only after it has learned to use its context; this is the fastest way there (docs/record/experiments.md).
SPEC: dict[str, Any] = {
    "model": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8},
    "data": "stdlib",
    "tokenizer": "bytes",
    "length": 32,
    "batch_size": 16,
    "learning_rate": 3e-3,
    "max_steps": 700,
    "eval_steps": 100,
    "valid_tokens": 2**14,
}
TEST_TOKENS = 2**15


def run_demo(
    out: str | Path, *, overwrite: bool = False, resume: bool = False, progress: StageProgress | None = None
) -> dict[str, Any]:
    """Train, evaluate, write `results.json`, `figure.png` and the result files that `rfa report` reads.

    All of them are written again when a model is finished, so an interrupted demo has those of the finished models.

    Args:
        out: the folder of the demo, with a run folder for each model.
        overwrite: replace the demo's existing runs.
        resume: keep finished runs, and continue a run that was stopped.
        progress: called with the stage ("text", "training" or "evaluation" of a model), the amount done and the total.

    Returns:
        The content of `results.json`: for each model its record, validation curve, and the `rows` of its evaluation.

    Raises:
        ValueError: if the folder exists and neither `overwrite` nor `resume` is given, or has other runs or files.
        Stopped: on Ctrl-C, after saving.
    """
    out = Path(out)
    begun = any((out / name).exists() for name in MODELS)
    if out.exists() and not begun and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {out} exists and is no demo's folder, expected a new or an empty one")
    comparison: dict[str, Any] = {"train_length": SPEC["length"], "models": {}}
    for name in MODELS:

        def progress_of(stage: str, run: str = name) -> Callable[..., None]:
            return lambda done, total, *_: progress(Stage(stage, run), done, total) if progress else None

        spec, folder = TrainingSpec(preset=name, **SPEC), RunFolder(out / name)
        bars: dict[str, Any] = {"data_progress": progress_of("text"), "progress": progress_of("training")}
        if resume and folder.record.exists():
            if folder.read()["spec"] != spec.with_absolute_paths().to_dict():
                raise ValueError(f"out: the run in {folder.path} is not this demo's, expected a new folder")
            record = resume_run(folder.path, **bars)
        else:
            record = train(spec, folder.path, overwrite=overwrite, **bars)
        lengths = [spec.length * factor for factor in LENGTHS]
        evaluated = evaluate(folder.path, lengths=lengths, max_tokens=TEST_TOKENS, progress=progress_of("evaluation"))
        curve = [
            (line["tokens"], line["valid_perplexity"]) for line in read_metrics(folder) if "valid_perplexity" in line
        ]
        comparison["models"][name] = {"record": record, "curve": curve, "rows": evaluated["rows"]}
        write_result(out / "results" / f"{name}.json", _result(spec, folder, record, evaluated, lengths))
        _write_comparison(out, comparison)
    return comparison


def _write_comparison(out: Path, comparison: Mapping[str, Any]) -> None:
    """Write `results.json` and the figure of the models in it."""
    write_text_whole(out / "results.json", json.dumps(comparison, indent=2) + "\n")
    figure = training_and_extrapolation(
        {name: model["curve"] for name, model in comparison["models"].items()},
        {name: model["rows"] for name, model in comparison["models"].items()},
        comparison["train_length"],
    )
    save(figure, out / "figure.png")


def _result(
    spec: TrainingSpec,
    folder: RunFolder,
    record: Mapping[str, Any],
    evaluated: Mapping[str, Any],
    lengths: Sequence[int],
) -> dict[str, Any]:
    """The result file of one model: the demo as a recipe whose evaluation is shorter."""
    run = PlannedRun(spec)
    plan = EvaluationPlan(lengths=list(lengths), protocols={"blocks": TEST_TOKENS})
    recipe = Recipe.model_construct(name="demo", runs=(run,), evaluation=plan)
    parts = {
        "evaluations": {"blocks": {"rows": evaluated["rows"], "books": evaluated["books"]}},
        **dict.fromkeys(("by_position", "passkey", "attention", "attention_summary")),
        "fingerprint": evaluated["fingerprint"],
        "environment": evaluated["environment"],
    }
    return make_result(recipe, run, folder, record, parts, {})
