"""The command `tune`."""

import json

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.cli.running import X, run


def test_the_best_file_is_written(files):
    rows = np.concatenate([X, X + 0.01])
    np.save(files / "more.npy", rows)
    said = run(
        *("tune", files / "float.keras", files / "more.npy", files / "x.npy"),
        *(files / "tuned.tflite", "--max-drop", 50, "--minutes", 1),
        code=2,
    )
    assert "40 of 40 validation examples" in said
    np.save(files / "others.npy", X + 0.02)
    result = run(
        *("tune", files / "float.keras", files / "more.npy", files / "others.npy"),
        *(files / "tuned.tflite", "--max-drop", 50, "--minutes", 1, "--json"),
    )
    best = json.loads(result)["best"]
    assert best["size"] == (files / "tuned.tflite").stat().st_size
    assert keras_qat.read_metadata(files / "tuned.tflite")


@pytest.mark.slow
def test_a_budget_that_is_not_met_is_exit_status_1(files):
    model = keras.models.load_model(files / "float.keras")
    labels = model.predict(X + 0.02, verbose=0)
    model.compile("adam", "mse")
    model.save(files / "compiled.keras")
    np.savez(files / "judged.npz", x=X + 0.02, y=labels)
    np.savez(files / "train.npz", x=X, y=labels)
    said = run(
        *("tune", files / "compiled.keras", files / "train.npz", files / "judged.npz"),
        *(files / "tuned.tflite", "--labels", "y", "--max-drop", 0, "--minutes", 0.01),
        code=1,
    )
    assert "no attempt is within 0 points" in said
    assert (files / "tuned.tflite").exists()
