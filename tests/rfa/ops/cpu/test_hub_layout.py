"""`packaging/hub_kernel.py`: the operator as a kernel of the Hugging Face `kernels` library, imported from a path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import ROOT, script

import rfa
from rfa.ops.cpu import build
from rfa.ops.cpu.build import instruction_sets
from rfa.ops.cpu.compiler import TARGETS

from ..problems import problem

# As the library imports it, in a process without this package and what a kernel may not need.
LOADED = """
import importlib.util, json, sys
sys.modules.update(dict.fromkeys(["rfa", "jaxtyping", "platformdirs"]))
from pathlib import Path
import torch
variant = Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / sys.argv[2])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
given = torch.load(sys.argv[3])
given["query"].requires_grad_()
found = module.robust_filter_attention(**given, backend="cpu")
found.square().sum().backward()
torch.save((found.detach(), given["query"].grad), sys.argv[3])
print(name, *[space for space in dir(torch.ops) if "rfa" in space])
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """The layout, with the session's kernels for this processor."""
    target = next(name for name, sets in TARGETS.items() if set(instruction_sets().split()).issuperset(sets))
    libraries = {target: build.compiled_library().read_bytes()}
    return script("packaging/hub_kernel.py").write_layout(tmp_path_factory.mktemp("hub"), libraries)


def test_loaded_from_its_path_it_is_the_same_operator(variant, tmp_path):
    """Alone: without this package, under a name and with operators of its own."""
    given = problem(0, dtype=torch.float32)
    torch.save(given, tmp_path / "given.pt")
    command = [sys.executable, "-B", "-c", LOADED, variant, "__init__.py", tmp_path / "given.pt"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "CXX": "no"}, check=False)
    assert done.returncode == 0, done.stderr
    name, *spaces = done.stdout.split()
    assert name.startswith("_rfa_attention_cpu_")
    assert spaces == [name]
    found, gradient = torch.load(tmp_path / "given.pt")
    query = given["query"].requires_grad_()
    expected = rfa.robust_filter_attention(**given, backend="cpu")
    expected.square().sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(gradient, query.grad)


def test_the_library_finds_it_and_its_digests(variant, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kernels = pytest.importorskip("kernels", reason="of Hugging Face, from PyPI")
    if not hasattr(kernels, "get_local_kernel"):
        pytest.skip("the folder of this repository, not the library")
    metadata = kernels._rust.Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(kernels._rust.Digest.hash_variant(metadata.digest.algorithm, variant))  # or raises
    module = kernels.get_local_kernel(variant.parents[1], backend="cpu")
    given = problem(1, dtype=torch.float32)
    found = module.robust_filter_attention(**given)
    assert torch.equal(found, rfa.robust_filter_attention(**given))
    assert Path(module.__file__).parent == variant


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("", "rfa: no C++ compiler: got no-compiler-of-this-name; "),
        (
            "platform.system, platform.machine = lambda: 'Darwin', lambda: 'arm64'",
            "rfa: got Darwin on arm64, expected Linux",
        ),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(tmp_path, machine, said):
    program = f"import platform, runpy, sys\n{machine}\nrunpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", program, ROOT / "packaging" / "hub_kernel.py", tmp_path / "out"]
    environment = {**os.environ, "CXX": "no-compiler-of-this-name"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr.count("\n"), done.stderr[: len(said)]) == (2, 1, said)
    assert not (tmp_path / "out").exists()
