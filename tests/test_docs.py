"""What the documentation says of stored results is what they say."""

import re
from pathlib import Path

import pytest
from scripts import script

README = Path(__file__).parents[1] / "README.md"


def test_the_replications_tables_are_those_of_the_record():
    module = script("docs/replication_tables.py")
    page = module.PAGE.read_text(encoding="utf-8")
    for table in ("perplexities", "differences"):
        assert f"<!-- {table}: docs/replication_tables.py -->" in page
    assert module.written(page) == page, "run python docs/replication_tables.py"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL))
def test_the_examples_of_the_readme_run(block):
    exec(compile(block, str(README), "exec"), {})


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 120
    for target in re.findall(r"\]\(([^)#:]+)", text):
        assert (README.parent / target).exists(), target
