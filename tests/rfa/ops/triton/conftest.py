"""Without a GPU the kernels run under Triton's interpreter, which triton takes up when it is imported: here, once.

transformers and torch may have imported it already, for compiling. They keep what they have, and the tests get a
second, interpreted triton. Its extension module holds no such choice and cannot be loaded twice. What other tests see
of the environment stays as it was.
"""

import importlib.util
import sys

import pytest
import torch

from rfa.ops import backends

INTERPRETED = not torch.cuda.is_available()

if importlib.util.find_spec("triton") is not None:
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv("TRITON_INTERPRET", "1")
            for name in [n for n in sys.modules if n.split(".")[0] == "triton" and not n.startswith("triton._C")]:
                del sys.modules[name]
        from rfa.ops.triton import (
            operator,  # noqa: F401
            pairs_operator,  # noqa: F401
            pairs_prior,  # noqa: F401
        )


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """Parts of triton are imported at the first launch. The interpreter counts as a device, for these tests alone."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    backends._missing.cache_clear()
    yield
    backends._missing.cache_clear()
