"""Read a long text in pieces with a cache that drops old keys: memory and time over the length, and the logits.

    python benchmarks/long_sequence.py [--tokens 1000000 --compared 65536 --seconds 2400]

The model has 2 layers of 8 heads, ALiBi's slopes and random weights; the tokens are random. Up to `--compared` tokens a
second cache keeps everything, and 50 logits of both are compared. Whoever has little time gives `--seconds`: the text
ends with the piece in which they are over. The exit status is 1 where logits differ by more than 1e-4.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfa.environment import environment
from rfa.files import write_text_whole
from rfa.models import RFAForCausalLM, preset
from rfa.nn import FilterCache
from rfa_lab.bench.suite import processor

RESULT = Path(__file__).parent / "results" / "long_sequence.json"
PRESET, SIZES = "x2-riccati-alibi", {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2}
PLACES, TOLERANCE = 50, 1e-4


class Read(NamedTuple):
    """What was seen while a text was read: the logits at each place, a point of the curve a piece, and the seconds."""

    logits: dict[int, Tensor]
    curve: list[dict[str, float]]
    cache: FilterCache
    seconds: float


@torch.inference_mode()
def read(model: RFAForCausalLM, ids: Tensor, cache: FilterCache, places: Tensor, piece: int, seconds: float) -> Read:
    """Read pieces one after another."""
    logits: dict[int, Tensor] = {}
    curve: list[dict[str, float]] = []
    began = time.perf_counter()
    for start in range(0, ids.shape[1], piece):
        before = time.perf_counter()
        of_piece = model(ids[:, start : start + piece], past_key_values=cache).logits[0]
        after, end = time.perf_counter(), start + of_piece.shape[0]
        for place in places[(places >= start) & (places < end)].tolist():
            logits[place] = of_piece[place - start].clone()
        held = sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers)
        point = {"tokens": end, "seconds_a_token": (after - before) / of_piece.shape[0], "resident": resident()}
        curve.append({**point, "keys": held})
        if after - began > seconds:
            break
    return Read(logits, curve, cache, time.perf_counter() - began)


def resident() -> int:
    """Bytes of this process in memory, as Linux counts them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main(arguments: list[str] | None = None) -> int:
    """Read with both caches, compare, and write the result."""
    options = parser().parse_args(arguments)
    torch.manual_seed(0)
    model = RFAForCausalLM(preset(PRESET, vocab_size=512, **SIZES)).eval()
    ids = torch.randint(0, 512, (1, options.tokens))
    compared = min(options.compared, options.tokens)
    places = torch.linspace(0, compared - 1, PLACES).round().long()
    dropping = read(model, ids, FilterCache(), places, options.piece, options.seconds)
    keeping = read(model, ids[:, :compared], FilterCache(certified=None), places, options.piece, float("inf"))
    common = dropping.logits.keys() & keeping.logits.keys()
    difference = max(float((dropping.logits[place] - keeping.logits[place]).abs().max()) for place in common)
    told: dict[str, Any] = {
        "benchmark": "long_sequence",
        "preset": PRESET,
        **SIZES,
        "piece": options.piece,
        "tokens": dropping.curve[-1]["tokens"],
        "wanted": options.tokens,
        "seconds": dropping.seconds,
        "uncertified": dropping.cache.uncertified,
        "compared": {"places": len(common), "up_to": compared, "largest_difference": difference},
        "largest_logit": max(float(each.abs().max()) for each in keeping.logits.values()),
        "tolerance": TOLERANCE,
        "dropping": dropping.curve,
        "keeping": keeping.curve,
        "threads": torch.get_num_threads(),
        "processor": processor("cpu"),
        "environment": environment(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_text_whole(options.json, json.dumps(told, indent=1) + "\n")
    last = dropping.curve[-1]
    print(f"{last['tokens']:,} tokens: {last['resident'] / 1e6:.0f} MB, {1e3 * last['seconds_a_token']:.2f} ms a token")
    print(f"{len(common)} logits differ by {difference:.1e} at most; {told['uncertified']} rows without a certificate")
    print(f"wrote {options.json}")
    return 0 if difference <= TOLERANCE else 1


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", type=int, default=1_000_000)
    made.add_argument("--compared", type=int, default=65_536, help="tokens that the full cache reads too")
    made.add_argument("--piece", type=int, default=2048)
    made.add_argument("--seconds", type=float, default=float("inf"), help="after which the text ends")
    made.add_argument("--json", type=Path, default=RESULT)
    return made


if __name__ == "__main__":
    sys.exit(main())
