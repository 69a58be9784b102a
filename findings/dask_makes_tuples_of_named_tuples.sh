#!/usr/bin/env bash
# Dask infers the columns of `map_partitions` with plain tuples for named ones: a function that reads `names.id` fails.
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


table = dd.from_pandas(pd.DataFrame({"id": [1, 2]}), npartitions=1)
seen = {}
for way in ("an argument", "functools.partial", "an argument beside meta="):
    types = seen[way] = []

    def noting(frame, names, types=types):
        types.append(type(names).__name__)
        return frame

    if way == "functools.partial":
        found = table.map_partitions(partial(noting, names=Names("id")))
    else:
        found = table.map_partitions(noting, Names("id"), **({"meta": {"id": "int64"}} if "meta" in way else {}))
    found.compute(scheduler="synchronous")
    print(f"{way}: expected Names at each call, seen {types}")
print("the way: functools.partial, or meta=")
sys.exit(0 if "tuple" in seen["an argument"] and {*seen["functools.partial"]} == {"Names"} else 1)
PY
