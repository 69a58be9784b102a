"""The paper's figures: in the package, and as the tables are."""

import hashlib
import json

from rfa.models import PRESETS
from rfa.report.published import published_results

CHECKED = "f0cb46312f8b105c29726344175e875924d6491121bc090cdec0aff1634f17cf"  # against the paper's tables 1 to 3


def test_no_figure_has_changed_since_they_were_checked():
    published = published_results()
    figures = {name: published[name] for name in published if name not in ("source", "note")}
    assert hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest() == CHECKED


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
