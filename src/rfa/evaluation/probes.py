"""Whether a model uses its past at a distance: retrieval probes that need no training of their own."""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.models import RFAForCausalLM
from rfa.progress import Progress

from .perplexity import LOGITS_HELD, batch_tokens

ProbeKind = Literal["passkey", "repeat"]
CUE, STOP = " The secret words are", "."
KEY_TOKENS, PASSAGE_TOKENS, CANDIDATES, TRIALS = 3, 32, 16, 64
SHARES = (0.25, 0.5, 1, 2, 4, 8)  # distances, in training lengths
_WORDS = (r" [a-z]{3,}", r"[A-Za-z]", r"(?s).*")  # what keys are made of: the first kind of which there are enough


class Trial(NamedTuple):
    """Tokens with the key in the past, the same with another key there, and the first tokens to choose among."""

    ids: np.ndarray
    control: np.ndarray
    candidates: np.ndarray


class ProbeLayout(NamedTuple):
    """What surrounds a key, in tokens, and what the keys are made of: `words`, or passages of the text if empty."""

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
    r"""How much likelier a key is because it stands in the past, `distance` tokens back.

    Each trial puts a key x of n tokens into real text and asks for it again at the end:

        past(x)  = text, cue, x, stop, more text, cue
        score    = mean_k [ log p(x_k | past(x), x_<k) - log p(x_k | past(y), x_<k) ]

    y is another key in x's place, so that what a model makes of the text, the cue and the words themselves cancels.
    A model that does not use what lies `distance` back scores 0, not merely on average: exactly, in each trial. A
    flat curve of perplexity that ignores the distant past shows as 0 here, one that uses it does not.

    - `passkey`: x is three random words of the text, named by a sentence. The first word needs the sentence to be
      understood as a pointer, the others only that the one before them is found again; `by_token` keeps them apart.
      `accuracy` is how often x's first word is the likeliest of 16 random words; `chance` is 1/16.
    - `repeat`: x is a passage of real text, 32 tokens or an eighth of the training length, and there is no cue: what
      a second copy is easier than it would be without the first (induction at a distance). The plain difference from
      the first copy's loss would also count that the second has more text before it; y in the first copy's place
      does not.

    Keys, text and candidates depend on the seed, the distance and the trial alone: models of one tokenizer and test
    text see the same, and their `scores` can be compared in pairs.

    Args:
        kind: "passkey" or "repeat".
        model: in evaluation mode.
        stream: token ids of a text that it never saw.
        train_length: distances are 1/4, 1/2, 1, 2, 4 and 8 times that.
        longest: distances up to that only; the whole text read is up to half a training length longer.
        tokenizer: of the stream.
        trials: at each distance.
        seed: of keys and text.
        progress: called with tokens read and in all.

    Returns:
        `kind`, `trials`, `seed`, `key_tokens`, `chance`, and `rows`, one a distance, with `distance`, `context` (tokens
        read), `score` in nats a token, its standard error `stderr` over trials, `by_token`, `accuracy`, and `scores`
        of the trials. `chance` and `accuracy` are None for `repeat`. Distances too short for the sentence are left out.

    Raises:
        ValueError: for an unknown kind, fewer than two trials, or where no distance fits.
    """
    if kind not in get_args(ProbeKind):
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(get_args(ProbeKind))}")
    if trials < 2:
        raise ValueError(f"trials: got {trials}, expected at least 2")
    layout, distances = probe_layout(kind, stream, train_length, longest, tokenizer)
    total = sum(2 * trials * _context(layout, distance) for distance in distances)
    rows: list[dict[str, Any]] = []
    done = 0
    for distance in distances:
        context = _context(layout, distance)
        plan = [make_trial(layout, stream, distance, (seed, distance, trial)) for trial in range(trials)]
        size = max(1, min(batch_tokens(model.device) // context, LOGITS_HELD // (layout.key * model.config.vocab_size)))
        gains, right = [], 0
        for first in range(0, trials, size):
            part = plan[first : first + size]
            found = _log_probabilities(model, [trial.ids for trial in part], layout.key)
            without = _log_probabilities(model, [trial.control for trial in part], layout.key)
            key = torch.from_numpy(np.stack([trial.ids for trial in part])[:, -layout.key :]).to(found.device)
            gains.append((found - without).gather(-1, key[..., None])[..., 0].double().cpu().numpy())
            if len(layout.words):
                choices = torch.from_numpy(np.stack([trial.candidates for trial in part])).to(found.device)
                likely = found[:, 0].gather(-1, choices)
                right += int((likely[:, 0] > likely[:, 1:].amax(-1)).sum())  # a tie is no answer
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
    """How the keys of a probe stand in a text, and the distances that fit it.

    Args and raises as `probe`.
    """
    layout = _layout(kind, stream, train_length, tokenizer)
    room = min(longest, len(stream) - layout.lead - 1)
    distances = [int(train_length * share) for share in SHARES]
    distances = [distance for distance in distances if distance <= room and layout.filler(distance) >= 0]
    if not distances:
        raise ValueError(f"longest: got {longest} for a training length of {train_length}, no {kind} fits")
    return layout, distances


def make_trial(layout: ProbeLayout, stream: np.ndarray, distance: int, seed: Sequence[int]) -> Trial:
    """One trial: the key's first token stands `distance` tokens before the query's answer."""
    random = np.random.default_rng(seed)
    filler = layout.filler(distance)
    start = random.integers(len(stream) - layout.lead - filler + 1)
    text = stream[start : start + layout.lead + filler].astype(np.int64)
    if len(layout.words):
        drawn = random.choice(layout.words, 2 * layout.key + CANDIDATES - 1, replace=False).astype(np.int64)
        key, other, rest = np.split(drawn, [layout.key, 2 * layout.key])
        candidates = np.concatenate([key[:1], rest])
    else:
        places = random.integers(len(stream) - layout.key + 1, size=2)
        key, other = (stream[place : place + layout.key].astype(np.int64) for place in places)
        candidates = key[:1]
    cue, stop = np.array(layout.cue, np.int64), np.array(layout.stop, np.int64)
    before, between = text[: layout.lead], text[layout.lead :]
    ids, control = (np.concatenate([before, cue, past, stop, between, cue, key]) for past in (key, other))
    return Trial(ids, control, candidates)


def _layout(kind: ProbeKind, stream: np.ndarray, train_length: int, tokenizer: Any) -> ProbeLayout:
    lead = train_length // 4
    if kind == "repeat":
        return ProbeLayout(lead, [], [], max(1, min(PASSAGE_TOKENS, train_length // 8)), np.array([]))
    cue, stop = (tokenizer.encode(text, add_special_tokens=False) for text in (CUE, STOP))
    return ProbeLayout(lead, cue, stop, KEY_TOKENS, _words(stream, tokenizer))


def _words(stream: np.ndarray, tokenizer: Any) -> np.ndarray:
    """The tokens of the text that are whole words; letters, or any tokens, where there are too few of these."""
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
