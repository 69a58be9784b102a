"""`--dry-run` before the text is read."""

from pathlib import Path

from rfa_lab.recipes import load_recipe, states

SHIPPED = Path(__file__).parents[3] / "recipes"


def test_epochs_before_the_text_is_read(tmp_path, out):
    """As the paper's: 15 passes over 117,351,000 tokens in 214,875 steps."""
    planned = load_recipe(SHIPPED / "table1-wikitext103.yaml")
    first = states(planned, out, ["b1-rope-seed0"])[0]
    assert first.steps == 214_875
    assert first.tokens == 214_875 * 16 * 512
    assert first.seconds is None  # no run has told the speed
