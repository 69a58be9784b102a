#!/usr/bin/env bash
# Dask hands a named tuple that is an argument of `map_partitions` over as a plain tuple: its fields have no names.
# Exits with 0 while this is seen, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'dask[dataframe]==2026.8.0' 'pandas==2.3.3'
"$folder/venv/bin/python" - <<'PY'
import sys
from functools import partial
from typing import NamedTuple

import dask
import dask.dataframe as dd
import pandas as pd

print("dask", dask.__version__, "pandas", pd.__version__)


class Names(NamedTuple):
    id: str


def with_type(frame, names):
    return frame.assign(kind=type(names).__name__)


table = dd.from_pandas(pd.DataFrame({"id": [1, 2]}), npartitions=1)
meta = {"id": "int64", "kind": "string"}
ways = {
    "an argument": table.map_partitions(with_type, Names("id"), meta=meta),
    "an argument by keyword": table.map_partitions(with_type, names=Names("id"), meta=meta),
    "functools.partial": table.map_partitions(partial(with_type, names=Names("id")), meta=meta),
}
seen = {way: found.compute(scheduler="synchronous")["kind"].iloc[0] for way, found in ways.items()}
for way, kind in seen.items():
    print(f"{way}: expected Names, seen {kind}")
print("the way: functools.partial, which Dask does not look into")
sys.exit(0 if seen["an argument"] == "tuple" and seen["functools.partial"] == "Names" else 1)
PY
