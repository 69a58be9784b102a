"""The tables of docs/record/scaling.md, from figures of one device: `python docs/scaling_table.py`.

The time of a step on a CPU is read from benchmarks/results. No GPU has been measured: figures of the H100 are its
maker's, and the shares of them that a program reaches are assumed. The page says so.
"""

import itertools
import json
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rfa.files import write_text_whole
from rfa_lab.report.layout import pipe_table, replace_between

PAGE = Path(__file__).parent / "record" / "scaling.md"
RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "bench.jsonl"
NUMBERS = (8, 16, 32, 64, 128, 256, 512, 1024)
HALF, SINGLE, DOUBLE = 2, 4, 8  # bytes of a number
POSITION = 2 * DOUBLE + 2 * SINGLE  # bytes of a token on every process: its time and its group, as key and as query


class Device(NamedTuple):
    """Flops a second that a program reaches, bytes a second that it sends inside and outside a machine of 8, bytes."""

    flops: float = 0.4 * 989e12
    inside: float = 0.8 * 450e9
    outside: float = 0.8 * 50e9
    memory: float = 80e9

    def bandwidth(self, gpus: int) -> float:
        """Between machines where there are several."""
        return self.outside if gpus > 8 else self.inside


class Size(NamedTuple):
    """A decoder of hidden size D: the projections have 8 D^2 weights a block, the feed-forward network as many."""

    hidden: int = 4096
    layers: int = 32
    vocabulary: int = 50_257

    @property
    def block(self) -> int:
        """Weights of a block. Norms, biases and dynamics are 1 in 1,000."""
        return 16 * self.hidden**2

    @property
    def outside(self) -> int:
        """Weights of the embedding, which is the head too, and of two maps."""
        return self.hidden * (self.vocabulary + 2 * self.hidden)

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layers * self.block + self.outside

    @property
    def pair(self) -> int:
        """C of all heads and blocks: a pair of tokens takes 4 C flops forward and 10 C backward."""
        return 2 * self.hidden * self.layers

    def flops(self, length: int) -> float:
        """Of a token, forward and backward: 6 a weight, and 14 C a pair."""
        return 6.0 * self.weights + 14 * self.pair * (length / 2)

    def token_bytes(self) -> int:
        """Of a token on a GPU: the inputs of all blocks, the states of one block, and the logits.

        Checkpoints keep the inputs of blocks in bfloat16. A block has about 24 D numbers: norms, queries, keys, values,
        estimates and the feed-forward network. Logits are there in bfloat16, and three times in float32: for the loss,
        its softmax and its gradient.
        """
        return HALF * self.layers * self.hidden + 24 * HALF * self.hidden + (HALF + 3 * SINGLE) * self.vocabulary

    def weight_bytes(self, groups: int, heads: int = 1) -> float:
        """Of weights on a GPU: its part of them, of gradients and of Adam's moments, in float32; and what is gathered.

        Gathered in bfloat16 are two blocks, the gradient of one, and what is outside the blocks with its gradient.
        """
        own = (self.layers * self.block / heads + self.outside) / groups
        return 4 * SINGLE * own + HALF * (3 * self.block / heads + 2 * self.outside)


class Step(NamedTuple):
    """One process in one step: seconds of useful arithmetic, bytes that it sends, seconds, and bytes that it holds."""

    arithmetic: float
    sent: float
    seconds: float
    memory: float = 0.0

    def row(self) -> list[str]:
        """Bytes, seconds, and the share of the step that is useful arithmetic."""
        return [_bytes(self.sent), f"{self.seconds:.2f} s", f"{self.arithmetic / self.seconds:.0%}"]

    def row_with_memory(self, device: Device) -> list[str]:
        """The same, and the memory."""
        return [*self.row(), _bytes(self.memory) + ("" if self.memory < device.memory else ", too much")]


def replicated_step(size: Size, processes: int, seconds: float, bandwidth: float) -> Step:
    """DDP: gradients in float32 are summed in a ring, and waited for."""
    sent = 2 * SINGLE * size.weights * (processes - 1) / processes
    return Step(seconds, sent, seconds + sent / bandwidth)


def sharded_step(size: Size, gpus: int, tokens: int, length: int, heads: int, device: Device) -> Step | None:
    """FSDP2 over groups of GPUs that share the heads; None where a group has less than one sequence.

    A group computes one sequence after another, and adds up their gradients. Blocks are checkpointed: each is computed
    again in backward, with 8 flops a weight and 18 C a pair in all. For each sequence weights are gathered twice in
    bfloat16 and gradients are summed once, while others compute. The sums of tensor parallel are waited for: in each
    block two forward, two again and two backward. Embedding, head and two maps are computed by each GPU of a group.
    """
    groups = gpus // heads
    sequences, rest = divmod(tokens, groups * length)
    if rest:
        return None
    weights = size.layers * size.block / heads + size.outside
    arithmetic = length * (8 * weights + 18 * size.pair / heads * (length / 2)) / device.flops
    of_weights = 3 * HALF * weights * (groups - 1) / groups
    of_states = 6 * size.layers * 2 * (heads - 1) / heads * length * size.hidden * HALF
    seconds = max(arithmetic + of_states / device.inside, of_weights / device.bandwidth(gpus))
    useful = tokens / gpus * size.flops(length) / device.flops
    memory = size.weight_bytes(groups, heads) + length * size.token_bytes()
    return Step(useful, sequences * (of_weights + of_states), sequences * seconds, memory)


def ring_bytes(gpus: int, tokens: int, channels: int, number: int = HALF, riccati_heads: int = 0) -> tuple[int, int]:
    """Bytes that a process sends in one layer's ring: the blocks in both directions, and the gradients of the blocks.

    A block has the keys and values of `tokens` tokens, with `channels` numbers each in all heads. The Riccati prior
    adds two numbers a head. Gradients are at least in float32.
    """
    riccati = tokens * riccati_heads * 2 * DOUBLE
    block, gradients = (tokens * 2 * channels * each + riccati for each in (number, max(number, SINGLE)))
    return 2 * (gpus - 1) * block, gpus * gradients


def ring_step(size: Size, gpus: int, length: int, device: Device) -> Step:
    """Context parallel of one sequence, with weights sharded over the same GPUs and with checkpoints of the blocks.

    A block of keys is computed while the next one arrives, and the gradients of the one before leave. The last process
    sees every block, so that the step takes as long as one that is not causal. Each pair takes 4 C flops forward, as
    many in the forward pass that is made again, and 14 C backward, which computes blocks of keys once more.
    """
    tokens = length // gpus
    bandwidth = device.bandwidth(gpus)
    blocks, gradients = ring_bytes(gpus, tokens, 2 * size.hidden)
    pairs = gpus * 2 * size.hidden * tokens**2 / device.flops
    sent = ((4, blocks / 2), (4, blocks / 2), (14, blocks / 2 + gradients))
    passes = sum(max(flops * pairs, moved / bandwidth) for flops, moved in sent)
    of_weights = 3 * HALF * size.weights * (gpus - 1) / gpus
    linear = max(8 * size.weights * tokens / device.flops, of_weights / bandwidth)
    seconds = linear + size.layers * passes
    useful = tokens * size.flops(length) / device.flops
    # keys and values, and their gradients in float32: the own ones, those that leave and those that arrive
    passing = 3 * tokens * 2 * 2 * size.hidden * (HALF + SINGLE)
    memory = size.weight_bytes(gpus) + tokens * size.token_bytes() + passing + length * POSITION
    return Step(useful, of_weights + size.layers * sum(moved for _, moved in sent), seconds, memory)


def measured_seconds() -> float:
    """Of a training step of `m2-sc-rfa` at the paper's size, batch 16, on two cores of an AMD EPYC."""
    lines = map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
    wanted = {"benchmark": "step", "preset": "m2-sc-rfa", "batch": 16, "length": 512}
    return next(median(x["seconds"]["rfa"]) for x in lines if wanted.items() <= x.items())


def tables() -> dict[str, str]:
    """The tables by the names of their marks."""
    paper, seconds = Size(256, 6), measured_seconds()
    head = ["sent by each", "step", "useful"]
    ddp = [[f"{n:,}", *replicated_step(paper, n, seconds, 1.25e9).row()] for n in NUMBERS]
    large, device, batch, length = Size(), Device(), 2**22, 2**13
    plans = {"sharded": 1, "heads": 8}
    held = ["GPUs", "tokens a GPU", *head, "memory"]
    sharded: dict[str, list[list[str]]] = {name: [] for name in plans}
    for (name, heads), n in itertools.product(plans.items(), NUMBERS):
        step = sharded_step(large, n, batch, length, heads, device)
        cells = ["-"] * 4 if step is None else step.row_with_memory(device)
        sharded[name].append([f"{n:,}", f"{batch // n:,}", *cells])
    ring = [[f"{n:,}", f"{2**20 // n:,}", *ring_step(large, n, 2**20, device).row_with_memory(device)] for n in NUMBERS]
    return {
        "ddp": _table(["processes", *head], ddp),
        **{name: _table(held, rows) for name, rows in sharded.items()},
        "ring": _table(held, ring),
    }


def _table(head: list[str], rows: list[list[str]]) -> str:
    return pipe_table([head, ["---"] * len(head), *rows])


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
