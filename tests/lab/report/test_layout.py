"""One table in three forms."""

import csv
import io
import re

import pytest
from markdown_it import MarkdownIt  # rich brings it

from rfa_lab.report.layout import NumberCell, Table, comma_separated, latex, markdown, replace_between

TABLE = Table(
    "t",
    "A & B: 5 % of x_1",
    ("model", "a|b", "L = 64"),
    (
        ("m2_sc", NumberCell(1.0, error=0.25, best=True), None),
        ("c#1 ^~\\{}$", None, NumberCell(-0.1234567, interval=(-0.2, 0.1), digits=3, signed=True)),
    ),
    ("a_note",),
)


def test_markdown():
    assert markdown(TABLE).splitlines() == [
        "A &amp; B: 5 % of x\\_1",
        "",
        "| model | a\\|b | L = 64 |",
        "| --- | ---: | ---: |",
        "| m2\\_sc | **1.00 ± 0.25** | – |",  # noqa: RUF001
        "| c\\#1 ^&#126;\\\\{}&#36; | – | −0.123 [−0.200, +0.100] |",  # noqa: RUF001
        "",
        "- a\\_note",
    ]


MARKUP = ["<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](http://b)", "`a`", "**a**", "_a_", "~~a~~"]
MARKUP += ["<!-- a", "&lt;b&gt;"]
MARKUP += ["a | b", "$a$", "# a", "a\n\n# b", "a\r\n|---|", "\\<i>", "\\", "\x1b[31ma", "\u202ea"]


def shown(text):
    """As a reader sees it: on one line, without signs that do not show."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


@pytest.mark.parametrize("text", MARKUP)
def test_text_is_no_markup(text):
    """To a reader of Markdown everything is text, and comes out as it went in."""
    table = Table("t", text, ("model", text), ((text, text), (text, NumberCell(1.5, interval=(1.0, 2.0)))), (text,))
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown(table))
    blocks = {token.type.partition("_")[0] for token in tokens}
    assert blocks == {"paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet", "list", "inline"}
    inline = [token.children for token in tokens if token.type == "inline"]
    assert {child.type for children in inline for child in children} == {"text"}
    said = ["".join(child.content for child in children) for children in inline]
    assert said == [shown(text), "model", *4 * [shown(text)], "1.50 [1.00, 2.00]", shown(text)]
    check_latex(latex(table), only_ascii=False)


@pytest.mark.parametrize("sign", [*"=+-@", "\t=", " =", "\uff1d"])
def test_text_is_no_formula(sign):
    """Numbers stay numbers, negative ones too."""
    text = f"{sign}HYPERLINK(1)"
    table = Table("t", "", ("model", text), ((text, NumberCell(-1.5, error=0.5)), ("a-b", None)))
    rows = list(csv.reader(io.StringIO(comma_separated(table))))
    inert = f"'{shown(text)}"
    assert rows == [["model", inert, f"{inert} half-width"], [inert, "-1.5", "0.5"], ["a-b", "", ""]]


def test_csv_is_unrounded():
    rows = list(csv.reader(io.StringIO(comma_separated(TABLE))))
    assert rows == [
        ["model", "a|b", "a|b half-width", "L = 64", "L = 64 low", "L = 64 high"],
        ["m2_sc", "1.0", "0.25", "", "", ""],
        ["c#1 ^~\\{}$", "", "", "-0.1234567", "-0.2", "0.1"],
    ]


def check_latex(text, only_ascii=True):
    """Environments nest, booktabs' rules stand once, rows fit their columns, nothing special is left unescaped."""
    assert text.isascii() or not only_ascii
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text).group(1)
    head, body = re.search(r"\\toprule\n(.*)\\midrule\n(.*)\\bottomrule\n\\end\{tabular\}", text, re.S).groups()
    for row in (head + body).splitlines():
        assert row.endswith(r" \\")
        assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
    outside = re.sub(r"\\(begin|end|label)\{[^}]*\}", "", text)
    assert not re.search(r"(?<!\\)[%$#_~^]", outside)
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", outside):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0


def test_latex():
    text = latex(TABLE)
    check_latex(text)
    assert r"\caption{A \& B: 5 \% of x\_1}" in text
    assert r"m2\_sc & \textbf{1.00 \ensuremath{\pm} 0.25} & -- \\" in text


def test_between_two_marks():
    assert replace_between("a <1> old <2> z", "<1>", "<2>", " new ") == "a <1> new <2> z"
    for page in ("a <2> old <1> z", "a <1> old", "old <2>"):
        with pytest.raises(ValueError, match="page: got one without <1> and <2> in this order"):
            replace_between(page, "<1>", "<2>", " new ")
