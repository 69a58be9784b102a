"""What `import rfa` loads, what works without optional libraries, and how a missing one is named."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cover import slow

import rfa_lab
from rfa.checks import EXTRAS, MissingExtra, install_command, needs

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
BLOCKED = "import sys; sys.modules.update(dict.fromkeys({names!r}));"


def python(program, *arguments):
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def lines(program, *arguments):
    done = python(program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_loads_the_standard_library_alone():
    """So it costs milliseconds over `import torch`; every public name is there, and a misspelt one is not."""
    program = (
        "import sys; before = set(sys.modules); import rfa\n"
        "tops = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(tops - {'rfa'} - set(sys.stdlib_module_names)))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('rfa.')))\n"
        "rfa.robust_filter_attention, rfa.ops; print(*sorted({'transformers', 'torch._dynamo'} & set(sys.modules)))\n"
        "print(set(rfa.__all__) <= set(dir(rfa)))\n"
        "print(hasattr(rfa, 'misspelt'))"
    )
    assert lines(program) == ["", "rfa.checks rfa.version", "", "True", "False"]


@pytest.mark.parametrize(
    "imports", ["import rfa; from transformers import AutoConfig", "from transformers import AutoConfig; import rfa"]
)
def test_transformers_knows_the_model_in_any_order_of_imports(imports, tmp_path):
    program = (
        f"import sys; {imports}; print('rfa.models' in sys.modules)\n"
        "from transformers import AutoModel, AutoModelForCausalLM\n"
        f"config = AutoConfig.for_model('rfa', hidden_size=16, num_hidden_layers=1, num_attention_heads=2)\n"
        "config.save_pretrained(sys.argv[1]); config = AutoConfig.from_pretrained(sys.argv[1])\n"
        "print(type(AutoModelForCausalLM.from_config(config)).__module__, type(AutoModel.from_config(config)).__name__)"
    )
    assert lines(program, tmp_path) == ["False", "rfa.models.modeling RFAModel"]


def test_operator_and_layer_work_without_optional_libraries():
    """All libraries of all extras are blocked."""
    program = BLOCKED.format(names=sorted(EXTRAS)) + (
        "import torch, rfa\n"
        "from rfa.nn import RobustFilterAttention\n"
        "x = torch.randn(2, 5, 16, requires_grad=True)\n"
        "layer = RobustFilterAttention(16, 2); layer(x).square().sum().backward()\n"
        "print(bool(x.grad.abs().sum() > 0))\n"
        "q = torch.randn(1, 2, 5, 16, requires_grad=True)\n"
        "given = layer.dynamics(); print(q.shape == rfa.robust_filter_attention(q, q, q, **given).shape)\n"
        "from rfa.estimation import LinearSDE, robust_estimate\n"
        "for name in 'models', 'parallel':\n"
        "    try: getattr(rfa, name)\n"
        "    except AttributeError as error: print(error)\n"
        "try: from rfa import RFAConfig\n"
        "except ImportError as error: print(error)\n"
        "try: rfa.nn.FilterCache()\n"
        "except ImportError as error: print(error)\n"
    )
    missing = f"transformers is not installed: {install_command('hf')}"
    assert lines(program) == ["True", "True", *[missing] * 4]


@pytest.mark.parametrize("absent", [("transformers",), *(pytest.param(each, marks=slow) for each in ((), ("pandas",)))])
def test_what_a_light_install_names_it_can_load(absent):
    """As tools ask for names: a star import, `inspect`, `hasattr`."""
    program = BLOCKED.format(names=absent) + (
        "import inspect, rfa\n"
        "from rfa import *\n"
        "print(set(dir(rfa)) >= set(rfa.__all__), {*rfa.__all__} <= {*globals()}, len(inspect.getmembers(rfa)) > 5)\n"
        "print(*(hasattr(rfa, name) for name in ('models', 'forecasting', 'nn')), len(rfa.__all__))"
    )
    there = {(): "True True True 14", ("transformers",): "False True True 9", ("pandas",): "True False True 13"}
    assert lines(program) == ["True True True", there[absent]]


@pytest.mark.parametrize(
    ("absent", "extra", "arguments"), [("typer", "lab", "--help"), ("transformers", "hf", "doctor")]
)
def test_a_command_names_the_extra_that_it_lacks(absent, extra, arguments):
    program = BLOCKED.format(names=[absent]) + "from rfa_lab.__main__ import main; sys.argv[0] = 'rfa'; main()"
    done = python(program, *arguments.split())
    says = f"rfa: {absent} is not installed: {install_command(extra)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_a_running_command_names_the_extra_that_it_lacks(rfa, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    says = "rfa: datasets is not installed: pip install -e '.[lab]' in a clone of robust-filter-attention, "
    says += "or pip install 'FILE.whl[lab]' with a wheel\n"
    assert rfa("train", "--data", "wikitext-103", "--out", "run") == (2, "", says)


def test_each_optional_library_has_its_extra(monkeypatch):
    """The table of `rfa.checks` is that of pyproject.toml; `all` has all extras that need no older library."""
    extras = PROJECT["optional-dependencies"]
    distribution = {"yaml": "pyyaml"}
    for module, extra in EXTRAS.items():
        name = distribution.get(module, module.replace("_", "-"))
        assert any(line.startswith(f"{name}>=") for line in extras[extra]), (module, extra)
        assert not any(line.startswith(f"{name}>=") for line in PROJECT["dependencies"]), module
    assert extras["all"] == ["robust-filter-attention[lab]"]
    own = {module for module, extra in EXTRAS.items() if extra not in ("hf", "series", "lab")}
    needs(*EXTRAS.keys() - own)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(MissingExtra, match="rich is not installed"):
        needs(*EXTRAS.keys() - own)


def test_ctrl_c_while_libraries_are_imported(tmp_path, monkeypatch):
    """One line from what an installed `rfa` calls, whatever the library that is being imported makes of it."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(rfa_lab.__file__).parents[1]}")
    module, function = PROJECT["scripts"]["rfa"].split(":")
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    done = python(f"{program}from {module} import {function}; sys.exit({function}())", "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rfa: stopped\n")


def test_python_m_rfa_is_the_command():
    done = subprocess.run([sys.executable, "-m", "rfa", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--install-completion" in done.stdout
    assert "Start with: rfa demo" in done.stdout
