"""What the documentation says of stored results is what they say."""

from scripts import script


def test_the_replications_tables_are_those_of_the_record():
    module = script("docs/replication_tables.py")
    page = module.PAGE.read_text(encoding="utf-8")
    for table in ("perplexities", "differences"):
        assert f"<!-- {table}: docs/replication_tables.py -->" in page
    assert module.written(page) == page, "run python docs/replication_tables.py"
