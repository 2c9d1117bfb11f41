"""What a GPU would be waited for and how much is launched on it, by method: counted where there is none."""

from __future__ import annotations

import pytest

from tests.helpers.kernel_process import run_alone


@pytest.mark.slow
def test_the_host_waits_for_a_gpu_as_rarely_as_was_written_down() -> None:
    run_alone("host_waits.py")
