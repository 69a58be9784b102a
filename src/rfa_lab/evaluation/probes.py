"""Retrieval probes: whether a model uses tokens at a distance. They need no training."""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import require
from rfa.models import RFAForCausalLM
from rfa.progress import Progress

from .perplexity import LOGITS_HELD, batch_tokens

ProbeKind = Literal["passkey", "repeat"]
CUE, STOP = " The secret words are", "."
KEY_TOKENS, PASSAGE_TOKENS, CANDIDATES, TRIALS = 3, 32, 16, 64
SHARES = (0.25, 0.5, 1, 2, 4, 8)  # distances, in training lengths
_WORDS = (r" [a-z]{3,}", r"[A-Za-z]", r"(?s).*")  # tokens for keys: the first pattern with enough matches is used


class Trial(NamedTuple):
    """Tokens with the key at a distance and again at the end; the same with another key at the distance (`control`).

    `candidates` are first tokens of keys among which the model chooses; the right one comes first.
    """

    ids: np.ndarray
    control: np.ndarray
    candidates: np.ndarray


class ProbeLayout(NamedTuple):
    """The tokens around a key, and the source of keys.

    lead: number of text tokens before the first cue.
    cue, stop: tokens before and after the first key; the cue stands before the second key too.
    key: number of tokens of a key.
    words: tokens that keys are drawn from; if empty, keys are passages of the text.
    """

    lead: int
    cue: list[int]
    stop: list[int]
    key: int
    words: np.ndarray

    def filler(self, distance: int) -> int:
        """Tokens of text between the key's sentence and the query."""
        return distance - self.key - len(self.stop) - len(self.cue)


def probe(
    kind: ProbeKind,
    model: RFAForCausalLM,
    stream: np.ndarray,
    *,
    train_length: int,
    longest: int,
    tokenizer: Any,
    trials: int = TRIALS,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    r"""The gain in log likelihood of a key because the same key stands `distance` tokens before.

    Each trial puts a key x of n tokens into real text, and the key stands again at the end:

        context(x) = text, cue, x, stop, more text, cue
        score      = mean_k [ log p(x_k | context(x), x_<k) - log p(x_k | context(y), x_<k) ]

    y is another key at the position of x. The influence of the text, the cue and the words themselves cancels.
    A model that does not use tokens at this distance scores exactly 0 in every trial, not only on average. So the
    probe tells two models with a flat curve of perplexity apart: only a model that uses distant tokens scores above 0.

    - `passkey`: x is three random words of the text, which a sentence announces. To predict the first word, a model
      must understand the sentence as a pointer. For the other words it only has to find the word before them again.
      `by_token` gives the score of each word. `accuracy` is the fraction of trials in which x's first word is the most
      likely of 16 random words; `chance` is 1/16.
    - `repeat`: x is a passage of real text, of 32 tokens or an eighth of the training length, without a cue. The score
      is the gain of a second copy from the first one (induction at a distance). The difference of the two copies'
      losses would be no such measure, because the second copy has more text before it.

    Keys, text and candidates depend only on the seed, the distance and the trial. Models with the same tokenizer and
    test text get the same trials, and their `scores` can be compared in pairs.

    Args:
        kind: "passkey" or "repeat".
        model: in evaluation mode.
        stream: token ids of a text that the model was not trained on.
        train_length: in tokens; distances are 1/4, 1/2, 1, 2, 4 and 8 times this length.
        longest: the largest distance; a trial is up to half a training length longer.
        tokenizer: of the stream.
        trials: number of trials at each distance.
        seed: of keys and text.
        progress: called with the tokens read so far and their total.

    Returns:
        `kind`, `trials`, `seed`, `key_tokens`, `chance`, and `rows`, one for each distance. A row has `distance`,
        `context` (tokens read), `score` in nats per token, its standard error `stderr` over trials, `by_token`,
        `loss_by_token` (the loss of the key without its first copy: the gain cannot exceed it), `accuracy`, and the
        `scores` of the trials. `chance` and `accuracy` are None for `repeat`. Distances that are too short for the
        sentence are left out.

    Raises:
        ValueError: for an unknown kind, fewer than two trials, or if no distance fits.
    """
    require(kind in get_args(ProbeKind), "kind", kind, f"one of {', '.join(get_args(ProbeKind))}")
    require(trials >= 2, "trials", trials, "at least 2")
    layout, distances = probe_layout(kind, stream, train_length, longest, tokenizer)
    total = sum(2 * trials * _context(layout, distance) for distance in distances)
    rows: list[dict[str, Any]] = []
    done = 0
    for distance in distances:
        context = _context(layout, distance)
        planned = planned_trials(layout, stream, distance, trials, seed)
        size = max(1, min(batch_tokens(model.device) // context, LOGITS_HELD // (layout.key * model.config.vocab_size)))
        gains, losses, right = [], [], 0
        for first in range(0, trials, size):
            part = planned[first : first + size]
            with_key = _log_probabilities(model, [trial.ids for trial in part], layout.key)
            without = _log_probabilities(model, [trial.control for trial in part], layout.key)
            key = torch.from_numpy(np.stack([trial.ids for trial in part])[:, -layout.key :]).to(with_key.device)
            known, unknown = (
                each.gather(-1, key[..., None])[..., 0].double().cpu().numpy() for each in (with_key, without)
            )
            gains.append(known - unknown)
            losses.append(-unknown)
            if len(layout.words):
                choices = torch.from_numpy(np.stack([trial.candidates for trial in part])).to(with_key.device)
                likely = with_key[:, 0].gather(-1, choices)
                right += int((likely[:, 0] > likely[:, 1:].amax(-1)).sum())  # a tie counts as wrong
            done += 2 * len(part) * context
            if progress is not None:
                progress(done, total)
        gain = np.concatenate(gains)
        scores = gain.mean(-1)
        rows.append(
            {
                "distance": distance,
                "context": context,
                "score": float(scores.mean()),
                "stderr": float(scores.std(ddof=1) / trials**0.5),
                "by_token": gain.mean(0).tolist(),
                "loss_by_token": np.concatenate(losses).mean(0).tolist(),
                "accuracy": right / trials if len(layout.words) else None,
                "scores": scores.tolist(),
            }
        )
    chance = 1 / CANDIDATES if len(layout.words) else None
    return {
        "kind": kind,
        "trials": trials,
        "seed": seed,
        "key_tokens": layout.key,
        "chance": chance,
        "rows": rows,
    }


def probe_layout(
    kind: ProbeKind, stream: np.ndarray, train_length: int, longest: int, tokenizer: Any
) -> tuple[ProbeLayout, list[int]]:
    """The layout of a probe's keys in a text, and the distances that fit the text.

    Args and raises as `probe`.
    """
    layout = _layout(kind, stream, train_length, tokenizer)
    room = min(longest, len(stream) - layout.lead - 1)
    distances = [int(train_length * share) for share in SHARES]
    distances = [distance for distance in distances if distance <= room and layout.filler(distance) >= 0]
    if not distances:
        raise ValueError(f"longest: got {longest} for a training length of {train_length}, no {kind} fits")
    return layout, distances


def planned_trials(
    layout: ProbeLayout, stream: np.ndarray, distance: int, trials: int = TRIALS, seed: int = 0
) -> list[Trial]:
    """The trials of a probe at one distance."""
    return [make_trial(layout, stream, distance, (seed, distance, trial)) for trial in range(trials)]


def make_trial(layout: ProbeLayout, stream: np.ndarray, distance: int, seed: Sequence[int]) -> Trial:
    """One trial, in which the two copies of the key are `distance` tokens apart."""
    random = np.random.default_rng(seed)
    filler = layout.filler(distance)
    start = random.integers(len(stream) - layout.lead - filler + 1)
    text = stream[start : start + layout.lead + filler].astype(np.int64)
    if len(layout.words):
        drawn = random.choice(layout.words, 2 * layout.key + CANDIDATES - 1, replace=False).astype(np.int64)
        key, other, rest = np.split(drawn, [layout.key, 2 * layout.key])
        candidates = np.concatenate([key[:1], rest])
    else:
        starts = random.integers(len(stream) - layout.key + 1, size=2)
        key, other = (stream[first : first + layout.key].astype(np.int64) for first in starts)
        candidates = key[:1]
    cue, stop = np.array(layout.cue, np.int64), np.array(layout.stop, np.int64)
    before, between = text[: layout.lead], text[layout.lead :]
    ids, control = (np.concatenate([before, cue, first, stop, between, cue, key]) for first in (key, other))
    return Trial(ids, control, candidates)


def _layout(kind: ProbeKind, stream: np.ndarray, train_length: int, tokenizer: Any) -> ProbeLayout:
    lead = train_length // 4
    if kind == "repeat":
        return ProbeLayout(lead, [], [], max(1, min(PASSAGE_TOKENS, train_length // 8)), np.array([]))
    cue, stop = (tokenizer.encode(text, add_special_tokens=False) for text in (CUE, STOP))
    return ProbeLayout(lead, cue, stop, KEY_TOKENS, _words(stream, tokenizer))


def _words(stream: np.ndarray, tokenizer: Any) -> np.ndarray:
    """The tokens of the text that are whole words. If there are too few: single letters, or any tokens."""
    there = (int(token) for token in np.unique(stream) if token != tokenizer.eos_token_id)
    texts = {token: tokenizer.decode([token]) for token in there}
    needed = 2 * KEY_TOKENS + CANDIDATES - 1
    for kind in _WORDS:
        found = [token for token, text in texts.items() if re.fullmatch(kind, text)]
        if len(found) >= needed:
            return np.array(found)
    raise ValueError(f"data: got a text of {len(texts)} different tokens, expected at least {needed} for a probe")


def _context(layout: ProbeLayout, distance: int) -> int:
    return layout.lead + len(layout.cue) + distance + layout.key


@torch.inference_mode()
def _log_probabilities(
    model: RFAForCausalLM, rows: list[np.ndarray], targets: int
) -> Float[Tensor, "batch targets vocabulary"]:
    """Log probabilities of every token at the last `targets` positions."""
    ids = torch.from_numpy(np.stack(rows)).to(model.device)
    hidden_states = model.model(ids, use_cache=False).last_hidden_state[:, -targets - 1 : -1]
    return model.lm_head(hidden_states).float().log_softmax(-1)
