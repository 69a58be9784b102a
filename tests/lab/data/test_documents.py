"""Documents read in chunks, and fragments whose tokens are those of the whole."""

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from rfa_lab.data import Document, fingerprint, text_document
from rfa_lab.data.documents import file_document, part_of, text_fragments


def chopped(data: bytes, size: int) -> Document:
    return Document("doc", len(data), lambda: (data[i : i + size] for i in range(0, len(data), size)))


@given(st.text(), st.integers(1, 5))
def test_text_survives_chunks_cut_inside_characters(text, size):
    assert chopped(text.encode(), size).read() == text


def test_bad_byte_is_named_by_document_and_offset():
    for data, byte, size in (("é€x".encode() + b"\xff" + b"abc", 6, 1), ("ab€".encode()[:-1], 2, 3)):
        with pytest.raises(ValueError, match=rf"'doc' with byte 0x\w\w at offset {byte}, expected UTF-8"):
            chopped(data, size).read()


def test_file_and_its_parts(tmp_path):
    data = bytes(range(65, 91)) * 10_000
    (tmp_path / "a.txt").write_bytes(data)
    document = file_document(tmp_path / "a.txt", "a.txt")
    assert document.size == len(data)
    assert document.read().encode() == data
    part = part_of(document, 65_530, 200_001)
    assert part.read().encode() == data[65_530:200_001]
    assert part.size == 200_001 - 65_530


def test_fingerprint_depends_on_bytes_order_and_cuts():
    documents = [text_document("a", "one"), text_document("b", "two")]
    same = [text_document("other", "one"), text_document("name", "two")]
    assert fingerprint(documents) == fingerprint(same)
    others = [documents[::-1], [text_document("a", "onetwo")], [text_document("a", "on"), text_document("b", "etwo")]]
    assert len({fingerprint(d) for d in [documents, *others]}) == 4


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


def test_text_without_a_boundary_stays_whole():
    for text in ("a", " ", "7", "-", "'", "e\u0301", "🙂"):
        assert cut(1000 * text, 10) == [1000 * text]
        assert max(map(len, cut(1000 * text, 10, anywhere=True))) <= 13


def test_a_word_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("rfa_lab.data.documents.LONGEST", 1000)
    assert len("".join(cut("some words " + 1000 * "a" + " b", 100))) == 1013
    with pytest.raises(ValueError, match=r"text: got 'd' with one word of more than 1,000 characters from .* 10 on"):
        cut("some words " + 1001 * "a", 100)
    assert "".join(cut(5000 * "a", 100, anywhere=True)) == 5000 * "a"
