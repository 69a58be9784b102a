"""The tables and the figure of docs/long-sequences.md, from benchmarks/results: `python docs/long_sequences.py`."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from rfa.files import write_text_whole
from rfa.forecasting.style import PAGE as WIDTH
from rfa.forecasting.style import draw_lines, lengths_axis, letter, looks, save, styled
from rfa_lab.bench import read
from rfa_lab.bench.results import Line
from rfa_lab.report.layout import pipe_table, replace_between

PAGE = Path(__file__).parent / "long-sequences.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FIGURE = PAGE.parent / "figures" / "long-sequences.png"
DASH = "\N{EN DASH}"
OPERATOR, DECODING = (2048, 8192, 32_768), (8192, 32_768, 262_144)
CONTESTANTS = {"certified": ("rfa", "sdpa"), "all keys": ("peer", "all-keys"), "SDPA": ("peer", "sdpa")}


def lines_of(results: Path = RESULTS) -> list[Line]:
    """The lines of `rfa bench --certified` in float32, newest last."""
    path = results / "certified.jsonl"
    lines = read(path) if path.exists() else []
    return [line for line in lines if line.get("certified") and line["dtype"] == "float32" and "ratio" in line]


def latest(lines: Iterable[Line], benchmark: str, length: int, peer: str, trained: bool = False) -> list[Line]:
    """The newest line of each layer; there is one layer, the preset's, unless they are trained ones."""
    found: dict[int, Line] = {}
    for line in lines:
        own = line["benchmark"], line["length"], line["peer"], "trained" in line
        if own == (benchmark, length, peer, trained) and line["pass"] != "forward":
            found[line["trained"]["layer"] if trained else 0] = line
    return list(found.values())


def cell(lines: Sequence[Line], number: Callable[[Line], float], form: str = "{:.2f}") -> str:
    """The mean over layers; a dash where nothing was measured."""
    return form.format(mean(map(number, lines))) if lines else DASH


def ratio(line: Line) -> float:
    """The median ratio to the peer."""
    return line["ratio"]["median"]


def megabytes(contestant: str) -> Callable[[Line], float]:
    """The size of a cache."""
    return lambda line: line["cache_bytes"][contestant] / 1e6


def over_sdpa(lines: Sequence[Line], length: int) -> str:
    """The ratio of the operator over all keys to SDPA, from the times of the same turns."""
    found = [latest(lines, "operator", length, peer) for peer in ("all-keys", "sdpa")]
    if not all(found):
        return DASH
    keys, products = (each[0]["seconds"]["peer"] for each in found)
    return f"{median(mine / theirs for mine, theirs in zip(keys, products, strict=True)):.2f}"


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Each table of the page in Markdown, by its mark."""
    head = ["forward and backward, over SDPA", *(f"{length:,}" for length in OPERATOR)]
    rows = [head, ["---", *["---:"] * len(OPERATOR)]]
    for name, peer, trained in (("ALiBi's slopes", "sdpa", False), ("a trained model's slopes", "sdpa", True)):
        found = [latest(lines, "operator", length, peer, trained) for length in OPERATOR]
        rows.append([name, *(cell(each, ratio) for each in found)])
    rows.append(["ALiBi's slopes, `certified=None`", *(over_sdpa(lines, length) for length in OPERATOR)])
    operator = pipe_table(rows)

    rows = [["one token, over SDPA", *(f"after {length:,}" for length in DECODING)], ["---", *["---:"] * len(DECODING)]]
    found = [latest(lines, "decode", length, "sdpa") for length in DECODING]
    rows += [
        ["time", *(cell(each, ratio, "{:.3f}") for each in found)],
        ["cache", *(cell(each, megabytes("rfa"), "{:,.0f} MB") for each in found)],
        ["cache of SDPA", *(cell(each, megabytes("peer"), "{:,.0f} MB") for each in found)],
    ]
    return {"operator": operator, "decoding": pipe_table(rows)}


def written(page: str, results: Path = RESULTS) -> str:
    """The page with its tables, each between its marks."""
    for mark, text in tables(lines_of(results)).items():
        page = replace_between(
            page, f"<!-- {mark}: docs/long_sequences.py -->", f"<!-- end of {mark} -->", f"\n{text}\n"
        )
    return page


@styled
def figure(lines: Sequence[Line], long_text: dict) -> Figure:
    """Time of a forward and backward pass over the length, time of a token, and memory over a long text."""
    titles = {"operator": "forward and backward", "decode": "one token"}
    timed = [name for name in titles if any(line["benchmark"] == name for line in lines)]
    drawn, panels = plt.subplots(1, len(timed) + 1, figsize=(WIDTH, 2.2), squeeze=False)
    *of_times, memory = panels[0]
    for axes, benchmark in zip(of_times, timed, strict=True):
        lengths = sorted({line["length"] for line in lines if line["benchmark"] == benchmark})
        curves = {}
        for name, (contestant, peer) in CONTESTANTS.items():
            found = [(length, latest(lines, benchmark, length, peer)) for length in lengths]
            curves[name] = [
                [length for length, each in found if each],
                [1e3 * median(each[0]["seconds"][contestant]) for _, each in found if each],
            ]
        draw_lines(axes, curves)
        lengths_axis(axes, lengths)
        axes.set(title=titles[benchmark], ylabel="milliseconds", yscale="log")
    grown = {}
    for name, key in (("certified", "dropping"), ("all keys", "keeping")):
        points = long_text[key]
        held = [(point["resident"] - points[0]["resident"]) / 1e6 for point in points]
        grown[name] = [[point["tokens"] / 1e3 for point in points], held]
    for name, look in looks(list(grown)).items():
        memory.plot(*grown[name], color=look["color"], linestyle=look["linestyle"], label=name)
    memory.set(title="reading a long text", xlabel="thousand tokens", ylabel="growth of the process (MB)")
    panels[0][0].legend()
    letter(panels[0])
    return drawn


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
    save(figure(lines_of(), json.loads((RESULTS / "long_sequence.json").read_text(encoding="utf-8"))), FIGURE, dots=200)
