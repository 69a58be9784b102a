"""The tables of docs/scaling.md, from figures of one device: `python docs/scaling_table.py`.

The time of a step on a CPU is read from benchmarks/results. No GPU has been measured: figures of the H100 are its
maker's, and the shares of them that a program reaches are assumed. The page says so.
"""

import json
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rfa.files import write_text_whole
from rfa.report.layout import replace_between

PAGE = Path(__file__).with_name("scaling.md")
RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "bench.jsonl"
NUMBERS = (8, 16, 32, 64, 128, 256, 512, 1024)
HALF, SINGLE, DOUBLE = 2, 4, 8  # bytes of a number


class Device(NamedTuple):
    """Flops a second that a program reaches, and bytes a second that it sends inside and outside a machine of 8."""

    flops: float = 0.4 * 989e12
    inside: float = 0.8 * 450e9
    outside: float = 0.8 * 50e9


class Size(NamedTuple):
    """A decoder of hidden size D: the projections have 8 D^2 weights a block, the feed-forward network as many."""

    hidden: int = 4096
    layers: int = 32
    vocabulary: int = 50_257

    @property
    def weights(self) -> int:
        """Of blocks, the embedding, which is the head too, and two maps. Norms, biases and dynamics are 1 in 1,000."""
        return self.hidden * (16 * self.layers * self.hidden + self.vocabulary + 2 * self.hidden)

    def flops(self, length: int) -> float:
        """Of a token, forward and backward: 6 a weight, and 14 C for each pair of a head, with C = 2 D in all heads."""
        return 6.0 * self.weights + 14 * 2 * self.hidden * (length / 2) * self.layers


class Step(NamedTuple):
    """One process in one step: seconds of useful arithmetic, bytes that it sends, seconds of the step."""

    arithmetic: float
    sent: float
    seconds: float

    def row(self) -> list[str]:
        """Bytes, seconds, and the share of the step that is useful arithmetic."""
        return [_bytes(self.sent), f"{self.seconds:.2f} s", f"{self.arithmetic / self.seconds:.0%}"]


def replicated_step(size: Size, processes: int, seconds: float, bandwidth: float) -> Step:
    """DDP: gradients in float32 are summed in a ring, and waited for."""
    sent = 2 * SINGLE * size.weights * (processes - 1) / processes
    return Step(seconds, sent, seconds + sent / bandwidth)


def sharded_step(size: Size, gpus: int, tokens: int, length: int, heads: int, device: Device) -> Step:
    """FSDP2 over groups of GPUs that share the heads.

    Weights are gathered twice in bfloat16, and their gradients summed once, while others compute. The sums of tensor
    parallel are waited for: in each block two forward and two backward, of the states of the group's tokens.
    """
    arithmetic = tokens / gpus * size.flops(length) / device.flops
    groups = gpus // heads
    of_weights = 3 * HALF * size.weights / heads * (groups - 1) / groups
    of_states = 4 * size.layers * 2 * (heads - 1) / heads * tokens / groups * size.hidden * HALF
    bandwidth = device.outside if gpus > 8 else device.inside
    seconds = max(arithmetic + of_states / device.inside, of_weights / bandwidth)
    return Step(arithmetic, of_weights + of_states, seconds)


def ring_bytes(gpus: int, tokens: int, channels: int, number: int = HALF, riccati_heads: int = 0) -> tuple[int, int]:
    """Bytes that a process sends in one layer's ring: the blocks in both directions, and the gradients of the blocks.

    A block has the keys and values of `tokens` tokens, with `channels` numbers each in all heads. The Riccati prior
    adds two numbers a head. Gradients are at least in float32.
    """
    riccati = tokens * riccati_heads * 2 * DOUBLE
    block, gradients = (tokens * 2 * channels * each + riccati for each in (number, max(number, SINGLE)))
    return 2 * (gpus - 1) * block, gpus * gradients


def ring_step(size: Size, gpus: int, length: int, device: Device) -> Step:
    """Context parallel of one sequence, with weights sharded over the same GPUs.

    A block is computed while the next one arrives, and the gradients of the one before leave. The last process sees
    every block, so that the step takes as long as one that is not causal. Backward computes blocks again: 4 C + 14 C.
    """
    tokens = length // gpus
    bandwidth = device.outside if gpus > 8 else device.inside
    blocks, gradients = ring_bytes(gpus, tokens, 2 * size.hidden)
    pairs = gpus * 2 * size.hidden * tokens**2 / device.flops
    sent = ((4, blocks / 2), (14, blocks / 2 + gradients))
    passes = sum(max(flops * pairs, moved / bandwidth) for flops, moved in sent)
    of_weights = 3 * HALF * size.weights * (gpus - 1) / gpus
    linear = max(6 * size.weights * tokens / device.flops, of_weights / bandwidth)
    seconds = linear + size.layers * passes
    useful = tokens * size.flops(length) / device.flops
    return Step(useful, of_weights + size.layers * (blocks + gradients), seconds)


def measured_seconds() -> float:
    """Of a training step of `m2-sc-rfa` at the paper's size, batch 16, on two cores of an AMD EPYC."""
    lines = map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
    wanted = {"benchmark": "step", "preset": "m2-sc-rfa", "batch": 16, "length": 512}
    return next(median(x["seconds"]["rfa"]) for x in lines if wanted.items() <= x.items())


def tables() -> dict[str, str]:
    """The tables by the names of their marks."""
    paper, seconds = Size(256, 6), measured_seconds()
    head = ["sent by each", "step", "share of useful arithmetic"]
    ddp = [[f"{n:,}", *replicated_step(paper, n, seconds, 1.25e9).row()] for n in NUMBERS]
    large, device, batch, length = Size(), Device(), 2**22, 2**13
    plans = {"FSDP2": 1, "FSDP2, heads on 8": 8}
    sharded = [
        [f"{n:,}", f"{batch // n:,}"]
        + [cell for heads in plans.values() for cell in sharded_step(large, n, batch, length, heads, device).row()]
        for n in NUMBERS
    ]
    titled = [f"{plan}: {each}" for plan in plans for each in ("sent", "step", "useful")]
    ring = [[f"{n:,}", f"{2**20 // n:,}", *ring_step(large, n, 2**20, device).row()] for n in NUMBERS]
    return {
        "ddp": _table(["processes", *head], ddp),
        "sharded": _table(["GPUs", "tokens a GPU", *titled], sharded),
        "ring": _table(["GPUs", "tokens a GPU", *head], ring),
    }


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.0f} GB" if number >= 1e9 else f"{number / 1e6:,.0f} MB"


def written(page: str) -> str:
    """The page with its tables, each between its marks."""
    for mark, text in tables().items():
        page = replace_between(
            page, f"<!-- {mark}: docs/scaling_table.py -->", f"<!-- end of {mark} -->", f"\n{text}\n"
        )
    return page


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
