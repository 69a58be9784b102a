"""The table of docs/replication.md from the record in results/: `python docs/replication_table.py`."""

import re
from collections.abc import Callable
from pathlib import Path

from rfa.report.folder import read_planned, read_results
from rfa.report.layout import Cell, Number, Table, markdown
from rfa.report.runs import Run, by_label, perplexity_by_length
from rfa.report.statistics import mean_and_error

PAGE = Path(__file__).with_name("replication.md")
RECORD = Path(__file__).parents[1] / "results" / "novels-small"


def table(record: Path) -> Table:
    """Test perplexity by both protocols, and validation perplexity at the end of training, of every model."""
    groups, planned = by_label(read_results(record).runs), read_planned(record)
    lengths = sorted(perplexity_by_length(next(iter(groups.values()))[0], "blocks"))

    def reader(protocol: str, length: int) -> Callable[[Run], float]:
        return lambda run: perplexity_by_length(run, protocol)[length]

    read = {
        **{f"{name} {length}": reader(name, length) for name in ("blocks", "matched") for length in lengths},
        "validation": lambda run: run["training"]["valid_perplexity"],
    }
    rows: list[tuple[Cell, ...]] = []
    for label, runs in groups.items():
        means = (mean_and_error([value(run) for run in runs]) for value in read.values())
        rows.append((label, f"{len(runs)}", *(Number(mean.value, mean.error, digits=1) for mean in means)))
    done, of = sum(map(len, groups.values())), len(planned["runs"]) if planned else 0
    caption = f"Test perplexity, mean ± standard error over seeds; {done} of {of} runs are done."
    return Table("replication", caption, ("model", "seeds", *read), tuple(rows))


def written(page: str, record: Path = RECORD) -> str:
    """The page with the record's table between its two marks."""
    marks = re.compile(r"(<!-- docs/replication_table.py -->\n).*?(<!-- end -->)", re.DOTALL)
    return marks.sub(lambda found: found[1] + markdown(table(record)) + "\n" + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
