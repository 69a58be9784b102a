"""Which backend runs, which refuses what, and what is said where one is missing."""

import pytest
import torch

from rfa.ops import available_backends, robust_filter_attention
from rfa.ops.backends import choose_backend, missing
from rfa.ops.cpu.build import BuildError, find_compiler
from rfa.ops.kernel import TRITON_CHANNELS

from .problems import problem


def with_compiler():
    try:
        return bool(find_compiler())
    except BuildError:
        return False


def test_the_cpu_backend_is_there_wherever_a_compiler_is():
    """Kernels that no longer compile must not pass as a machine without a compiler."""
    assert (missing("cpu") is None) == with_compiler()
    assert available_backends()[-1] == "reference"


@pytest.mark.skipif(not with_compiler(), reason="no C++ compiler")
def test_auto_takes_the_kernels():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert choose_backend("auto", "cpu", dtype, (6, 6)) == "cpu"
        inputs = problem(0, dtype=dtype)
        assert torch.equal(robust_filter_attention(**inputs), robust_filter_attention(**inputs, backend="cpu"))


def test_auto_takes_the_reference_for_float64_and_other_devices():
    assert choose_backend("auto", "cpu", torch.float64, (6, 6)) == "reference"
    assert choose_backend("auto", "meta", torch.float32, (6, 6)) == "reference"
    inputs = problem(0)
    assert torch.equal(robust_filter_attention(**inputs), robust_filter_attention(**inputs, backend="reference"))


@pytest.mark.skipif(not with_compiler(), reason="no C++ compiler")
def test_a_named_backend_refuses_what_it_does_not_serve():
    """`ValueError` with what was given and what is supported."""
    with pytest.raises(ValueError, match=r"backend: .*'cpu'.*float64.*expected.*float32.*bfloat16.*float16"):
        robust_filter_attention(**problem(0), backend="cpu")
    on_meta = {n: x.to("meta") for n, x in problem(0, dtype=torch.float32).items()}
    with pytest.raises(ValueError, match=r"backend: .*'cpu'.*meta.*expected cpu"):
        choose_backend("cpu", on_meta["query"].device, torch.float32, (6, 6))


def test_an_export_to_onnx_takes_the_reference(monkeypatch):
    monkeypatch.setattr("rfa.ops.backends._to_onnx", lambda: True)
    assert choose_backend("auto", "cpu", torch.float32, (6, 6)) == "reference"
    with pytest.raises(ValueError, match=r"backend: got 'cpu' in an export to ONNX, expected 'auto' or 'reference'"):
        choose_backend("cpu", "cpu", torch.float32, (6, 6))


def test_triton_refuses_what_it_does_not_serve(monkeypatch):
    """Whether or not it can run here, it never falls back."""
    monkeypatch.setattr("rfa.ops.backends.missing", lambda name: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device, dtype, channels, words in (
        ("cpu", torch.float32, 64, "on cpu, expected cuda"),
        ("cuda", torch.float64, 64, "float64, expected one of .*bfloat16"),
        ("cuda", torch.float32, 48, "48 channels a head, expected one of 16, 32, 64, 128"),
    ):
        with pytest.raises(ValueError, match=words):
            choose_backend("triton", device, dtype, (64, channels))
        assert choose_backend("auto", device, dtype, (64, channels)) != "triton"
    for channels in TRITON_CHANNELS:
        assert choose_backend("auto", "cuda", torch.bfloat16, (channels, channels)) == "triton"


@pytest.mark.usefixtures("rocm")
def test_a_rocm_build_has_no_cuda_device():
    """The kernels cannot be compiled there; the reference serves it, with one warning."""
    assert "triton" not in available_backends()
    with pytest.warns(UserWarning, match=r"'triton' backend cannot run.*no CUDA device.*ROCm") as caught:
        chosen = [choose_backend("auto", "cuda", torch.bfloat16, (64, 64)) for _ in range(2)]
    assert (chosen, len(caught)) == (["reference"] * 2, 1)
    with pytest.raises(ValueError, match=r"backend: got 'triton' \(there is no CUDA device"):
        choose_backend("triton", "cuda")


def test_unknown_names():
    for name in ("fused", "", "CPU"):
        with pytest.raises(ValueError, match=rf"backend: got {name!r}, expected 'auto' or one of .*reference"):
            choose_backend(name)
