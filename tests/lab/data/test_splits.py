import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfa_lab.data import text_document
from rfa_lab.data.splits import by_author, by_file, by_position


def named(names):
    return [text_document(name, f"text of {name}") for name in names]


def names(documents):
    return [document.name for document in documents]


@given(st.integers(3, 300))
def test_by_file_is_a_partition_in_order_with_no_empty_split(count):
    documents = named(f"{i:03}.txt" for i in range(count))
    splits = by_file(documents)
    assert sorted(name for split in splits.values() for name in names(split)) == names(documents)
    assert all(names(split) == sorted(names(split)) for split in splits.values())
    held_out = max(1, round(0.05 * count))
    assert [len(splits[split]) for split in ("valid", "test")] == [held_out, held_out]


def test_by_author_keeps_authors_together():
    documents = named(f"{author}_{book}.txt" for author in "ABCDEFG" for book in range(5))
    splits = by_author(documents)
    authors = {split: {name[0] for name in names(part)} for split, part in splits.items()}
    assert sum(len(part) for part in splits.values()) == len(documents)
    assert [len(authors[split]) for split in ("train", "valid", "test")] == [5, 1, 1]
    assert set.union(*authors.values()) == set("ABCDEFG")


def test_authors_by_name():
    documents = named(["sub/Poe_x.txt", "Woolf_y.txt", "Ford_z.txt", "Anon.txt"])
    splits = by_author(documents, "test=Woolf, Anon;valid=Ford")
    assert {split: names(part) for split, part in splits.items()} == {
        "train": ["sub/Poe_x.txt"],
        "valid": ["Ford_z.txt"],
        "test": ["Woolf_y.txt", "Anon.txt"],
    }


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("test=Joyce", "unknown author 'Joyce', expected some of A, B, C"),
        ("test=A;valid=A", "author 'A' twice"),
        ("exam=A", "got 'exam=A'"),
        ("A,B", "got 'A,B'"),
        ("test=", "got 'test=' without a name"),
    ],
)
def test_bad_assignments(assignment, message):
    with pytest.raises(ValueError, match=message):
        by_author(named(["A_1.txt", "B_1.txt", "C_1.txt"]), assignment)


@pytest.mark.parametrize("unit", ["a line of text\n", "words and words ", "字", "é"])
def test_by_position_is_a_partition_near_90_5_5(unit):
    text = unit * 2_000
    splits = by_position([text_document("a", text)])
    parts = [part[0].read() for part in splits.values()]
    assert "".join(parts) == text
    assert [len(part) / len(text) for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.01)
    assert all(part.endswith(unit[-1]) for part in parts)


@given(st.text())
def test_by_position_is_a_partition_of_any_text(text):
    splits = by_position([text_document("a", text)])
    assert "".join(part[0].read() for part in splits.values() if part) == text
