#!/usr/bin/env bash
# pandas reads decimals of ISO 8601 durations wrongly and takes months for minutes: `PT0.5H` is five hours.
# Exits with 0 while this is seen, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'pandas==3.1.1'
"$folder/venv/bin/python" - <<'PY'
import sys

import pandas as pd

print("pandas", pd.__version__)
expected = {"PT0.5H": "0 days 00:30:00", "PT1.5H": "0 days 01:30:00", "P0.5D": "0 days 12:00:00", "P1M": "an error"}
seen = 0
for given, most_expect in expected.items():
    try:
        found = str(pd.Timedelta(given))
    except ValueError:
        found = "an error"
    print(f"Timedelta({given!r}): most expect {most_expect}, seen {found}")
    seen += found != most_expect
print("the way: read the parts with a regular expression, or write whole units (PT30M)")
sys.exit(0 if seen == len(expected) else 1)
PY
