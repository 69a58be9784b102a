"""The stages of `make gpu` and their commands. At the tiny size they are the same commands with smaller numbers."""

import os
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from rfa.files import write_text_whole

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "novels-paper-size.yaml"
TOKENS = 32768  # of a batch of the operator
KERNELS = ("sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flash-attn")
FLEX = ("sdpa", "flex", "flex-score")  # apart: an error of a compiled kernel must not stop the others
SLICE = "8m"  # of the recipe, in a stage of nine minutes


class Part(NamedTuple):
    """A command of a stage.

    Fields:
        name: within the stage.
        arguments: of Python.
        keeps: files and folders from which a command goes on that was stopped. One without begins anew, and is short.
        environment: more variables.
    """

    name: str
    arguments: list[str]
    keeps: tuple[Path, ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})


class Stage(NamedTuple):
    """Some commands, with what they are about in words."""

    name: str
    about: str
    parts: list[Part]


class Place(NamedTuple):
    """Where and how the stages run.

    Fields:
        out: the folder of results.
        tiny: without a GPU, at a tiny size.
        data: the text of the recipe; None for its own.
    """

    out: Path
    tiny: bool = False
    data: str | None = None


def stages(place: Place) -> list[Stage]:
    """All stages, in the order in which they run. At the tiny size a command stands once, whatever its numbers."""
    made = [
        Stage("tests", "the tests of the Triton backend", [_tests(place, "tests")]),
        Stage("fuzz", "random calls of the operator against float64", list(_fuzz(place))),
        Stage("captured", "torch.compile, CUDA graphs, no waiting for the GPU", list(_captured(place))),
        Stage("kernels", "time of each kernel, launches, the host's time, other tiles", list(_kernels(place))),
        Stage("operator-bf16", "the operator and its peers in bfloat16", list(_operator(place, "bfloat16"))),
        Stage("operator-wide", "the same with 128 channels a head", list(_operator(place, "bfloat16", channels=128))),
        Stage("operator-fp16", "the operator and its peers in float16", list(_operator(place, "float16"))),
        Stage("operator-fp32", "the operator and its peers in float32", list(_operator(place, "float32"))),
        Stage("step", "training steps beside b1-rope", list(_steps(place))),
        Stage("decode", "one token after many, beside SDPA", list(_decoding(place))),
        Stage("generate", "generation beside Llama", list(_generation(place))),
        Stage("memory", "peak memory beside SDPA", list(_memory(place))),
        Stage("tests-all", "the tests with every combination of options", [_tests(place, "tests-all", all_="all")]),
        Stage("novels", "recipes/novels-paper-size.yaml, a slice at a time", list(_novels(place))),
    ]
    ways: set[str] = set()
    for stage in made if place.tiny else ():
        parts, stage.parts[:] = list(stage.parts), []
        for part in parts:
            if not stage.parts or _way(part) not in ways:
                stage.parts.append(part)
            ways.add(_way(part))
    return made


def _way(part: Part) -> str:
    """The command without what changes numbers only."""
    return re.sub(r"--(dtype|preset|channels|json|seed|triton-keys) \S+", "", " ".join(part.arguments))


def _tests(place: Place, name: str, all_: str = "") -> Part:
    processes = 1 if place.tiny else max(1, min(8, (os.cpu_count() or 2) // 2))  # which compile kernels
    few = ["-k", "test_nothing_to_see or test_compiles" if all_ else "test_nothing_to_see"] if place.tiny else []
    arguments = ["-m", "pytest", "tests/rfa/ops/triton", "-q", "-p", "gpu_tests", "-p", "no:cacheprovider"]
    outcomes = place.out / f"{name}.jsonl"
    environment = {"GPU_TESTS": str(outcomes), "RFA_TESTS": all_}
    return Part("pytest", [*arguments, "-n", str(processes), *few], (outcomes,), environment)


def _fuzz(place: Place) -> Iterator[Part]:
    for name, seed, keys, cases in (("few-keys", 0, 35, 150), ("more-keys", 1000, 160, 100)):
        options = {"--cases": 0, "--triton-cases": 1 if place.tiny else cases, "--seed": seed, "--triton-keys": keys}
        kept = place.out / f"fuzz-{name}.json"
        options |= {"--device": "cuda", "--json": kept}
        yield Part(name, ["benchmarks/fuzz.py", *_spread(options)], (kept,))


def _captured(place: Place) -> Iterator[Part]:
    shape = [1, 2, 20, 16] if place.tiny else [4, 8, 2048, 64]
    for name, preset, dtype, more in (
        ("m2-bf16", "m2-sc-rfa", "bfloat16", []),
        ("x1-bf16", "x1-riccati", "bfloat16", []),
        ("irregular-bf16", "m2-sc-rfa", "bfloat16", ["--irregular"]),
        ("m2-fp32", "m2-sc-rfa", "float32", []),
    ):
        options = {"--shape": shape, "--preset": preset, "--dtype": dtype, "--device": "cuda"}
        options |= {"--repeats": 1 if place.tiny else 7, "--json": place.out / f"captured-{name}.json"}
        yield Part(name, ["benchmarks/captured.py", *_spread(options), *more])


def _kernels(place: Place) -> Iterator[Part]:
    shape = [1, 2, 20, 16] if place.tiny else [16, 8, 2048, 64]
    for name, more in (("uniform", []), ("irregular", ["--irregular"]), ("tiles", ["--tiles"])):
        options = {"--shape": shape, "--device": "cuda", "--repeats": 1 if place.tiny else 5}
        options["--json"] = place.out / f"kernels-{name}.json"
        yield Part(name, ["benchmarks/kernel_times.py", *_spread(options), *more])


def _operator(place: Place, dtype: str, channels: int = 64) -> Iterator[Part]:
    chosen = {64: (512, 2048, 8192, 16384), 128: (2048, 8192)}[channels] if dtype == "bfloat16" else (2048, 8192)
    for length in chosen:
        batch = TOKENS // length
        given = {"--lengths": length, "--batch": batch, "--channels": channels}
        yield _bench(place, f"{length}", "operator", dtype, **given, **{"--peers": KERNELS})
        if length in (2048, 8192):
            yield _bench(place, f"{length}-flex", "operator", dtype, **given, **{"--peers": FLEX})
    if channels == 64 and dtype == "bfloat16":
        for preset in ("x1-riccati", "m2.1-exponential"):
            given = {"--lengths": 2048, "--batch": TOKENS // 2048, "--presets": preset}
            yield _bench(place, f"2048-{preset}", "operator", dtype, **given, **{"--peers": KERNELS})


def _steps(place: Place) -> Iterator[Part]:
    for preset in ("m2-sc-rfa", "x2-riccati-alibi", "x4-content-riccati", "c4-fox", "x5-content-clock"):
        yield _bench(place, preset, "step", **{"--presets": preset, "--lengths": 512, "--batch": 16})
    yield _bench(place, "m2-2048", "step", **{"--presets": "m2-sc-rfa", "--lengths": 2048, "--batch": 4})


def _decoding(place: Place) -> Iterator[Part]:
    for batch in (1, 16):
        for length in (1024, 8192, 32768):
            yield _bench(place, f"{batch}x{length}", "decode", **{"--lengths": length, "--batch": batch})


def _generation(place: Place) -> Iterator[Part]:
    for preset in ("m2-sc-rfa", "x2-riccati-alibi"):
        for batch in (1, 16):
            yield _bench(place, f"{preset}-{batch}", "generate", **{"--presets": preset, "--batch": batch})


def _memory(place: Place) -> Iterator[Part]:
    for batch, length in ((4, 8192), (1, 32768)):
        yield _bench(place, f"{batch}x{length}", "memory", **{"--lengths": length, "--batch": batch})


def _bench(place: Place, name: str, what: str, dtype: str = "bfloat16", **options: Any) -> Part:
    """A command of `rfa bench` whose lines go to bench.jsonl."""
    given: dict[str, Any] = {"--device": "cuda", "--backend": "triton", "--dtype": dtype, **options}
    if place.tiny:
        channels = given.get("--channels", 64) // 4
        given |= {"--lengths": 20, "--batch": 1, "--heads": 2, "--channels": channels, "--repeats": 1}
        if what in ("step", "generate"):
            given["--set"] = ["vocab_size=64", "num_hidden_layers=1"]
    given["--out"] = place.out / "bench.jsonl"
    return Part(name, ["-m", "rfa_lab.cli", "bench", what, *_spread(given)])


def _novels(place: Place) -> Iterator[Part]:
    recipe, data = (tiny_novels(place.out)) if place.tiny else (RECIPE, place.data)
    command = ["-m", "rfa_lab.cli", "experiment", str(recipe), "--out", str(place.out / "novels")]
    command += [] if data is None else ["--data", data]
    yield Part("needs", [*command, "--dry-run"])
    yield Part("slice", [*command, "--for", "20s" if place.tiny else SLICE], (place.out / "novels",))


def tiny_novels(folder: Path) -> tuple[Path, str]:
    """The recipe at a tiny size, and a text by its authors; the same for the same folder."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    held_out = re.findall(r"[=,](\w+)", recipe["training"]["split_by"])
    words, vocabulary = random.Random(0), ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
    for author in ("Austen", *held_out):
        text = " ".join(words.choice(vocabulary) for _ in range(600))
        write_text_whole(folder / "tiny-text" / f"{author}_Novel_1900.txt", text)
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    small = {"tokenizer": "bytes", "length": 16, "batch_size": 2, "max_steps": 4, "model": model}
    recipe["training"] |= {**small, "valid_tokens": 64, "eval_steps": 2, "log_steps": 1}
    del recipe["training"]["epochs"]
    presets = recipe["runs"][0]["presets"][:2]
    recipe |= {"train_tokens": 128, "runs": [{"presets": presets, "seeds": [0]}]}
    recipe["evaluation"] |= {"lengths": [16, 32], "protocols": {"blocks": 128, "matched": 64}, "attention": presets}
    path = folder / "tiny-novels.yaml"
    write_text_whole(path, yaml.safe_dump(recipe))
    return path, str(folder / "tiny-text")


def _spread(options: dict[str, Any]) -> list[str]:
    """Options as a command has them."""
    words: list[str] = []
    for name, value in options.items():
        words += [name, *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return words
