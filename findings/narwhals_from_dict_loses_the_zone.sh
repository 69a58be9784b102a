#!/usr/bin/env bash
# `narwhals.from_dict` of columns of pandas loses the zone of dates: they become UTC without one, an hour or two off.
# Exits with 0 while this is seen, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'narwhals==2.29.0' 'pandas==3.1.1' 'polars==2.1.0' 'tzdata'
"$folder/venv/bin/python" - <<'PY'
import sys

import narwhals as nw
import pandas as pd
import polars as pl

print("narwhals", nw.__version__, "pandas", pd.__version__, "polars", pl.__version__)
days = pd.Series(pd.date_range("2024-03-31", periods=2, tz="Europe/Berlin"), name="ds")
lost = {}
for library, column in {"pandas": days, "polars": pl.Series("ds", days.dt.to_pydatetime().tolist())}.items():
    given = nw.from_native(column, series_only=True)
    ways = {
        "from_dict({'ds': column})": nw.from_dict({"ds": given}),
        "column.to_frame()": given.to_frame(),
    }
    for way, table in ways.items():
        lost[library, way] = table["ds"].dtype != given.dtype
        print(f"{library}, {way}: expected {given.dtype}, seen {table['ds'].dtype}")
print("the way: first.to_frame().with_columns(*others)")
sys.exit(0 if [key for key in lost if lost[key]] == [("pandas", "from_dict({'ds': column})")] else 1)
PY
