"""Holds in every test: checked shapes, NaN in uninitialised memory, a fixed seed, no hub, its own cache, Ctrl-C."""

import atexit
import os
import shutil
import signal
import tempfile
from functools import partial

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are the threads
else:  # of all workers, too: collecting the tests compiles the kernels
    os.environ["RFA_CACHE"] = tempfile.mkdtemp(prefix="rfa-tests-")
    atexit.register(shutil.rmtree, os.environ["RFA_CACHE"], ignore_errors=True)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; a console keeps what it finds at import
os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub at import, so it comes before every import below
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on CUDA

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

install_import_hook(["rfa.dynamics", "rfa.ops", "rfa.nn"], "beartype.beartype")  # before rfa is imported

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, `pytest &`, starts deaf to it
settings.register_profile("rfa", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rfa")


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
