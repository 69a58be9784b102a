"""Run the notebooks of examples/notebooks, and write their pages with what they print and draw.

    python docs/notebooks.py [NAME ...]

MkDocs' plugins for notebooks do not work in zensical, which builds the site too. So the pages are written beforehand.
The tests run each notebook again and compare its page, but for what is printed: numbers change with machines.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

ROOT = Path(__file__).parents[1]
NOTEBOOKS, PAGES = ROOT / "examples" / "notebooks", ROOT / "docs" / "notebooks"
NAMES = tuple(sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
_PRINTED = re.compile(r"^```text\n.*?^```\n\n", re.DOTALL | re.MULTILINE)
_DOTS, _COLOURS = 110, 256  # per inch, and in the file of a figure


def cells(name: str) -> list[tuple[str, str]]:
    """The kind ("markdown" or "code") and the text of each cell."""
    content = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text("utf-8"))
    return [(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]


def written(name: str, folder: Path = PAGES) -> tuple[str, dict[str, Any]]:
    """Run a notebook and write its figures into a folder: the text of its page, and the names that its cells define."""
    parts, names, figures = [f"<!-- of examples/notebooks/{name}.ipynb, by python docs/notebooks.py -->"], {}, 0
    here = Path.cwd()
    plt.close("all")  # figures that others in this process have left
    os.chdir(NOTEBOOKS)
    try:
        for number, (kind, text) in enumerate(cells(name), start=1):
            if kind == "markdown":
                parts.append(text.replace("../../docs/", "../"))
                continue
            parts.append(f"```python\n{text.removesuffix(';')}\n```")
            if printed := _run(text, f"{name}.ipynb, cell {number}", names).strip("\n"):
                parts.append(f"```text\n{printed}\n```")
            for title in _saved(folder, name, figures):
                figures += 1
                parts.append(f"![{title}]({name}-{figures}.png)")
    finally:
        os.chdir(here)
        plt.close("all")
    parts.append(f"*This page is a notebook: `jupyter lab examples/notebooks/{name}.ipynb`.*")
    return "\n\n".join(parts) + "\n", names


def without_printed(page: str) -> str:
    """A page without what its cells have printed."""
    return _PRINTED.sub("", page)


def _run(text: str, place: str, names: dict[str, Any]) -> str:
    """Run a cell as Jupyter does, with the value of its last line; returned is what it prints."""
    body = ast.parse(text).body
    shown = body.pop() if isinstance(body[-1], ast.Expr) and not text.rstrip().endswith(";") else None
    names.setdefault("__name__", "notebook")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(ast.Module(body, []), place, "exec"), names)
        if isinstance(shown, ast.Expr):
            value = eval(compile(ast.Expression(shown.value), place, "eval"), names)
            if value is not None:
                print(value if hasattr(value, "to_string") else repr(value))
    return out.getvalue()


def _saved(folder: Path, name: str, before: int) -> Iterator[str]:
    """Save and close all open figures; the title of each."""
    for number in plt.get_fignums():
        figure = plt.figure(number)
        before += 1
        picture = io.BytesIO()
        figure.savefig(picture, dpi=_DOTS, format="png")
        image = Image.open(picture).convert("RGB").quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, dither=0)
        image.save(folder / f"{name}-{before}.png", optimize=True)
        titles = [figure.get_suptitle(), *(axes.get_title(loc) for axes in figure.axes for loc in ("center", "left"))]
        plt.close(figure)
        yield next(filter(None, titles))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    for given in parser.parse_args().names or NAMES:
        (PAGES / f"{given}.md").write_text(written(given)[0], "utf-8")
