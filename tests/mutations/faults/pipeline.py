"""Faults of training, evaluation and the record."""

from .mutation import Mutation

PIPELINE = [
    Mutation("training/trainer.py", '"lr": learning_rate / 2', '"lr": learning_rate',
             "the rate of the SDE's parameters", "training/test_optimization.py"),
    Mutation("training/trainer.py", "DYNAMICS_CLIP = 1e-4", "DYNAMICS_CLIP = 1e-3",
             "the clip of the SDE's gradients", "training/test_optimization.py"),
    Mutation("training/trainer.py", "top = warmup * total - 1", "top = warmup * total",
             "the schedule's peak is a step late", "training/test_optimization.py"),
    Mutation("training/trainer.py", "self.args.dataloader_drop_last = False", "self.args.dataloader_drop_last = True",
             "validation leaves out the last blocks", "training/test_metrics.py"),
    Mutation("training/trainer.py", "losses.view_as(targets).sum(1)",
             "losses.mean().repeat(len(targets)) * targets[0].numel()",
             "blocks that fill up a process's last batch count", "training/test_distributed.py"),
    Mutation("cli/runs.py", "bars = shown if speaks else {}", "bars = shown",
             "every process of a run shows progress", "training/test_distributed.py"),
    Mutation("data/stream.py", "return len(self.stream) // self.length", "return (len(self.stream) - 1) // self.length",
             "the last whole block is lost", "data/test_stream.py"),
    Mutation("data/fragments.py", 'and left != right and text[position] != "\'"', "and left != right",
             "a text is cut inside a token", "data/test_fragments.py"),
    Mutation("evaluation/windows.py", "max(1, min(lengths) // 2)", "max(1, min(lengths))",
             "targets of the matched protocol with too little context", "evaluation/test_windows.py"),
    Mutation("evaluation/perplexity.py", "np.arange(-targets, 0)", "np.arange(-targets, 0) - 1",
             "a loss counts for the document of the token before", "evaluation/test_observers.py"),
    Mutation("evaluation/perplexity.py", "/ max(windows_count - 1, 1) * windows_count", "* 1",
             "the standard error over windows", "evaluation/test_perplexity.py"),
]  # fmt: skip

RECALL = [
    Mutation("data/synthetic_recall.py", "< own).all(-1)", "<= own).all(-1)",
             "an answer that is tied with another is asked", "data/test_synthetic.py"),
    Mutation("data/synthetic_recall.py", "about) + self.lag", "about) + self.lag + 0.01",
             "a question stands beside its time", "data/test_synthetic.py"),
    Mutation("data/synthetic.py", "product[token, states[-1]]", "product[states[-1], token]",
             "products in the other order", "data/test_synthetic.py"),
    Mutation("training/synthetic.py", "times=batch.times, ", "",
             "the model does not see the times", "training/test_synthetic.py"),
    Mutation("training/steps.py", "        schedule.step()\n", "",
             "the learning rate stays at its start", "training/test_series.py"),
    Mutation("experiments/claims.py", "if not finished(name):", "if True:",
             "a finished run is made again", "experiments/test_recall.py"),
    Mutation("report/recall_tables.py", 'point["accuracy"] >= accuracy', 'point["accuracy"] > accuracy',
             "exactly 99 % is not enough", "report/test_recall_tables.py"),
]  # fmt: skip

RECORD = [
    Mutation("evaluation/trigram.py", "y = n1 / (n1 + 2 * n2)", "y = n1 / (n1 + n2)",
             "the discounts of Kneser-Ney", "evaluation/test_trigram.py"),
    Mutation("evaluation/trigram.py", "second = at == some[:, :1] + 1", "second = at == some[:, :1]",
             "a token sees one before its window", "evaluation/test_trigram.py"),
    Mutation("training/trainer.py", "data_seed=spec.seed", "data_seed=0",
             "the blocks of another seed", "training/test_optimization.py"),
    Mutation("report/statistics.py", "stdtrit(count - 1,", "stdtrit(count,",
             "the degrees of freedom of a t interval", "report/test_statistics.py"),
    Mutation("report/statistics.py", "OPEN if over_seeds or over_books", "OPEN if over_seeds and over_books",
             "a difference that is open over books", "report/test_statistics.py"),
    Mutation("report/statistics.py", "math.sqrt(np.median(variances))", "math.sqrt(np.mean(variances))",
             "the noise of a seed with a model that fails", "report/test_statistics.py"),
    Mutation("report/measurements.py", 'losses[kind == "repeat" :]', "losses[0:]",
             "perfect copying foresees a passage", "report/test_tables.py"),
]  # fmt: skip
