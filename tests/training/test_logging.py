"""What is logged to TensorBoard is what the quantizers are and do."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.callbacks import LogQuantization
from keras_qat.training.quantizer_statistics import compute_statistics
from tests.helpers import assert_all_equal, images, keras, train
from tests.networks.small import tiny_net

X = images(24, (6, 6, 2))


def logged(folder):
    """Epoch -> (run, chart) -> value."""
    result: dict[int, dict[tuple[str, str], float]] = {}
    for path in (folder / "quantization").rglob("events*"):
        run = str(path.parent.relative_to(folder / "quantization"))
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name == "scalars"
                number = float(tf.make_ndarray(value.tensor))
                result.setdefault(event.step, {})[run, value.tag] = number
    return dict(sorted(result.items()))


@pytest.mark.slow
def test_ranges_saturation_and_noise(tmp_path):
    qat = keras_qat.quantize_model(tiny_net())
    train(qat, X, epochs=4, callbacks=[LogQuantization(tmp_path, X[:8], every=2)])
    result = logged(tmp_path)
    assert list(result) == [1, 3]
    last = result[3]
    for statistic in compute_statistics(qat, X[:8]):
        name = "+".join(statistic.quantizer.quantizes)
        assert last[name, "1 signal to noise, dB"] == pytest.approx(statistic.sqnr)
        assert last[name, "2 share beyond the range"] == pytest.approx(statistic.saturation)
        assert last[name, "3 range, minimum"] == pytest.approx(np.min(statistic.quantizer.minimum))
        assert last[name, "4 range, maximum"] == pytest.approx(np.max(statistic.quantizer.maximum))
    assert {"image", "conv/kernel", "relu", "logits"} <= {run for run, _ in last}
    assert len({chart for _, chart in last}) == 4  # However many layers there are.
    maximum = "logits", "4 range, maximum"
    assert result[1][maximum] != last[maximum]


def test_training_is_not_changed(tmp_path):
    one, other = (keras_qat.quantize_model(tiny_net()) for _ in range(2))
    train(one, X, epochs=2)
    train(other, X, epochs=2, callbacks=[LogQuantization(tmp_path, X[:8])])
    assert_all_equal(one.get_weights(), other.get_weights())


def test_mistakes(tmp_path):
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"every=.*: pass an integer of at least 1"):
            LogQuantization(tmp_path, every=every)
    callback = LogQuantization(tmp_path)
    callback.set_model(tiny_net())
    with pytest.raises(ValueError, match=r"not quantization-aware: call keras_qat.quantize_model"):
        callback.on_train_begin()
    callback.set_model(type("Trainer", (keras.Model,), {})(name="trainer"))
    with pytest.raises(ValueError, match=r"Trainer 'trainer' trains other models.*model=qat"):
        callback.on_train_begin()
