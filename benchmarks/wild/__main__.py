"""`python -m benchmarks.wild`: what `python -m benchmarks.zoo --wild` does, with its options."""

from __future__ import annotations

import sys

from benchmarks.zoo import main

sys.argv.insert(1, "--wild")
main()
