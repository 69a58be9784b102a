"""Draw docs/figures/imports.svg, the imports between the folders of both packages: `python docs/import_graph.py`.

An arrow that follows from two others is left out.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import networkx as nx

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PATTERN = re.compile(r"^\s*from (rfa|rfa_lab)(?:\.(\w+)[\w.]*)? import ([\w, ]+)", re.MULTILINE)


def imports() -> nx.DiGraph:
    """An edge from each folder of a package, or file at its top, to each that it imports."""
    tops = [path for package in ("rfa", "rfa_lab") for path in (SOURCE / package).iterdir()]
    folders = {f"{path.parent.name}.{path.stem}" for path in tops if not path.stem.startswith("__")}
    folders -= {"rfa.version"}
    graph = nx.DiGraph()
    for path in SOURCE.rglob("*.py"):
        importer = ".".join(path.relative_to(SOURCE).with_suffix("").parts[:2])
        for package, folder, names in PATTERN.findall(path.read_text("utf-8")):
            imported = {f"{package}.{name}" for name in ([folder] if folder else re.findall(r"\w+", names))}
            graph.add_edges_from((importer, name) for name in imported & folders - {importer} if importer in folders)
    return graph


def draw(graph: nx.DiGraph, path: Path) -> None:
    """The folders in one column, each below all that it imports."""
    column = [name for line in nx.topological_generations(graph.reverse()) for name in sorted(line)]
    height = {folder: len(column) - line for line, folder in enumerate(column)}
    figure, axes = plt.subplots(figsize=(5, 0.5 * len(column)))
    for importer, imported in nx.transitive_reduction(graph).edges:
        span = height[imported] - height[importer]
        style = {"arrowstyle": "->", "color": "0.45", "connectionstyle": f"arc3,rad={0.5 if span > 1 else 0}"}
        side = 0.5 if span > 1 else 0.0  # arcs leave and arrive beside the names
        ends = (side, height[imported] - (0 if span > 1 else 0.3)), (side, height[importer] + (0 if span > 1 else 0.3))
        axes.annotate("", *ends, arrowprops=style)
    for folder, y in height.items():
        axes.text(0, y, folder, ha="center", va="center", family="monospace")
    axes.set(xlim=(-0.6, 3), ylim=(0.5, len(column) + 0.5))
    axes.set_axis_off()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "rfa"
    draw(imports(), ROOT / "docs" / "figures" / "imports.svg")
