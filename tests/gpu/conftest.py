"""Where the tests run that `scripts/test-gpu` is for; without a GPU they are skipped, and say so."""

from __future__ import annotations

import pytest

from tests.helpers.gpu_engines import EngineDevice
from tests.helpers.plugin import nano_adapter as nano_adapter
from tests.helpers.plugin import plugin as plugin


@pytest.fixture(scope="session", autouse=True)
def device() -> EngineDevice:
    """A GPU; a CPU if `COMB_GPU_TESTS_DEVICE` says so."""
    return EngineDevice.found()
