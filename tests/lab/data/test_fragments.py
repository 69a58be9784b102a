import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from rfa_lab.data import Document
from rfa_lab.data.fragments import text_fragments

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
AWKWARD = st.text(st.sampled_from("ab1.'s、\u0301 \n\t\r\x0b\x1c\x85\xa0\u2003\u3000é字🙂"), max_size=60)


def cut(text: str, size: int, anywhere: bool = False) -> list[str]:
    data = text.encode()
    document = Document("d", len(data), lambda: (data[i : i + size] for i in range(0, len(data), size)))
    parts = list(text_fragments(document, anywhere))
    assert [is_last for _, is_last in parts] == [False] * (len(parts) - 1) + [True]
    return [part for part, _ in parts]


@given(AWKWARD | st.text(), st.integers(1, 20))
@example("it 's  a\n\n b \n c", 1)
def test_words_of_pieces_are_words_of_the_whole(text, size):
    parts = cut(text, size)
    assert "".join(parts) == text
    assert [word for part in parts for word in GPT2.findall(part)] == GPT2.findall(text)


def test_ordinary_text_is_cut_finely():
    text = "some words and a line\n" * 1000
    assert max(map(len, cut(text, 100))) < 110


@given(AWKWARD.map(lambda text: "".join(text.split())), st.integers(1, 20))
@example("a'sa's1'1's字、字", 1)
def test_text_without_spaces_too(text, size):
    test_words_of_pieces_are_words_of_the_whole.hypothesis.inner_test(text, size)


@pytest.mark.parametrize("text", ["字典、人一。", "ab1,", "x=1;y(2)", "e3b0c44298fc1c"])
def test_text_without_spaces_is_cut_where_kinds_of_characters_meet(text):
    assert max(map(len, cut(500 * text, 100))) < 110


def test_text_without_a_boundary_stays_whole():
    for text in ("a", " ", "7", "-", "'", "e\u0301", "🙂"):
        assert cut(1000 * text, 10) == [1000 * text]
        assert max(map(len, cut(1000 * text, 10, anywhere=True))) <= 13


def test_a_word_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("rfa_lab.data.fragments.LONGEST", 1000)
    assert len("".join(cut("some words " + 1000 * "a" + " b", 100))) == 1013
    with pytest.raises(ValueError, match=r"text: got 'd' with one word of more than 1,000 characters from .* 10 on"):
        cut("some words " + 1001 * "a", 100)
    assert "".join(cut(5000 * "a", 100, anywhere=True)) == 5000 * "a"
