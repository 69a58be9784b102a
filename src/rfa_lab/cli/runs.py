"""The commands for runs: demo, train, evaluate, generate and export."""

import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from rfa.cli.app import ManyValues, app, check_out, console, progress_bars, say

from .console import (
    assignment,
    check_resume,
    comparison_table,
    evaluation_table,
    metrics_words,
    stage_words,
    stoppable,
)

DataOption = Annotated[
    str,
    typer.Option(
        help="Text: stdlib, code:python, wikitext-103, babylm-2025, or a file or folder in UTF-8.",
        metavar="D",
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there.")]


@app.command(cls=ManyValues)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, results and figure.png.")] = Path("rfa-demo"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a demo that was stopped.")] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Train RFA, RoPE, ALiBi and SC-RFA for a few minutes and compare them beyond the training length.

    The figure has the models that are finished, also when the demo is stopped. `rfa report` reads the same folder, and
    `rfa generate` and `rfa evaluate` its runs, such as rfa-demo/runs/rfa-seed0.
    """
    from rfa_lab.recipes import run_demo

    check_out(out)
    if resume and overwrite:
        raise ValueError("--resume: got --overwrite with it, expected one of them")
    with stoppable(f"go on with: rfa demo --resume --out {shlex.quote(str(out))}"), progress_bars() as bar:
        results = run_demo(
            out,
            overwrite=overwrite,
            resume=resume,
            progress=lambda stage, *far: bar(stage_words(stage), *far, key=str(stage.name == "runs")),
        )
    console.print(comparison_table(results))
    say(f"results: {out / 'results'}\nfigure:  {out / 'figure.png'}")


@app.command(cls=ManyValues)
def train(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="The run folder.", metavar="RUN")],
    preset: Annotated[str, typer.Option(help="A preset; `rfa doctor` lists them.")] = "rfa",
    data: DataOption = "stdlib",
    split: Annotated[
        str,
        typer.Option(help="Split by file, by author, or author:test=A,B;valid=C (a file's name up to its first _)."),
    ] = "file",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer: gpt2, gpt2:FOLDER, bpe:N or bytes.", metavar="T")] = "gpt2",
    length: Annotated[int, typer.Option(help="Tokens of a training block.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Blocks of a step on one device.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Batches of one optimiser step.")] = 1,
    epochs: Annotated[float, typer.Option(help="Passes over the training split.")] = 15.0,
    max_steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Random seed of the initial weights and the order of the data.")] = 0,
    eval_steps: Annotated[int | None, typer.Option(help="Steps between validations; each epoch by default.")] = None,
    valid_tokens: Annotated[int | None, typer.Option(help="Most tokens of the validation split.")] = None,
    log_steps: Annotated[int, typer.Option(help="Steps between lines of metrics.")] = 10,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 autocast.")] = False,
    one_group: Annotated[
        bool, typer.Option("--one-group", help="Train the SDE's parameters like all others, as the released code did.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set fields of the model.", metavar="FIELD=VALUE ...")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out where it stopped.")] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Train a model in a new run folder, or continue an existing run (--resume)."""
    from rfa_lab import training
    from rfa_lab.training.train import is_first_process

    check_resume(ctx, resume)
    check_out(out)
    speaks = is_first_process()
    go_on = f"go on with: rfa train --resume --out {shlex.quote(str(out))}"
    with stoppable(go_on), progress_bars() as bar:
        shown: dict[str, Any] = {
            "data_progress": lambda *task: bar("reading text", *task),
            "progress": lambda step, steps, metrics: bar("training" + metrics_words(metrics), step, steps, key="train"),
        }
        bars = shown if speaks else {}
        if resume:
            record = training.resume(out, **bars)
        else:
            same_names = {field.name for field in fields(training.TrainingSpec)} & ctx.params.keys()
            given: dict[str, Any] = {name: ctx.params[name] for name in same_names}
            model = dict(map(assignment, set_ or []))
            spec = training.TrainingSpec(**given, model=model, split_by=split, learning_rate=lr)
            record = training.train(spec, out, overwrite=overwrite, **bars)
    if not speaks:
        return
    result, speed = record["result"], record["result"]["tokens_per_second"]  # None of a run with no step left
    say(
        f"{out}: validation perplexity {result['valid_perplexity']:.2f} after {record['steps']} steps, "
        f"{result['tokens']:,} tokens, {'?' if speed is None else f'{speed:,.0f}'} tokens/s"
    )


@app.command(cls=ManyValues)
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    data: Annotated[
        str | None, typer.Option(help="A corpus, file or folder; the run's own test split by default.", metavar="D")
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option(help="Context lengths; 1, 2, 4, 8 times the training length by default.")
    ] = None,
    protocol: Annotated[str, typer.Option(help="Protocol: blocks, matched or strided.")] = "blocks",
    max_tokens: Annotated[
        int | None, typer.Option(help="Evaluate only the text's first N tokens.", metavar="N")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.", metavar="F")] = None,
) -> None:
    """Compute the perplexity of a run by context length, on its test split or on any text."""
    from rfa.files import write_text_whole
    from rfa_lab.evaluation import evaluate as evaluate_run
    from rfa_lab.training import RunFolder

    if json_ is not None and json_.exists() and not json_.is_file():
        raise ValueError(f"--json: got {json_}, a folder or a device, expected the path of a file")
    if json_ is not None and RunFolder(run).owns(json_):
        raise ValueError(f"--json: got {json_}, which is the run's own, expected another file")
    check_out(json_, "--json")

    with progress_bars() as bar:
        result = evaluate_run(
            run,
            data=data,
            lengths=lengths,
            protocol=protocol,
            max_tokens=max_tokens,
            data_progress=lambda *task: bar("reading text", *task),
            progress=lambda *task: bar("evaluating", *task),
        )
    console.print(evaluation_table(result))
    if json_ is not None:
        write_text_whole(json_.resolve(), json.dumps(result, indent=2) + "\n")
        say(f"result: {json_}")


@app.command(cls=ManyValues)
def generate(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    prompt: Annotated[str, typer.Option(help="What the sample begins with.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the sampling; 0 takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample among this many most likely tokens; 0 for all.")] = 50,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 0,
) -> None:
    """Sample text from a run."""
    from rfa_lab.evaluation import generate as generate_text

    sample = generate_text(run, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    sys.stdout.write(sample + "\n")


@app.command(cls=ManyValues)
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    out: Annotated[Path, typer.Option(help="Folder to write.", metavar="FOLDER")],
    results: Annotated[
        list[Path] | None, typer.Option(help="Files of `rfa evaluate --json`, for the model card.", metavar="F ...")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Write a run as a folder that transformers loads, with a model card of the run's own results.

    `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` loads it without `import rfa`.
    """
    from rfa_lab.export import export_run

    check_out(out)
    export_run(run, out, results=results or (), overwrite=overwrite)
    say(f"model: {out}")
    said = ", ".join(map(str, results or ())) or "none; `rfa evaluate RUN --json F` makes one, for --results F"
    say(f"results on its card: {said}")
