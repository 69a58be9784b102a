"""The paper's figures: in the package, and as the tables are."""

from rfa.models import PRESETS
from rfa.report.published import published_results


def test_published_results():
    published = published_results()
    assert "Racioppo" in published["source"]
    assert published["lengths"] == [512, 1024, 2048, 4096]
    tables = [published[name] for name in ("wikitext-103", "babylm-2025-strict", "wikitext-103-damping")]
    assert [len(table) for table in tables] == [13, 5, 5]
    assert all(len(row) == 4 and all(10 < figure < 500 for figure in row) for table in tables for row in table.values())
    assert {*tables[0], *tables[1]} <= set(PRESETS)
    # the sweep repeats rows of table 1
    assert tables[2]["0.05"] == tables[0]["m2-sc-rfa"]
    assert tables[2]["5.0"] == tables[0]["m3-sc-rfa"]
