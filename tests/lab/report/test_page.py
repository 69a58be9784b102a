"""The page in a browser: self-contained, readable on a phone, in the dark and on paper, and safe from its own data."""

import base64
import io
import re

from cover import slow
from PIL import Image

from rfa_lab.report.layout import NumberCell, Table
from rfa_lab.report.tables import published_results
from rfa_lab.report.write import DrawnFigure, render_page

from .results import whole_result


@slow
def test_page_renders(visit, report):
    page = visit(report.page)
    assert page.title() == page.inner_text("h1") == "tiny: Robust Filter Attention"
    assert page.eval_on_selector_all("table", "all => all.map(table => table.dataset.name).sort()") == sorted(
        report.tables
    )
    figures = page.eval_on_selector_all(
        "main figure img", "all => all.map(img => [img.closest('figure').id, img.naturalWidth])"
    )
    assert {name for name, _ in figures} == {f"figure-{name}" for name in report.figures}
    assert all(width > 300 for _, width in figures)  # decoded
    facts = page.inner_text("dl")
    for said in (
        "c0ffee",
        "x86_64, 2 CPUs",
        "2.13.0",
        "384 tokens in all, 3.0 minutes",
        "../corpus",
        "blocks, matched",
    ):
        assert said in facts
    assert "x1-riccati-seed0: begun, no result yet" in page.inner_text("#missing")
    rope = page.locator("table[data-name=table1-blocks] tr", has_text=re.compile("^b1-rope")).inner_text().split()
    assert rope[:4] == ["b1-rope", "1", "54.60", "60.34"]  # exp(4) and exp(4.1)
    paper = page.locator("table[data-name=paper-table1] tr", has_text=re.compile("^b1-rope")).inner_text().split()
    assert paper[:2] == ["b1-rope", "28.48"]
    assert page.locator("table[data-name=table1-blocks] .best").count() > 0
    assert published_results()["source"] in page.inner_text("main")


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


@slow
def test_data_are_no_markup(visit, tmp_path):
    run = whole_result(HOSTILE, recipe=HOSTILE, data=HOSTILE)
    run["environment"] = {"commit": HOSTILE, "machine": HOSTILE}
    table = Table("table1-blocks", HOSTILE, (HOSTILE, "x"), ((HOSTILE, NumberCell(1.0)),), (HOSTILE,))
    png = io.BytesIO()
    Image.new("RGB", (1, 1)).save(png, "png")
    figure = DrawnFigure("training", HOSTILE, HOSTILE, png.getvalue(), 3.3)
    path = tmp_path / "page.html"
    path.write_text(render_page([run], [table], [figure], {HOSTILE: HOSTILE}), encoding="utf-8")
    page = visit(path)
    assert page.title().startswith(HOSTILE)
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 1
    for place in ("h1", "dl", ".caption", "thead", "tbody", ".notes", "figcaption >> nth=0", "#missing"):
        assert HOSTILE in page.locator(place).first.inner_text()
    assert page.locator("img").get_attribute("alt") == HOSTILE
    assert page.locator("#regime").inner_text()  # the page's own script runs
