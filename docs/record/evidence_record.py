"""The claims of docs/record/evidence.md and their table, from the records. `evidence.py` writes the page."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from evidence_answers import NOT_TESTED, Answer, copied, cost, errors, filters, learnt, recalled, text, weighed

from rfa.files import write_text_whole
from rfa_lab.report.layout import replace_between

PAGE = Path(__file__).with_name("evidence.md")
_BEGIN, _END = "<!-- answers: docs/record/evidence.py -->", "<!-- end of answers -->"
_WOLF, _TUNED = "wolf", ("WoLF", "variational")
_X2, _X4, _FOX = "x2-riccati-alibi", "x4-content-riccati no-innovation", "c4-fox rope"
_X5_PLAIN, _X6_PLAIN, _X7 = "x5-content-clock no-innovation", "x6-content-dynamics no-innovation", "x7-gated-roper"
_C7_PLAIN, _C8 = "c7-rope-alibi-innovation no-innovation", "c8-fox-clock"
_SAME, _BY_TIME, _CORRUPTED = "The same at 8 windows", "The same in recall by time", "The same among corrupted keys"
_LATER = "\N{DAGGER}"  # asked when a result was known
_NEAR, _FAR = 256, 2048  # the trained and the greatest length on code
_NO_SPIKES = ("plain, 48 hours", "30 %", "50 %", "70 %", "90 %")  # columns of ETTh1
_X2_REAL = f"{_X2} no-innovation-real"
_X2_PLAIN, _FOX_SERIES, _M2_RELEASED = f"{_X2} no-innovation", "forget gate with RoPE", "m2-sc-rfa as-released"


class Claim(NamedTuple):
    """What was asked, how it is answered, and the page that has the details.

    later: whether it was asked when some of its result was known. Only claims on code and on recall say so.
    """

    words: str
    of: Callable[[], Answer]
    page: str
    later: bool = False


def _untested() -> Answer:
    return Answer(NOT_TESTED, "no result yet")


def context(model: str, against: str, length: int = _NEAR) -> Answer:
    """Whether a model that uses its context is better on the same tokens, with so many tokens before them at most."""
    return text(model, against, length, "matched", "context")


def bytes_of(model: str, against: str, length: int = 32) -> Answer:
    """The same of byte models."""
    return text(model, against, length, "matched", "bytes")


def _on_code(words: str, model: str, against: str, asked: Sequence[int]) -> list[Claim]:
    """A claim about code in the window, and the same at eight windows.

    Args:
        words: without the length.
        model, against: labels of the record.
        asked: the lengths at which it was asked before a result was known.
    """
    claims = {_NEAR: f"{words} in the window", _FAR: _SAME}
    return [
        Claim(said, partial(context, model, against, length), _CONTEXT, later=length not in asked)
        for length, said in claims.items()
    ]


def _in_recall(words: str, task: str, model: str, against: str, *, length: int = 512, later: bool = False) -> Claim:
    """A claim about the share of right answers."""
    return Claim(words, partial(recalled, task, model, against, length), _RECALL, later)


def _weights(where: str, task: str) -> list[Claim]:
    """Claims about Student-t and the other weights in a setting where nothing else differs, at the trained length."""
    words = {"the exponential weight": "exponential", "a dot product": "dot product"}
    return [
        Claim(f"Student-t is better than {other}{where}", partial(weighed, task, "student-t", label, 48), _WEIGHTS)
        for other, label in words.items()
    ]


def _clock(words: str, model: str, against: str) -> list[Claim]:
    """A claim about a content clock in associative recall, and the same in every other task."""
    others = {
        _CORRUPTED: "corrupted recall",
        _BY_TIME: "recall by time",
        "The same in copying": "copy",
        "The same in induction": "induction",
        "The same in flip-flop": "flip-flop",
        "The same in parity": "parity",
    }
    rows = [_in_recall(said, task, model, against, later=True) for said, task in others.items()]
    trained = _in_recall("The same in parity, as trained", "parity", model, against, length=64, later=True)
    return [_in_recall(words, "recall", model, against), *rows, trained]


_BYTES = "context.md#bytes-slow-modes-turned-values-and-gates"
_TEXT, _DETAILS, _CONTEXT = "replication.md", "replication-details.md#", "context.md"
_WINDOW, _BEYOND, _VALUES, _ALIBI = (f"{_DETAILS}claim-{number}" for number in (3, 4, 11, 14))
_STEP = f"{_DETAILS}the-innovation-step-costs-002-to-003-in-alibi-m2-and-x2"
_PRIOR = f"{_DETAILS}the-priors-slope-helps"
_CONTROLS = f"{_DETAILS}inside-the-theory-not-distinguishable-from-the-best-controls"
_SERIES, _ROBUST = "series-record.md", "series-record.md#where-does-the-robust-weight-earn-its-place"
_FILTERS, _RECALL, _SPEED = "filters.md", "recall.md", "performance.md"
_WEIGHTS = f"{_RECALL}#the-robust-weight"
_TITLES = {
    _TEXT: "text",
    "replication-details.md": "text",
    _CONTEXT: "context",
    "experiments.md": "experiments",
    _SERIES: "series",
    _FILTERS: "filters",
    _RECALL: "recall",
    _SPEED: "speed",
}
CLAIMS: dict[str, Sequence[Claim]] = {
    "Long context": (
        *_on_code("m2 is better than RoPE", "m2-sc-rfa", "b1-rope", asked=(_NEAR,)),
        *_on_code("x2 is better than RoPE", _X2_PLAIN, "b1-rope", asked=(_NEAR,)),
        *_on_code("m2 as released is better than m2", _M2_RELEASED, "m2-sc-rfa", asked=()),
        *_on_code("m2 as released is better than ALiBi", _M2_RELEASED, "b2-alibi", asked=()),
        *_on_code("x2 is better than m2", _X2_PLAIN, "m2-sc-rfa", asked=()),
        *_on_code("x2 is better than ALiBi", _X2_PLAIN, "b2-alibi", asked=(_FAR,)),
        *_on_code("x2 is better than the forget gate", _X2_PLAIN, _FOX, asked=()),
        *_on_code("x2 is better than the normalised forget gate", _X2_PLAIN, f"{_FOX}-normalised", asked=(_NEAR, _FAR)),
        *_on_code("Normalised states make the forget gate better", f"{_FOX}-normalised", _FOX, asked=(_NEAR, _FAR)),
        *_on_code("x5 is better than ALiBi", _X5_PLAIN, "b2-alibi", asked=()),
        *_on_code("x5 is better than the forget gate", _X5_PLAIN, _FOX, asked=()),
        *_on_code("A forget gate makes RoPE better", _FOX, "b1-rope", asked=(_NEAR,)),
        *_on_code("The forget gate is better than ALiBi", _FOX, "b2-alibi", asked=(_FAR,)),
        *_on_code("Turned values make the forget gate better", _X7, _FOX, asked=(_NEAR,)),
        *_on_code("Content gains (x4) are better than the forget gate", _X4, _FOX, asked=(_NEAR,)),
        *_on_code("A content clock makes x2 better", _X5_PLAIN, _X2_PLAIN, asked=(_NEAR,)),
        *_on_code("A clock makes a better forget gate (c8)", _C8, _FOX, asked=(_NEAR,)),
        *_on_code("Content dynamics (x6) are better than m2", _X6_PLAIN, "m2-sc-rfa", asked=(_NEAR,)),
        *_on_code("Real slow modes make RoPE better", "b1-rope real", "b1-rope", asked=(_NEAR, _FAR)),
        *_on_code("KERPLE is better than ALiBi", "c12-kerple", "b2-alibi", asked=(_NEAR, _FAR)),
        *(
            Claim(  # trials of x2's rate were known a day before it was asked
                f"{words} in the window after 1,250 steps", partial(context, *models), _CONTEXT, words.startswith("x2")
            )
            for words, models in {
                "x2 is better than RoPE": (f"{_X2_PLAIN}-quarter", "b1-rope quarter"),
                "A forget gate makes RoPE better": (f"{_FOX}-quarter", "b1-rope quarter"),
                "Turned values make the forget gate better": (f"{_X7} quarter", f"{_FOX}-quarter"),
            }.items()
        ),
        Claim("The paper's results at its size (WikiText-103, BabyLM)", _untested, "experiments.md"),
    ),
    "Bytes, models of the demo's size that do not copy": (
        Claim(
            "Turned values make the forget gate better in the window", partial(bytes_of, "x7-gated-roper", _FOX), _BYTES
        ),
        Claim(_SAME, partial(bytes_of, "x7-gated-roper", _FOX, 256), _BYTES),
        Claim("A forget gate makes RoPE better in the window", partial(bytes_of, _FOX, "b1-rope"), _BYTES),
        Claim("A forget gate is better than fixed slopes (c7)", partial(bytes_of, _FOX, _C7_PLAIN), _BYTES),
        Claim("Content gains (x4) are better than the forget gate", partial(bytes_of, _X4, _FOX), _BYTES),
        Claim("x2 is better than RoPE in the window", partial(bytes_of, _X2_PLAIN, "b1-rope"), _BYTES),
        Claim("x2 is better than RoPE at 8 windows", partial(bytes_of, _X2_PLAIN, "b1-rope", 256), _BYTES),
        Claim("Real slow modes make RoPE better in the window", partial(bytes_of, "b1-rope real", "b1-rope"), _BYTES),
        Claim(_SAME, partial(bytes_of, "b1-rope real", "b1-rope", 256), _BYTES),
        Claim("Real slow modes make x2 better at 8 windows", partial(bytes_of, _X2_REAL, _X2_PLAIN, 256), _BYTES),
    ),
    "Text, small models that do not use their context": (
        Claim("Some model copies a tenth of what it could from half a window before", partial(copied, 0.1), _TEXT),
        Claim("m2 is better than RoPE in the window", partial(text, "m2-sc-rfa", "b1-rope", 128), _WINDOW),
        Claim("m3 is better than RoPE in the window", partial(text, "m3-sc-rfa", "b1-rope", 128), _WINDOW),
        Claim(
            "m2 is better than RoPE in the window, both as released",
            partial(text, _M2_RELEASED, "b1-rope-as-released", 128),
            _WINDOW,
        ),
        Claim("m2 is better than RoPE at 8 windows", partial(text, "m2-sc-rfa", "b1-rope", 1024), _BEYOND),
        Claim("m2 is better than ALiBi at 8 windows", partial(text, "m2-sc-rfa", "b2-alibi", 1024), _ALIBI),
        Claim("A Riccati prior (x2) is better than m2's", partial(text, _X2, "m2-sc-rfa", 128), _PRIOR),
        Claim("x2 is better than ALiBi at 8 windows", partial(text, _X2, "b2-alibi", 1024), _PRIOR),
        Claim("Content gains (x4) are better than a forget gate with RoPE", partial(text, _X4, _FOX, 128), _CONTROLS),
        Claim("A forget gate makes RoPE better", partial(text, _FOX, "b1-rope", 128), _CONTROLS),
        Claim("It is better than fixed slopes (c7)", partial(text, _FOX, "c7-rope-alibi-innovation", 128), _CONTROLS),
        Claim("The innovation step makes ALiBi better", partial(text, "c6-alibi-innovation", "b2-alibi", 128), _STEP),
        Claim("The innovation step makes RoPE better", partial(text, "c5-rope-innovation", "b1-rope", 128), _STEP),
        Claim(
            "Turned values make m2 better",
            partial(text, "m2-sc-rfa", "m2.4-no-value-rotation", 128),
            _VALUES,
        ),
    ),
    "Networks for irregular series (ratio of squared errors)": (
        Claim("Turned values make a forget gate better", partial(errors, "oscillator", "c9", _FOX_SERIES), _SERIES),
        Claim("The same on ETTh1", partial(errors, "etth1", "c9", _FOX_SERIES), _SERIES),
        Claim(
            "A time embedding makes ALiBi better than a seasonal naive forecast on ETTh1",
            partial(errors, "etth1", "ALiBi with time embedding", "seasonal naive", columns=_NO_SPIKES),
            _SERIES,
        ),
        Claim(
            "The same of GRU-D",
            partial(errors, "etth1", "GRU-D with time embedding", "seasonal naive", columns=_NO_SPIKES),
            _SERIES,
        ),
        Claim(
            "x2 without the innovation step is better than a seasonal mean on ETTh1",
            partial(errors, "etth1", "x2 no innovation", "seasonal mean", columns=_NO_SPIKES),
            _SERIES,
        ),
        Claim(
            "x2 is better than RoPE at four times the length",
            partial(errors, "oscillator", "x2", "RoPE", columns=("256 readings",)),
            _SERIES,
        ),
        Claim("x2 is better than the gate with turned values", partial(errors, "oscillator", "x2", "c9"), _SERIES),
        Claim(
            "x2 is within 5 % of WoLF, which knows the model, everywhere",
            partial(errors, "oscillator", "x2", _WOLF, aim=1.05, worst=True),
            _SERIES,
        ),
        Claim(
            "The same of the robust filter that knows the model, the best here",
            partial(errors, "oscillator", "x2", "robust", aim=1.05, worst=True),
            _SERIES,
        ),
        Claim(
            "x2 is within 5 % of WoLF for a tracker",
            partial(errors, "tracker", "x2", _WOLF, aim=1.05, columns=("trained",)),
            "series-record.md#tracker",
        ),
        Claim("The innovation step helps x2", partial(errors, "oscillator", "x2", "x2 no innovation"), _SERIES),
        Claim(
            "A robust weight helps where training had wrong readings",
            partial(errors, "contamination", "student-t", "dot product"),
            _ROBUST,
        ),
        Claim(
            "A robust weight helps forecasts where training had no wrong readings",
            partial(errors, "contamination", "student-t clean", "dot product clean", parts=("forecast",)),
            _ROBUST,
        ),
        Claim(
            "A robust weight helps at the readings where training had no wrong readings",
            partial(errors, "contamination", "student-t clean", "dot product clean", parts=("filter",)),
            _ROBUST,
        ),
    ),
    "Filters that are given the model (ratio of errors)": (
        Claim("At most 5 % above tuned robust filters", partial(filters, 1.05, _TUNED), _FILTERS),
        Claim(
            "At most 2 % above Kalman where errors are Gaussian",
            partial(filters, 1.02, ("Kalman",), ("Gaussian",)),
            _FILTERS,
        ),
    ),
    "Recall and state, at 8 times the trained length if nothing else is said (share of right answers)": (
        _in_recall("Real slow modes help RoPE", "recall", "b1-rope real", "b1-rope"),
        _in_recall(_BY_TIME, "recall by time", "b1-rope real", "b1-rope", later=True),
        _in_recall("Real slow modes help x2", "recall", f"{_X2_PLAIN} real", _X2_PLAIN),
        _in_recall("Real slow modes help c7", "recall", f"{_C7_PLAIN} real", _C7_PLAIN, later=True),
        _in_recall("Turned values help a forget gate", "recall", _X7, _FOX),
        *_clock("A content clock helps x2", _X5_PLAIN, _X2_PLAIN),
        *_clock("A forget gate from a content clock (c8) is better than `c4-fox` with RoPE", _C8, _FOX),
        _in_recall("The innovation step helps x2", "recall", _X2, _X2_PLAIN),
        _in_recall("x2 recalls more than ALiBi", "recall", _X2_PLAIN, "b2-alibi"),
        _in_recall("m2 recalls more than RoPE", "recall", "m2-sc-rfa", "b1-rope"),
        _in_recall(_BY_TIME, "recall by time", "m2-sc-rfa", "b1-rope", later=True),
        _in_recall(_CORRUPTED, "corrupted recall", "m2-sc-rfa", "b1-rope"),
        Claim("x2 learns recall from fewer tokens than RoPE", partial(learnt, "recall", _X2_PLAIN, "b1-rope"), _RECALL),
        Claim(
            "x2 learns it from fewer tokens with `taps`",
            partial(learnt, "recall", f"{_X2_PLAIN} taps", _X2_PLAIN),
            _RECALL,
            later=True,
        ),
        Claim(
            "The forget gate learns it from fewer tokens than RoPE",
            partial(learnt, "recall", _FOX, "b1-rope"),
            _RECALL,
            later=True,
        ),
    ),
    "The robust weight where nothing else differs (share of right answers, five seeds)": (
        *_weights(", keys corrupted in the test alone", "corrupted in the test"),
        *_weights(", keys corrupted in training too", "corrupted"),
        *_weights(", readings with errors of heavy tails", "heavy tails"),
        *_weights(" where a later statement of a key holds", "stale keys"),
    ),
    "Cost": (
        Claim("A training step takes less than twice RoPE's, on a CPU", partial(cost, 2.0, "bench.jsonl"), _SPEED),
        Claim("The same on one H200, in bfloat16", partial(cost, 2.0, "gpu.jsonl"), _SPEED),
    ),
}


def table() -> str:
    """The table of answers in Markdown, and the links of its last column. A group's name has a row of its own."""
    lines = ["| claim | answer | by how much | where |", "| --- | --- | --- | --- |"]
    links: dict[str, str] = {}
    for group, claims in CLAIMS.items():
        lines.append(f"| **{group}** | | | |")
        for claim in claims:
            found, page = claim.of(), claim.page.partition("#")[0]
            key = links.setdefault(claim.page, f"e{len(links) + 1}")
            words = f"{claim.words} {_LATER}" if claim.later else claim.words
            lines.append(f"| {words} | {found.answer} | {found.number} | [{_TITLES[page]}][{key}] |")
    return "\n".join([*lines, "", *(f"[{key}]: {page}" for page, key in links.items())])


def written(page: str) -> str:
    """The page with the table between its marks. Raises `ValueError` for a page without them."""
    return replace_between(page, _BEGIN, _END, f"\n{table()}\n")


def write() -> None:
    """Write the table into the page."""
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
