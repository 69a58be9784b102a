"""What the documentation says of stored results is what they say."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_replications_table_is_that_of_the_record():
    spec = importlib.util.spec_from_file_location("replication_table", DOCS / "replication_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert "<!-- docs/replication_table.py -->" in page
    assert module.written(page) == page, "run python docs/replication_table.py"
