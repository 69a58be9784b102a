"""The figures that the paper prints, to stand beside ours."""

import json
from importlib.resources import files
from typing import Any


def published_results() -> dict[str, Any]:
    """Test perplexities of the paper's tables 1 to 3, each a list over `lengths`.

    Returns:
        `source`, `note`, `lengths`, and by preset `wikitext-103` and `babylm-2025-strict`, by damping
        `wikitext-103-damping`.
    """
    return json.loads(files("rfa.report").joinpath("published.json").read_text(encoding="utf-8"))
