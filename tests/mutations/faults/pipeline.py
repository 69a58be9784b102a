"""Faults of training, evaluation and the record."""

from .mutation import Mutation

PIPELINE = [
    Mutation("rfa_lab/training/trainer.py", '"lr": learning_rate / 2', '"lr": learning_rate',
             "the rate of the SDE's parameters", "lab/training/test_optimization.py"),
    Mutation("rfa_lab/training/trainer.py", "DYNAMICS_CLIP = 1e-4", "DYNAMICS_CLIP = 1e-3",
             "the clip of the SDE's gradients", "lab/training/test_optimization.py"),
    Mutation("rfa_lab/training/trainer.py", "top = warmup * total - 1", "top = warmup * total",
             "the schedule's peak is a step late", "lab/training/test_optimization.py"),
    Mutation("rfa_lab/training/trainer.py", "self.args.dataloader_drop_last = False", "self.args.dataloader_drop_last = True",
             "validation leaves out the last blocks", "lab/training/test_metrics.py"),
    Mutation("rfa_lab/training/trainer.py", "losses.view_as(targets).sum(1)",
             "losses.mean().repeat(len(targets)) * targets[0].numel()",
             "blocks that fill up a process's last batch count", "lab/training/test_distributed.py"),
    Mutation("rfa_lab/cli/runs.py", "bars = shown if speaks else {}", "bars = shown",
             "every process of a run shows progress", "lab/training/test_distributed.py"),
    Mutation("rfa_lab/data/stream.py", "return len(self.stream) // self.length", "return (len(self.stream) - 1) // self.length",
             "the last whole block is lost", "lab/data/test_stream.py"),
    Mutation("rfa_lab/data/documents.py", r'r".*\S(?=[ \n])"', r'r".*(?=[ \n])"',
             "a text is cut inside a token", "lab/data/test_documents.py"),
    Mutation("rfa_lab/evaluation/perplexity.py", "max(1, min(lengths) // 2)", "max(1, min(lengths))",
             "targets of the matched protocol with too little context", "lab/evaluation/test_windows.py"),
    Mutation("rfa_lab/evaluation/perplexity.py", "np.arange(-targets, 0)", "np.arange(-targets, 0) - 1",
             "a loss counts for the document of the token before", "lab/evaluation/test_perplexity.py"),
    Mutation("rfa_lab/evaluation/perplexity.py", "/ max(windows_count - 1, 1) * windows_count", "* 1",
             "the standard error over windows", "lab/evaluation/test_perplexity.py"),
]  # fmt: skip

RECALL = [
    Mutation("rfa_lab/recipes/runs.py", "if mine and runs.result_of(run) is None:", "if mine:",
             "a finished run is made again", "lab/experiments/test_runner.py"),
    Mutation("rfa_lab/recipes/runs.py", "_check_versions({**results, **begun}, ", "_check_versions(begun, ",
             "results of another commit that are not chosen count as none", "lab/experiments/test_runner.py"),
]  # fmt: skip

RECORD = [
    Mutation("rfa_lab/recipes/rates.py", "set(ascending[largest + 1 : largest + 2])", "set()",
             "the largest rate of a list is the best, and no larger one is tried", "lab/experiments/test_rates.py"),
    Mutation("rfa_lab/recipes/runs.py", 'made["spec"]["learning_rate"]) != rate', 'made["spec"]["learning_rate"]) < 0',
             "seeds of one model have different rates", "lab/experiments/test_rates.py"),
    Mutation("rfa_lab/report/statistics.py", "stdtrit(count - 1,", "stdtrit(count,",
             "the degrees of freedom of a t interval", "lab/report/test_statistics.py"),
    Mutation("rfa_lab/report/statistics.py", "abs(value) <= half or low <= 0 <= high", "abs(value) <= half and low <= 0 <= high",
             "a difference that is open over books", "lab/report/test_statistics.py"),
    Mutation("rfa_lab/report/statistics.py", "math.sqrt(np.median(variances))", "math.sqrt(np.mean(variances))",
             "the noise of a seed with a model that fails", "lab/report/test_statistics.py"),
]  # fmt: skip
