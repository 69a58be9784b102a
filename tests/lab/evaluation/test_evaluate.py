"""From a run folder and a text to a result, and to samples."""

import numpy as np
import torch

from rfa_lab.evaluation import evaluate, generate, perplexities
from rfa_lab.training import RunFolder


def test_on_another_text(run, tmp_path):
    protocol = "strided"
    text = "a text that the model never saw. " * 9
    (tmp_path / "other.txt").write_text(text)
    result = evaluate(run, data=str(tmp_path / "other.txt"), lengths=[8, 100], protocol=protocol, max_tokens=200)
    stream = np.array([*text.encode(), 256], dtype=np.uint16)[:200]
    assert result["tokens"] == 200
    assert result["rows"] == perplexities(RunFolder(run).load_model(), stream, [8, 100], protocol)
    assert result["data"] == str(tmp_path / "other.txt")


def test_generate(run):
    greedy = generate(run, "the sea", max_new_tokens=12, temperature=0)
    assert greedy.startswith("the sea")
    model, ids = RunFolder(run).load_model(), list(b"the sea")
    for _ in range(12):  # without a cache
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    tokenizer = RunFolder(run).load_tokenizer()
    assert greedy == tokenizer.decode(ids, skip_special_tokens=True)
    first, again, other = (generate(run, "the", max_new_tokens=30, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert isinstance(generate(run, max_new_tokens=3), str)  # no prompt
