"""The demos: four small language models over context length, and networks beside filters on a series."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from rfa.environment import environment
from rfa.files import write_text_whole
from rfa.forecasting.scores import central_interval
from rfa.forecasting.style import save
from rfa.progress import Stage, StageProgress
from rfa_lab.data.simulated_series import SimulatedSetting, simulate_series
from rfa_lab.evaluation import evaluate
from rfa_lab.report.figures.comparison import filtered_series
from rfa_lab.report.figures.curves import training_and_extrapolation
from rfa_lab.results import write_result
from rfa_lab.training import RunFolder, TrainingSpec, train
from rfa_lab.training import resume as resume_run
from rfa_lab.training.callbacks import read_metrics
from rfa_lab.training.series import SeriesTraining

from .recipe import EvaluationPlan, PlannedRun, Recipe
from .run_result import make_result
from .series import SeriesRuns
from .series_contestants import build_network, filter_predictor, network_predictor, score, train_network


def _write_comparison(out: Path, comparison: Mapping[str, Any], figure: Figure) -> None:
    write_text_whole(out / "results.json", json.dumps(comparison, indent=2) + "\n")
    save(figure, out / "figure.png")


def _silent(*_: Any) -> None:
    """Report no progress."""


# Language models on the standard library's text

MODELS = ("rfa", "b1-rope", "b2-alibi", "m2-sc-rfa")
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
    out, models, report = Path(out), dict[str, Any](), progress or _silent
    begun = any((out / name).exists() for name in MODELS)
    if out.exists() and not begun and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {out} exists and is no demo's folder, expected a new or an empty one")
    comparison = {"train_length": SPEC["length"], "models": models}
    for name in MODELS:
        spec, folder = TrainingSpec(preset=name, **SPEC), RunFolder(out / name)

        def training(step: int, steps: int, *_: Any, name: str = name) -> None:
            report(Stage("training", name), step, steps)

        bars: dict[str, Any] = {"data_progress": partial(report, Stage("text", name)), "progress": training}
        if resume and folder.record.exists():
            if folder.read()["spec"] != spec.with_absolute_paths().to_dict():
                raise ValueError(f"out: the run in {folder.path} is not this demo's, expected a new folder")
            record = resume_run(folder.path, **bars)
        else:
            record = train(spec, folder.path, overwrite=overwrite, **bars)
        lengths, evaluating = [spec.length * factor for factor in LENGTHS], partial(report, Stage("evaluation", name))
        evaluated = evaluate(folder.path, lengths=lengths, max_tokens=TEST_TOKENS, progress=evaluating)
        curve = [
            (line["tokens"], line["valid_perplexity"]) for line in read_metrics(folder) if "valid_perplexity" in line
        ]
        models[name] = {"record": record, "curve": curve, "rows": evaluated["rows"]}
        write_result(out / "results" / f"{name}.json", _result(spec, folder, record, evaluated, lengths))
        curves, rows = ({name: model[part] for name, model in models.items()} for part in ("curve", "rows"))
        _write_comparison(out, comparison, training_and_extrapolation(curves, rows, SPEC["length"]))
    return comparison


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


# Two networks that learn to filter a tracked oscillator, beside filters that know its model

SETTING = SimulatedSetting(length=48, horizon=6.0, forecasts=24)
TRAINING = SeriesTraining(steps=240, batch_size=32, learning_rate=1e-2)
COLUMNS = {"as trained": SETTING, "20 % of readings x30": SETTING.changed(outliers=0.2, size=30.0)}
COLUMNS["four times as many"] = SETTING.changed(length=192)
SERIES = 32
# scaled by its window, a network would know of later readings; the filters do not
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "scaling": "training"}
NETWORKS = {"RFA": "rfa", "RoPE on real times": "b1-rope"}
FILTERS = {"robust filter, true model": "robust", "Kalman filter, true model": "kalman"}
_MADE = {"results.json", "figure.png", "results", "report"}


def run_series_demo(
    out: str | Path, *, overwrite: bool = False, progress: StageProgress | None = None
) -> dict[str, Any]:
    """Train two networks, score them and two filters, write `results.json`, `figure.png` and a result file for each.

    They are written after each contestant, so that a demo that is stopped leaves what is finished. `rfa report` reads
    the folder.

    Args:
        out: a folder; it may exist if it is empty, or with `overwrite`.
        overwrite: replace the results of an earlier demo.
        progress: called with the stage, the amount done and the total.

    Returns:
        The content of `results.json`: mean squared errors by contestant, setting, and "filter" or "forecast".

    Raises:
        ValueError: if the folder has other files.
        OSError: if the results cannot be written.
    """
    out, contestants, report = Path(out), NETWORKS | FILTERS, progress or _silent
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file, expected a folder")
    there = {path.name for path in out.iterdir()} if out.exists() else set()
    demos = "results.json" in there and there <= _MADE
    if there and not (overwrite and demos):
        expected = "an empty folder, or --overwrite" if demos else "an empty folder"
        raise ValueError(f"out: {out} has {', '.join(sorted(there))[:80]}, expected {expected}")
    files = {name: out / "results" / f"{contestant}.json" for name, contestant in contestants.items()}
    shown = simulate_series(SETTING, 1, torch.Generator().manual_seed(7))
    signal = torch.cat([shown.times, shown.query_times], dim=1), torch.cat([shown.signal, shown.future], dim=1)
    errors: dict[str, Any] = {}
    bands: dict[str, Any] = {}
    for name, contestant in contestants.items():
        if name in FILTERS:
            predict = filter_predictor(contestant)
        else:
            network = build_network(contestant, _SIZES, SETTING, TRAINING.seed)
            train_network(network, SETTING, TRAINING, partial(report, Stage("training", name)))
            predict = network_predictor(network)
        scores = {}
        for index, (column, setting) in enumerate(COLUMNS.items()):
            report(Stage("evaluation", name), index + 1, len(COLUMNS))
            scores[column] = score(predict, setting, SERIES)
        errors[name] = {column: {part: each["mse"] for part, each in scores[column].items()} for column in scores}
        if contestant != "kalman":  # its mean and 90 % interval of one series
            batch = shown.batch()
            with torch.no_grad():
                found = predict(SETTING, batch)
            bands[name] = _flat(batch.times, found.mean, *central_interval(found, 0.9))
        figure = filtered_series(
            _flat(shown.times, shown.values, shown.wrong), _flat(*signal), bands, float(shown.times[0, -1])
        )
        comparison = {"settings": list(COLUMNS), "mse": errors}
        _write_comparison(out, comparison, figure)  # first: by results.json a later call knows the folder of a demo
        names = {"recipe": "demo of series", "label": name, "seed": TRAINING.seed}
        write_result(files[name], {"format": SeriesRuns.form, **names, "scores": scores, "environment": environment()})
        for later in contestants.keys() - errors.keys():
            files[later].unlink(missing_ok=True)  # of an earlier demo
    return comparison


def _flat(*of_one_series: torch.Tensor) -> tuple[Any, ...]:
    return tuple(each[0].flatten().numpy() for each in of_one_series)
