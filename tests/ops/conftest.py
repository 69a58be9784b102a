"""Every test of the operator runs on every backend that is built."""

import pytest

from rfa.ops import available_backends


@pytest.fixture(params=available_backends())
def backend(request):
    return request.param
