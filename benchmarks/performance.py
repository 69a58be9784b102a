"""Write the tables and the figure of docs/record/performance.md, from the newest line of each configuration.

    python benchmarks/performance.py [benchmarks/results/*.jsonl]

The command reads result files of `rfa bench` and of benchmarks/instructions.py. It measures nothing. The tables of GPU
kernels are those of benchmarks/results/gpu_instructions.json.
"""

import argparse
import json
from pathlib import Path

from machine_code import markdown
from speed_tables import instruction_table, latest, markdown_tables, operator_curves, speed_over_length

from rfa.files import write_text_whole
from rfa.forecasting.style import save
from rfa_lab.bench import read
from rfa_lab.report.layout import replace_between

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
KERNELS = ROOT / "benchmarks" / "results" / "gpu_instructions.json"
BEGIN_KERNELS, END_KERNELS = "<!-- kernels: begin -->", "<!-- kernels: end -->"
MEASURED = {"operator", "step", "decode", "generate", "memory"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="by default all in benchmarks/results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "record" / "performance.md")
    options = parser.parse_args()
    files = options.files or sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    print(update(options.page, files))
    write_text_whole(options.page, with_kernels(options.page.read_text(encoding="utf-8")))


def update(page: Path, files: list[Path]) -> str:
    """Write the measured part of the page and the figure beside the page. Return the measured part."""
    lines = [line for file in files for line in read(file)]
    speeds = latest(line for line in lines if line.get("benchmark") in MEASURED)
    counts = latest(line for line in lines if line.get("benchmark") == "instructions")
    parts = ["Nothing has been measured with this version yet.\n"] if not speeds else []
    if operator_curves(speeds):
        figure = page.with_suffix(".png")
        save(speed_over_length(speeds), figure)
        parts.append(f"![Time over SDPA's, and percent of the bound, by length]({figure.name})\n")
    if speeds:
        parts.append(markdown_tables(speeds))
    if counts:
        parts += ["### Instructions\n", instruction_table(counts)]
    measured = "\n".join(parts).strip()
    try:
        text = replace_between(page.read_text(encoding="utf-8"), BEGIN, END, f"\n\n{measured}\n\n")
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from None
    write_text_whole(page, text)
    return measured


def with_kernels(text: str) -> str:
    """The text of the page with the tables of the GPU kernels."""
    lines = json.loads(KERNELS.read_text(encoding="utf-8"))
    parts = [
        "Instructions a pair, bfloat16 / float16, by architecture and channels of a head. Registers and spills are"
        " of the first column, in bfloat16:",
        markdown(lines),
    ]
    return replace_between(text, BEGIN_KERNELS, END_KERNELS, "\n\n" + "\n\n".join(parts) + "\n\n")


if __name__ == "__main__":
    main()
