"""Reports how often a fake quantizer rounded the other way than the recorded run."""

from __future__ import annotations

import pytest

FLIPS = "rounding flips"


@pytest.fixture
def count_flips(record_property):
    """A function that takes note of the number of rounding flips in a comparison."""

    def count(number: int) -> None:
        if number:
            record_property(FLIPS, number)

    return count


def pytest_terminal_summary(terminalreporter):
    reports = [
        each
        for outcome in ("passed", "failed")
        for each in terminalreporter.stats.get(outcome, [])
        if "conformance" in each.nodeid
    ]
    flips = [
        (each.nodeid, count)
        for each in reports
        for name, count in each.user_properties
        if name == FLIPS
    ]
    if reports:
        terminalreporter.write_sep("-", "conformance with tf.contrib.quantize")
        terminalreporter.write_line(f"{FLIPS}: {sum(n for _, n in flips)} {flips or ''}")
