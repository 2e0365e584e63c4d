"""Reports how often a fake quantizer rounded the other way than the recorded run."""

from __future__ import annotations

import pytest

FLIPS = pytest.StashKey[dict[str, int]]()


def pytest_configure(config):
    config.stash[FLIPS] = {}


@pytest.fixture
def count_flips(request):
    """A function that takes note of the number of rounding flips in a comparison."""

    def count(number: int) -> None:
        if number:
            flips = request.config.stash[FLIPS]
            flips[request.node.name] = flips.get(request.node.name, 0) + number

    return count


def pytest_terminal_summary(terminalreporter, config):
    flips = config.stash.get(FLIPS, {})
    if any("conformance" in str(each.nodeid) for each in terminalreporter.stats.get("passed", [])):
        terminalreporter.write_sep("-", "conformance with tf.contrib.quantize")
        terminalreporter.write_line(f"rounding flips: {sum(flips.values())} {flips or ''}")
