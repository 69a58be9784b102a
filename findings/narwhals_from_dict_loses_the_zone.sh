#!/usr/bin/env bash
# `narwhals.from_dict(..., backend="pandas")` loses the zone of dates: they become UTC without one, an hour or two off.
# Exits with 0 while this is seen, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'narwhals==2.29.0' 'pandas==3.1.1'
"$folder/venv/bin/python" - <<'PY'
import sys

import narwhals as nw
import pandas as pd

print("narwhals", nw.__version__, "pandas", pd.__version__)
days = pd.Series(pd.date_range("2024-03-31", periods=2, tz="Europe/Berlin"), name="ds")
column = nw.from_native(days, series_only=True)
tables = {
    "from_dict with backend": nw.from_dict({"ds": column}, backend="pandas"),
    "from_dict": nw.from_dict({"ds": column}),
    "to_frame().with_columns()": column.to_frame().with_columns(column.alias("other")),
}
seen = {way: table.to_native()["ds"] for way, table in tables.items()}
for way, found in seen.items():
    print(f"{way}: expected {days[1]}, seen {found[1]}")
print("the way: no backend where the columns are of narwhals already, or first.to_frame().with_columns(*others)")
sys.exit(0 if [way for way in seen if not seen[way].equals(days)] == ["from_dict with backend"] else 1)
PY
