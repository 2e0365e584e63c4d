"""The SavedModel: runs without keras_qat, on a CPU, and gives the model's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.models import observe, scramble
from tests.structures import family_inputs, family_model


def test_runs_where_only_tensorflow_is(exported, tmp_path, fresh_process):
    path = str(tmp_path / "model")
    keras_qat.export_saved_model(exported.model, path)
    found = fresh_process(
        f"""
import sys
import tensorflow as tf
model = tf.saved_model.load({path!r})
assert not any(name.split(".")[0] in ("keras_qat", "tf_keras") for name in sys.modules)
result = model.signatures["serving_default"](image=tf.constant(arrays["x"]))["logits"].numpy()
""",
        x=exported.x,
    )
    expected = exported.model.predict(exported.x, verbose=0)
    step = keras_qat.quantizers(exported.model)[-1]
    differences = np.abs(found - expected) / ((step.maximum - step.minimum) / 255)
    assert np.mean(differences < 1e-3) >= 0.99
    assert differences.max() <= 1 + 1e-3


@pytest.mark.legacy
@pytest.mark.parametrize("family", ["depthwise"])
def test_every_spelling_runs_on_a_cpu(family, tmp_path):
    """Dilated and strided layers too, which TensorFlow's CPU kernels take in some forms only."""
    qat = keras_qat.quantize_model(scramble(family_model(family)))
    inputs = family_inputs(family, 16)
    observe(qat, *inputs)
    keras_qat.export_saved_model(qat, tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    found = serve(**dict(zip(qat.input_names, map(tf.constant, inputs), strict=True)))
    expected = dict(zip(qat.output_names, qat.predict(inputs, verbose=0), strict=True))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        steps = np.abs(found[name] - values) / (np.ptp(values) / 255)
        assert np.mean(steps < 0.5) >= 0.99, name
        assert steps.max() < 1.5, name


def test_existing_saved_model_is_replaced(exported, tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    keras_qat.export_saved_model(exported.model, path)
    (path / "old").write_text("old")
    keras_qat.export_saved_model(exported.model, path)
    assert not (path / "old").exists()
    assert (path / "saved_model.pb").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
