"""Tests files in Arm's TOSA: its converter reads them, and its reference model runs them.

These tests are skipped unless `make test-tosa` has installed both.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.runtimes import networks, operators

PYTHON = Path(__file__).parents[2] / ".venv-tosa/bin/python"
WORKER = Path(__file__).parent / "worker.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no TOSA: make test-tosa"),
]

REFUSED = "The reference model refuses the graph that the converter makes."
OWN_TABLE = "TOSA computes 16 bits by a table of 513 entries of its own."
NO_FORM = "The converter has no form of this operator."
NO_NOT_EQUAL = "The converter has no form of NOT_EQUAL, by which masks are made."
NO_BATCHES = "The converter does not broadcast the batches of a product."
NO_SIZE = "TOSA's REDUCE_PRODUCT, which multiplies the sizes, is for float values only."
TABLE = "The converter's CAST subtracts the zero point, so that GATHER reads beside the table."
PRODUCT = "The converter leaves a product of 32-bit numbers, that with gamma, as it is."

REASONS = {
    "{}, 8 bits": {
        REFUSED: "argmin",
        NO_FORM: "elu lstm top_k unit_norm",
        NO_NOT_EQUAL: "reduce_all reduce_any",
        NO_BATCHES: "matmul",
        NO_SIZE: "size",
        TABLE: "divide formula power reciprocal selu softplus softsign thresholded_relu",
        PRODUCT: "group_norm layer_norm",
        "TOSA leaves classes beyond the depth undefined.": "one_hot",
    },
    "{}, 16 bits": {
        REFUSED: "conv",
        OWN_TABLE: "sigmoid softmax tanh",
        NO_FORM: "lstm top_k",
        NO_NOT_EQUAL: "reduce_all reduce_any",
        NO_BATCHES: "matmul",
        NO_SIZE: "size",
        "TOSA rounds the interpolated value another time.": "resize_bilinear",
    },
    "network {}": {
        OWN_TABLE: "conv_lstm",
        NO_NOT_EQUAL: "gru lstm simple_rnn",
        "The converter drops what MAX_POOL_2D clips.": "blocks max_relu",
    },
}
"""Reason -> operators that TOSA does not compute, or computes differently."""

OTHERWISE = {
    form.format(name)
    for form, reasons in REASONS.items()
    for names in reasons.values()
    for name in names.split()
}

KINDS = {"operators": lambda: operators(1, ("tflm",)), "networks": lambda: networks(("tflm",))}


@pytest.mark.parametrize("kind", KINDS)
def test_all_values_are_those_of_the_simulation(kind, tmp_path):
    for name, contents, arrays in KINDS[kind]():
        (tmp_path / f"{name}.tflite").write_bytes(contents)
        np.savez(tmp_path / f"{name}.npz", **arrays)
    done = subprocess.run(
        [PYTHON, WORKER, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    results = {name.removesuffix(".0"): load for name, load in json.loads(done.stdout).items()}
    equal = {name for name, item in results.items() if isinstance(item, list) and not item[0]}
    print(f"{len(equal)} of {len(results)} {kind} are equal")
    assert len(equal) > 30
    assert {name: results[name] for name in results.keys() - equal - OTHERWISE} == {}
    assert equal & OTHERWISE == set(), "These are equal by now: name them no longer."
