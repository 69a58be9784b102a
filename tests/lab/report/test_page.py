"""The page: self-contained, whole, and safe from its own data."""

import base64
import hashlib
import io
import re
from html.parser import HTMLParser

from PIL import Image

from rfa_lab.report.layout import NumberCell, Table
from rfa_lab.report.tables import published_results
from rfa_lab.report.write import DrawnFigure, render_page

from .results import whole_result


class Page(HTMLParser):
    """The elements of a page, and the text of each that has text, by its tag."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self):
        return "\n".join(data.strip() for _, data in self.texts if data.strip())


def test_everything_stands_on_the_page(report):
    page = Page(report.page.read_text(encoding="utf-8"))
    assert ("h1", "tiny: Robust Filter Attention") in page.texts
    assert sorted(table["data-name"] for table in page.all("table")) == sorted(report.tables)
    assert {figure["id"] for figure in page.all("figure") if "id" in figure} == {f"figure-{x}" for x in report.figures}
    assert all(len(image["alt"]) > 10 for image in page.all("img"))
    for said in (
        *("c0ffee", "x86_64, 2 CPUs", "2.13.0", "384 tokens in all, 3.0 minutes", "../corpus", "blocks, matched"),
        *("x1-riccati-seed0", ": begun, no result yet", published_results()["source"]),
        *("b1-rope\n1\n54.60\n60.34", "b1-rope\n28.48"),  # exp(4) and exp(4.1), and the paper's
    ):
        assert said in page.text()
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {link["href"][1:] for link in page.all("a")} <= set(ids)
    assert len(page.all("label")) == len(page.all("input")) == 8


def test_images_are_the_files(report):
    shown = re.findall(
        r'id="figure-([^"]+)".*?src="data:image/webp;base64,([^"]+)"',
        report.page.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert sorted(name for name, _ in shown) == sorted(report.figures)
    for name, data in shown:
        with (
            Image.open(io.BytesIO(base64.b64decode(data))) as image,
            Image.open(report.page.parent / "figures" / f"{name}.png") as file,
        ):
            assert image.convert("RGB").tobytes() == file.convert("RGB").tobytes()


def test_figures_of_all_models_stand_in_the_appendix():
    packed = io.BytesIO()
    Image.new("RGB", (4, 4)).save(packed, "png")
    drawn = [DrawnFigure(name, "", "", packed.getvalue(), 1.0) for name in ("training", "position", "training-all")]
    pages = [render_page([], [], figures, {}) for figures in (drawn, drawn[:2])]
    before, _, appendix = pages[0].partition('id="appendix"')
    assert re.findall(r'id="figure-([^"]+)"', before) == ["training", "position"]
    assert re.findall(r'id="figure-([^"]+)"', appendix) == ["training-all"]
    assert "appendix" not in pages[1]


def test_file_names_no_other(report):
    """Nothing to load: not even where no script of the page would ask for it."""
    text = report.page.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href|action|poster|data)=["'](?!data:|#)""", text)
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|import\(", text)


HOSTILE = "</script></style><img src=x onerror=alert(1)><script>alert(2)</script>\"'&{{ 7 * 7 }}"


def test_data_are_no_markup_and_no_other_script_is_admitted():
    run = whole_result(HOSTILE, recipe=HOSTILE, data=HOSTILE)
    run["environment"] = {"commit": HOSTILE, "machine": HOSTILE}
    table = Table("table1-blocks", HOSTILE, (HOSTILE, "x"), ((HOSTILE, NumberCell(1.0)),), (HOSTILE,))
    png = io.BytesIO()
    Image.new("RGB", (1, 1)).save(png, "png")
    figure = DrawnFigure("training", HOSTILE, HOSTILE, png.getvalue(), 3.3)
    page = Page(render_page([run], [table], [figure], {HOSTILE: HOSTILE}))
    (image,), (_,), (_,) = page.all("img"), page.all("script"), page.all("style")
    assert image["alt"] == HOSTILE
    assert {tag for tag, text in page.texts if HOSTILE in text} >= {
        "title",
        "h1",
        "dd",
        "p",
        "th",
        "li",
        "b",
        "figcaption",
    }
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    for tag in ("script", "style"):
        own = next(text for name, text in page.texts if name == tag)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
