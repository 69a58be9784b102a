"""What the documentation says of stored results is what they say."""

from scripts import script


def test_the_replications_table_is_that_of_the_record():
    module = script("docs/replication_table.py")
    page = module.PAGE.read_text(encoding="utf-8")
    assert "<!-- docs/replication_table.py -->" in page
    assert module.written(page) == page, "run python docs/replication_table.py"
