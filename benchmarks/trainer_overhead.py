"""Measure the cost of the Trainer, the data pipeline and logging over a plain loop, at the paper's model size.

Each round times some steps of the Trainer and of a plain PyTorch loop, in one process, with the same initial model,
blocks, optimiser and clips. The losses of all steps must agree. The plain loop has its batches ready in memory. The
result is the median ratio with all ratios, and the extra time of a Trainer's step.

    python benchmarks/trainer_overhead.py [--batch-size 16 --steps 4 --rounds 5 --preset b1-rope]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from rfa.environment import environment
from rfa.models import RFAForCausalLM
from rfa_lab.data import TokenBlocks, prepare
from rfa_lab.training import RunFolder, TrainingSpec, train
from rfa_lab.training.callbacks import read_metrics
from rfa_lab.training.trainer import clip_dynamics, make_optimizer, one_cycle


def bare(spec: TrainingSpec, batches: list[torch.Tensor], vocabulary: int) -> tuple[float, list[float]]:
    """Seconds of all but the first step of a plain PyTorch loop, and the losses of all steps."""
    torch.manual_seed(spec.seed)
    model = RFAForCausalLM(spec.model_config(vocabulary))
    optimizer = make_optimizer(model, spec.learning_rate)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses, began = [], 0.0
    for step, ids in enumerate(batches):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * one_cycle(step, len(batches))
        loss = model(ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clip_dynamics(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        began = began or time.perf_counter()  # the first step warms up
    return time.perf_counter() - began, losses


def with_trainer(spec: TrainingSpec, folder: Path) -> tuple[float, list[float], list[int]]:
    """Seconds of all but the first step of the Trainer, with data and logging; the losses; the order of blocks."""
    marks: list[float] = []
    order: list[int] = []

    class Recorded(TokenBlocks):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            order.append(index)
            return super().__getitem__(index)

    with patch("rfa_lab.training.train.TokenBlocks", Recorded):
        train(spec, folder, overwrite=True, progress=lambda *_: marks.append(time.perf_counter()))
    losses = [line["loss"] for line in read_metrics(RunFolder(folder)) if "loss" in line]
    return marks[-1] - marks[0], losses, order


def main() -> None:
    """Run the rounds, print one JSON line and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="b1-rope")
    parser.add_argument("--tokenizer", default="bpe:50257")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    spec = TrainingSpec(
        preset=options.preset,
        tokenizer=options.tokenizer,
        length=options.length,
        batch_size=options.batch_size,
        max_steps=options.steps,
        log_steps=1,
        valid_tokens=options.length,
    )
    data = prepare(spec.data, spec.tokenizer, splits=("train", "valid"))
    blocks = TokenBlocks(data.streams["train"], spec.length)
    ratios, extra = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(options.rounds):
            seconds, logged, order = with_trainer(spec, Path(scratch) / "run")
            rows = [order[step * spec.batch_size : (step + 1) * spec.batch_size] for step in range(options.steps)]
            batches = [torch.stack([blocks[index]["input_ids"] for index in step]) for step in rows]
            plain, losses = bare(spec, batches, len(data.tokenizer))
            apart = max(abs(mine - theirs) for mine, theirs in zip(logged, losses, strict=True))
            assert apart < 2e-3, (logged, losses)  # the same steps; logged losses are rounded
            ratios.append(seconds / plain)
            extra.append(1000 * (seconds - plain) / (options.steps - 1))
            print(f"bare {plain:.2f} s, trainer {seconds:.2f} s, ratio {ratios[-1]:.3f}", flush=True)
    summary = {"median_ratio": statistics.median(ratios), "ratios": ratios, "extra_ms_per_step": extra}
    line = json.dumps({**summary, **vars(options), **environment()})
    print(line)
    with (Path(__file__).parent / "results" / "trainer_overhead.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
