import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfa_lab.data import Document, fingerprint, text_document
from rfa_lab.data.documents import file_document, part_of


def chopped(data: bytes, size: int) -> Document:
    return Document("doc", len(data), lambda: (data[i : i + size] for i in range(0, len(data), size)))


@given(st.text(), st.integers(1, 5))
def test_text_survives_chunks_cut_inside_characters(text, size):
    assert chopped(text.encode(), size).read() == text


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("data", "byte"), [("é€x".encode() + b"\xff" + b"abc", 6), ("ab€".encode()[:-1], 2)])
def test_bad_byte_is_named_by_document_and_offset(data, byte, size):
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
