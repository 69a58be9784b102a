"""The main job at demo size: train four models on the standard library's text, compare them over context length."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rfa.evaluation import evaluate
from rfa.files import write_whole
from rfa.report.figures import save, training_and_extrapolation
from rfa.training import RunFolder, TrainingSpec, train
from rfa.training.callbacks import read_metrics

PRESETS = ("b1-rope", "b2-alibi", "m2-sc-rfa", "m3-sc-rfa")
LENGTHS = (1, 2, 4, 8)  # times the training length

SPEC: dict[str, Any] = {
    "model": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8},
    "data": "stdlib",
    "tokenizer": "bpe:2048",
    "length": 64,
    "batch_size": 16,
    "learning_rate": 3e-3,  # so few steps want a higher rate than the protocol's
    "max_steps": 280,
    "eval_steps": 70,
    "valid_tokens": 2**14,
}
TEST_TOKENS = 2**14

Progress = Callable[[str, str, int, int], None]


def run_demo(out: str | Path, *, overwrite: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Train, evaluate, write `results.json` and `figure.png`.

    Args:
        out: the folder of the demo; holds a run folder for each model.
        overwrite: replace the demo's runs that are there.
        progress: called with the model, what is being done, how far and how far it goes.

    Returns:
        What `results.json` holds: `rows` of each model, its record, its validation curve.

    Raises:
        ValueError: if the folder is there and is not to be overwritten.
    """
    out = Path(out)
    results: dict[str, Any] = {}
    for name in PRESETS:

        def report(task: str, name: str = name) -> Callable[..., None]:
            return lambda done, total, *_: progress(name, task, done, total) if progress else None

        folder = out / name
        record = train(
            TrainingSpec(preset=name, **SPEC),
            folder,
            overwrite=overwrite,
            data_progress=report("reading"),
            progress=report("training"),
        )
        lengths = [SPEC["length"] * factor for factor in LENGTHS]
        evaluated = evaluate(folder, lengths=lengths, max_tokens=TEST_TOKENS, progress=report("evaluating"))
        curve = [
            (line["tokens"], line["valid_perplexity"])
            for line in read_metrics(RunFolder(folder))
            if "valid_perplexity" in line
        ]
        results[name] = {"record": record, "curve": curve, "rows": evaluated["rows"]}
    comparison = {"train_length": SPEC["length"], "models": results}
    text = json.dumps(comparison, indent=2) + "\n"
    write_whole(out / "results.json", lambda path: path.write_text(text, encoding="utf-8"))
    figure = training_and_extrapolation(
        {name: result["curve"] for name, result in results.items()},
        {name: result["rows"] for name, result in results.items()},
        SPEC["length"],
    )
    save(figure, out / "figure.png")
    return comparison
