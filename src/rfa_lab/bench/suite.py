"""The cases of `rfa bench`, and their measurement."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rfa.checks import check_range, require
from rfa.environment import cpu_name, environment
from rfa.models import PRESETS, FilterAttentionConfig
from rfa.models.presets import PLAIN_NAMES
from rfa.ops.problem import certificate_missing
from rfa.progress import Stage, StageProgress

from .decode import DecodingCase
from .measurement import LARGEST, Case, Setting, StateShape
from .memory import MemoryCase
from .models import PEER, GenerationCase, TrainingStepCase
from .operator import OperatorCase, Trained, filter_layer, trained_layers
from .peers import PEERS
from .results import append

WHAT = ("operator", "step", "decode", "generate", "memory", "all")
PRESET = "rfa"
TARGETS = {"cpu": (512, 2048, 8192), "cuda": (512, 1024, 2048, 4096)}  # lengths of the operator
CURVE = (512, 1024, 2048, 4096, 8192, 16384, 32768)
DECODE_LENGTH, MEMORY_LENGTH, TRAIN_LENGTH, PROMPT_LENGTH = 8192, 32768, 512, 512  # default lengths in tokens
SMALL = {"vocab_size": 4096, "num_hidden_layers": 2}  # with it a training step takes about a second


def cases(
    what: str | None,
    setting: Setting,
    *,
    lengths: Sequence[int] = (),
    batch: int | None = None,
    heads: int = 8,
    channels: int = 64,
    presets: Sequence[str] = (),
    model: Mapping[str, Any] | None = None,
    peers: Sequence[str] = (),
    certified: bool = False,
    trained: Path | None = None,
) -> list[Case]:
    """The cases of a command.

    Args:
        what: one of `WHAT`; None for the operator at the lengths of `TARGETS` and a small training step.
        setting: of the benchmark.
        lengths: numbers of tokens, or of cached tokens. The default is `TARGETS`; for "all" it goes up to 32,768.
        batch: number of sequences. By default more for short sequences, so that they fill the machine; 16 in training
            and 1 where tokens follow one by one.
        heads, channels: of the states. A model's width is `heads * channels / 2`.
        presets: `rfa` by default; "all" for all presets except the peer of training steps.
        model: further fields of whole models, in training and generation.
        peers: of the operator, names of `PEERS`; "all" for all, the default on a GPU. On a CPU it is "sdpa". Of "step"
            one preset, by default `b1-rope`.
        certified: leave out the keys that provably cannot count, in the operator and in decoding, and compare with the
            same over all keys too.
        trained: the result file of a run, whose preset and learned dynamics replace the initial ones, a case a layer.

    Raises:
        ValueError: for unknown or invalid values.
    """
    require(what is None or what in WHAT, "bench", what, f"one of {', '.join(WHAT)}")
    for field, given in (("batch", 1 if batch is None else batch), ("heads", heads), ("channels", channels)):
        check_range(field, given, 1, LARGEST)
    for length in lengths:
        check_range("lengths", length, 1, LARGEST)
    peer = peers[0] if what == "step" and peers else PEER
    every = [name for name in PRESETS if name not in {peer, *PLAIN_NAMES}]
    of_operator = what in ("operator", "decode")
    require(
        of_operator or not (certified or trained),
        "--certified" if certified else "--trained",
        what,
        "the benchmark 'operator' or 'decode'",
    )
    require(not (trained and presets), "--presets", list(presets), "none beside --trained: the file names its preset")
    usual = PRESET
    layers: Sequence[Trained | None] = [None]
    if trained is not None:
        usual, layers = trained_layers(trained)
    chosen = every if "all" in presets else list(presets) or [usual]
    require(what in (None, "step", "generate", "all") or not model, "--set", model, "a whole model with it")
    for name in chosen:
        require(name in PRESETS, "presets", name, f"'all' or some of {', '.join(PRESETS)}")
    require(what in (None, "operator", "step", "all") or not peers, "--peers", peers, "the operator or a step with it")
    if what == "step":
        require(len(peers) < 2, "--peers", peers, "one preset for a step")
        require(peer in PRESETS, "peers", peer, f"one of {', '.join(PRESETS)}")
        require(not peers or peer not in chosen, "peers", peer, f"another preset than {peer}")
    else:
        for name in peers:
            require(name in (*PEERS, "all"), "peers", name, f"'all' or some of {', '.join(PEERS)}")
    everyone = "all" in peers or (not peers and setting.device == "cuda")
    against = PEERS if everyone else tuple(dict.fromkeys(peers)) or PEERS[:1]
    found: list[Case] = []
    for name in chosen:
        # a baseline does not use our operator: with "all" it is skipped, named by the user it is an error
        if _is_filter(name) or (what in ("operator", "decode", "memory") and "all" not in presets):
            for each in layers:
                layer = filter_layer(name, heads, channels, trained=each)
                missing = certificate_missing(layer.options.prior, layer.causal) if certified else None
                require(missing is None, "--certified", name, "a preset with prior='riccati', as rfa")
                of_states = {"certified": certified, "trained": each}
                found += _attention_cases(what, name, setting, lengths, batch, heads, channels, against, of_states)
        size: dict[str, Any] = {"hidden_size": heads * channels // 2, "num_attention_heads": heads}
        if what in (None, "step", "all"):
            small = SMALL if what is None else {}
            sizes = {**size, **small, **(model or {})}
            found += _training_cases(name, peer, setting, lengths, batch or (4 if what is None else 16), sizes)
        if what in ("generate", "all"):
            sizes = {**size, **(model or {})}
            generations = [GenerationCase(name, batch or 1, n, sizes, setting) for n in lengths or [PROMPT_LENGTH]]
            generations[0].config(name)  # so that an error comes now
            found += generations
    if setting.backend != "auto":  # for "auto" this would already compile kernels
        setting.resolved((channels, channels))
    return found


def _attention_cases(
    what: str | None,
    name: str,
    setting: Setting,
    lengths: Sequence[int],
    batch: int | None,
    heads: int,
    channels: int,
    peers: tuple[str, ...],
    of_states: Mapping[str, Any],
) -> Iterator[Case]:
    if what in (None, "operator", "all"):
        for length in lengths or (CURVE if what == "all" else TARGETS[setting.device]):
            # on a CPU about 2,048 tokens, in at most 4 sequences
            usual = 16 if setting.device == "cuda" else min(4, max(1, 2048 // length))
            yield OperatorCase(
                StateShape(batch or usual, heads, length, channels), name, setting, peers=peers, **of_states
            )
    if what in ("decode", "all"):
        for length in lengths or [DECODE_LENGTH]:
            yield DecodingCase(StateShape(batch or 1, heads, length, channels), name, setting, **of_states)
    if what in ("memory", "all"):
        for length in lengths or [MEMORY_LENGTH]:
            yield MemoryCase(StateShape(batch or 1, heads, length, channels), name, setting)


def _training_cases(
    name: str, peer: str, setting: Setting, lengths: Sequence[int], batch: int, size: Mapping[str, Any]
) -> Iterator[Case]:
    for length in lengths or [TRAIN_LENGTH]:
        require(length >= 2, "lengths", length, "at least 2 tokens in training")
        step = TrainingStepCase(name, batch, length, size, setting, peer)
        for trained in (name, peer):
            step.config(trained)  # so that an error comes now, not after the other cases
        yield step


def _is_filter(name: str) -> bool:
    return isinstance(PRESETS[name], FilterAttentionConfig)


def run(
    made: Sequence[Case], out: Path, setting: Setting, progress: StageProgress = lambda *_: None
) -> Iterator[dict[str, Any]]:
    """Measure each case, and append each of its lines to `out` before it is yielded.

    Args:
        made: the cases, from `cases`.
        out: the result file.
        setting: with which the cases were made.
        progress: called with the stage (the title of a case, "done" at the end), the rounds done and their total.

    Raises:
        OSError: if nothing can be written to `out`.
    """
    require(not out.exists() or out.is_file(), "--out", str(out), "the path of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab"):  # so that an error comes now, not after the first measurement
        pass
    total, done = sum(case.rounds for case in made), 0
    machine = {"processor": processor(setting.device), "environment": environment()}
    for case in made:
        begun = done
        progress(Stage(case.title), done, total)

        def tick(case: Case = case) -> None:
            nonlocal done
            done += 1
            progress(Stage(case.title), done, total)

        for line in case.lines(tick):
            line |= {**machine, "time": datetime.now(UTC).isoformat(timespec="seconds")}
            append(out, line)
            yield line
        done = begun + case.rounds
    progress(Stage("done"), total, total)


def processor(device: str) -> str:
    """The name of the CPU, with the instructions that PyTorch takes on it, or of the GPU."""
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        return f"{card.name}, {card.multi_processor_count} SMs, {card.total_memory / 2**30:.0f} GiB"
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
