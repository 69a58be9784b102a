"""Every test of the operator runs on every backend that takes any head size; Triton's has its own tests in triton/."""

import pytest

from rfa.ops import available_backends


@pytest.fixture(params=[name for name in available_backends() if name != "triton"])
def backend(request):
    return request.param
