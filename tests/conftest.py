"""Holds in every test: NaN in uninitialised memory, a fixed seed, no hub, its own cache, Ctrl-C; in some, shapes."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path

import platformdirs

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are the threads
else:  # A cache of the session's own, which its workers share. The user's compiled kernels serve it.
    kernels = Path(os.environ.get("RFA_CACHE") or platformdirs.user_cache_dir("rfa"), "cpu").absolute()
    os.environ["RFA_CACHE"] = tempfile.mkdtemp(prefix="rfa-tests-")
    atexit.register(shutil.rmtree, os.environ["RFA_CACHE"], ignore_errors=True)
    kernels.mkdir(parents=True, exist_ok=True)
    Path(os.environ["RFA_CACHE"], "cpu").symlink_to(kernels)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; a console keeps what it finds at import
os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub at import, so it comes before every import below
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on CUDA

import jaxtyping
import pytest
import torch
from cover import ALL
from hypothesis import HealthCheck, settings

CHECKED = [
    "rfa.dynamics",
    "rfa.ops",
    "rfa.nn",
    "rfa.appendix",
    "rfa.estimation",
    "rfa.models.modeling",
    "rfa.models.attention",
]
CHECKED += ["rfa.models.decoder", "rfa.models.time_series"]
CHECKED += ["rfa.integrations.replace_attention"]
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")  # before rfa is imported
# Where shapes are checked: these call every annotated function of these; everywhere it takes half of all time.
SHAPES_CHECKED = ("rfa/dynamics/", "rfa/nn/", "rfa/ops/test_filter_attention_closed_forms")
SHAPES_CHECKED += ("rfa/estimation/test_stiff", "rfa/estimation/test_readings", "rfa/estimation/test_predict")
SHAPES_CHECKED += ("rfa/models/test_time_series",)
SHAPES_CHECKED += ("rfa/appendix/", "rfa/ops/test_content", "rfa/ops/test_routing")
SHAPES_CHECKED += ("test_architecture",)
SHAPES_CHECKED += ("rfa/integrations/test_replace_attention",)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, `pytest &`, starts deaf to it
settings.register_profile("rfa", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rfa")


def pytest_collection_modifyitems(config, items):
    """What is marked slow runs in `make test-all` alone."""
    late = [] if ALL else [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=late)
    items[:] = [item for item in items if item not in set(late)]


def pytest_collection_finish():
    """What is there now stays: a collection of garbage need not look through thousands of tests and of modules."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """As it was: nanobind, in triton, takes what stays for leaked, and says so at the exit."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item):
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    jaxtyping.config.update("jaxtyping_disable", not path.startswith(SHAPES_CHECKED))


def _repeatable():
    torch.use_deterministic_algorithms(True)  # an operation that is not repeatable raises
    torch.utils.deterministic.fill_uninitialized_memory = True  # torch.empty: NaN, or the largest integer
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _repeatable_session():
    """The same for fixtures wider than one test."""
    _repeatable()


@pytest.fixture(autouse=True)
def _repeatable_test():
    _repeatable()


@pytest.fixture
def rfa(monkeypatch, capsys, tmp_path):
    """Call a command; returns exit status, standard output and standard error."""
    from training.runs import command  # after the hook: it imports rfa

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return partial(command, monkeypatch, capsys)


@pytest.fixture
def rocm(monkeypatch):
    """A PyTorch built for ROCm, with a GPU, which it calls "cuda"."""
    from rfa.ops import backends

    monkeypatch.setattr(torch.version, "hip", "7.2.5")
    for name, answer in {"is_available": True, "device_count": 1, "get_device_name": "AMD Instinct MI300X"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "_missing", backends._missing.__wrapped__)  # it remembers this machine's answers
    monkeypatch.setattr(backends, "_warned", set())
