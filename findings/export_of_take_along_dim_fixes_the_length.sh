#!/usr/bin/env bash
# PyTorch: torch.export with a dynamic length refuses take_along_dim, which torch.gather with the same index serves.
# Expected by most: the same, since the two compute the same. Seen: the length is specialised to that of the example.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
"$place/venv/bin/python" - <<'P'
import sys

import torch
from torch.export import Dim, export

print("torch", torch.__version__)


class Sorted(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return self.by(x, x.argsort(-1))


WAYS = {
    "gather": lambda x, index: x.gather(-1, index),
    "take_along_dim": lambda x, index: torch.take_along_dim(x, index, dim=-1),
}
serves = {}
for name, by in WAYS.items():
    try:
        program = export(Sorted(by), (torch.rand(2, 9),), dynamic_shapes={"x": {1: Dim("length")}}).module()
        serves[name] = program(torch.rand(2, 20)).shape == (2, 20)
    except Exception as error:
        serves[name] = False
        print(name, "refused:", [line for line in str(error).splitlines() if "specialized" in line or "Guard" in line][:1])
print("serves other lengths:", serves)
sys.exit(serves != {"gather": True, "take_along_dim": False})
P
