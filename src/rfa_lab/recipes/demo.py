"""The demo: four small language models over context length."""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from rfa.checks import require
from rfa.progress import Stage, StageProgress
from rfa_lab.evaluation import full_evaluation
from rfa_lab.report.figures import demo_figure
from rfa_lab.style import save
from rfa_lab.training import RunFolder, TrainingSpec, train
from rfa_lab.training import resume as resume_run
from rfa_lab.training.callbacks import read_metrics

from .recipe import PlannedRun
from .result import measurements, run_settings, write_result

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
) -> pd.DataFrame:
    """Train and evaluate four models, write `figure.png` and the results that `rfa report` reads.

    All of them are written again when a model is finished, so an interrupted demo has those of the finished models.

    Args:
        out: the folder of the demo, with a run folder for each model.
        overwrite: replace the demo's existing runs.
        resume: keep finished runs, and continue a run that was stopped.
        progress: called with the stage ("text", "training" or "blocks" of a model), the amount done and the total.

    Returns:
        A row for each model: its perplexities by context length, `parameters` and `tokens/s`.

    Raises:
        ValueError: if the folder exists and neither `overwrite` nor `resume` is given, or has other runs or files.
        Stopped: on Ctrl-C, after saving.
    """
    out, report = Path(out), progress or (lambda *_: None)
    begun = any((out / name).exists() for name in MODELS)
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(begun or empty, "out", f"{out}, which is no demo's folder", "a new or an empty one")
    lengths = [SPEC["length"] * factor for factor in LENGTHS]
    rows, curves = dict[str, dict[int, float]](), dict[str, list[tuple[int, float]]]()
    table = list[dict[Any, Any]]()
    for name in MODELS:
        spec, folder = TrainingSpec(preset=name, **SPEC), RunFolder(out / name)

        def training(step: int, steps: int, *_: Any, name: str = name) -> None:
            report(Stage("training", name), step, steps)

        def evaluating(stage: Stage, done: int, total: int, name: str = name) -> None:
            report(stage._replace(run=name), done, total)

        bars: dict[str, Any] = {"data_progress": partial(report, Stage("text", name)), "progress": training}
        if resume and folder.record.exists():
            same = folder.read()["spec"] == spec.with_absolute_paths().to_dict()
            require(same, "out", f"{folder.path}, another run than this demo's", "a new folder")
            record = resume_run(folder.path, **bars)
        else:
            record = train(spec, folder.path, overwrite=overwrite, **bars)
        asked: dict[str, Any] = {"lengths": lengths, "protocols": {"blocks": TEST_TOKENS}}
        evaluated = full_evaluation(folder.path, **asked, progress=evaluating)
        run, lines = PlannedRun(spec), read_metrics(folder)
        settings = run_settings("demo", run, record, asked, evaluated)
        write_result(out / "results" / f"{name}.parquet", run, settings, measurements(evaluated, lines))
        curves[name] = [(line["tokens"], line["valid_perplexity"]) for line in lines if "valid_perplexity" in line]
        rows[name] = {row["length"]: row["perplexity"] for row in evaluated["evaluations"]["blocks"]["rows"]}
        save(demo_figure(curves, rows, SPEC["length"]), out / "figure.png")
        made = record["result"]
        table.append(
            {"model": name, **rows[name], "parameters": made["parameters"], "tokens/s": made["tokens_per_second"]}
        )
    return pd.DataFrame(table)
