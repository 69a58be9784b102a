import regex
from hypothesis import example, given
from hypothesis import strategies as st

from rfa.data import Document
from rfa.data.pieces import pieces

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
AWKWARD = st.text(st.sampled_from("ab1.'s \n\t\r\x0b\x1c\x85\xa0\u2003\u3000é字🙂"), max_size=60)


def cut(text: str, size: int) -> list[str]:
    data = text.encode()
    document = Document("d", len(data), lambda: (data[i : i + size] for i in range(0, len(data), size)))
    parts = list(pieces(document))
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


def test_text_without_a_boundary_stays_whole():
    assert cut("a" * 1000, 10) == ["a" * 1000]
    assert cut(" " * 1000, 10) == [" " * 1000]
