"""Files in Arm's TOSA: its converter reads them, and its reference model computes their values.

`make test-tosa` installs both; without them these tests are skipped.
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

TABLE = "The converter's CAST subtracts the zero point, so that GATHER reads beside the table."
REFUSED = "The reference model refuses the graph that the converter makes."
OWN_TABLE = "TOSA computes 16 bits by a table of 513 entries of its own."
NO_FORM = "The converter has no form of this operator."
NO_NOT_EQUAL = "The converter has no form of NOT_EQUAL, by which masks are made."
PRODUCT = "The converter leaves a product of 32-bit numbers, that with gamma, as it is."

OTHERWISE = {
    "argmin, 8 bits": REFUSED,
    "conv, 16 bits": REFUSED,
    "divide, 8 bits": TABLE,
    "elu, 8 bits": NO_FORM,
    "group_norm, 8 bits": PRODUCT,
    "layer_norm, 8 bits": PRODUCT,
    "lstm, 8 bits": NO_FORM,
    "lstm, 16 bits": NO_FORM,
    "matmul, 8 bits": "The converter does not broadcast the batches of a product.",
    "matmul, 16 bits": "The converter does not broadcast the batches of a product.",
    "one_hot, 8 bits": "TOSA leaves classes beyond the depth undefined.",
    "power, 8 bits": TABLE,
    "reciprocal, 8 bits": TABLE,
    "reduce_all, 8 bits": NO_NOT_EQUAL,
    "reduce_all, 16 bits": NO_NOT_EQUAL,
    "reduce_any, 8 bits": NO_NOT_EQUAL,
    "reduce_any, 16 bits": NO_NOT_EQUAL,
    "resize_bilinear, 16 bits": "TOSA rounds the interpolated value another time.",
    "selu, 8 bits": TABLE,
    "sigmoid, 16 bits": OWN_TABLE,
    "softmax, 16 bits": OWN_TABLE,
    "softplus, 8 bits": TABLE,
    "softsign, 8 bits": TABLE,
    "tanh, 16 bits": OWN_TABLE,
    "thresholded_relu, 8 bits": TABLE,
    "top_k, 8 bits": NO_FORM,
    "top_k, 16 bits": NO_FORM,
    "unit_norm, 8 bits": NO_FORM,
    "network max_relu": "The converter drops what MAX_POOL_2D clips.",
    "network gru": NO_NOT_EQUAL,
    "network lstm": NO_NOT_EQUAL,
    "network simple_rnn": NO_NOT_EQUAL,
    "network conv_lstm": OWN_TABLE,
    "network blocks": "The converter drops what MAX_POOL_2D clips.",
}
"""What TOSA does not compute, or computes otherwise."""

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
    assert {name: results[name] for name in results.keys() - equal - OTHERWISE.keys()} == {}
    assert equal & OTHERWISE.keys() == set(), "These are equal by now: name them no longer."
