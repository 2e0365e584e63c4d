"""Tests TensorFlow 2.15, which has only Keras 2."""

import pytest
import tensorflow as tf

import keras_qat
from tests.networks.small import tiny_net

OLD_KERAS = tuple(map(int, tf.__version__.split(".")[:2])) < (2, 16)


@pytest.mark.legacy
@pytest.mark.skipif(not OLD_KERAS, reason="Keras 3 comes with newer versions of TensorFlow")
@pytest.mark.parametrize("arguments", [1, 2])
def test_keras_3_where_there_is_none(arguments):
    convert = keras_qat.from_keras_3 if arguments == 1 else keras_qat.to_keras_3
    with pytest.raises(ImportError, match=r"both Keras 3 and Keras 2.*TensorFlow 2\.16.*keras3"):
        convert(*[tiny_net()] * arguments)
