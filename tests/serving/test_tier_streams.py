"""Documents on their way from a GPU to the tiers below, in the order of its streams: on a device that there isn't."""

from __future__ import annotations

from tests.helpers.kernel_process import run_alone


def test_what_goes_to_the_tiers_is_copied_when_it_is_there() -> None:
    run_alone("late_streams.py")
