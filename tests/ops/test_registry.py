"""Custom layers that users say the operators of: what they have to give, and for how long."""

from __future__ import annotations

import pytest

import keras_qat
from keras_qat.frontend.keras2.backend import keras


class Pick(keras.layers.Layer):
    """Softmax along an axis of its own name."""

    dim = 2

    def call(self, inputs):
        return keras.activations.softmax(inputs, axis=self.dim)


def float_layers():
    x = keras.Input((4, 5))
    model = keras.Model(x, Pick(name="pick")(keras.layers.Dense(5)(x)))
    recipe = keras_qat.recipes.int8().override("Pick", open=False)
    return list(keras_qat.plan(model, recipe).float_layers)


@pytest.mark.parametrize("attributes", [{"axis": -1}, lambda layer: {"axis": layer.dim}])
def test_a_layer_is_an_operator_until_that_is_undone(attributes):
    assert float_layers() == ["pick"]
    with keras_qat.register_op(Pick, "softmax", attributes=attributes):
        assert float_layers() == []
        inner = keras_qat.register_op(Pick, "move")
        inner.undo()
        assert float_layers() == []
    assert float_layers() == ["pick"]


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("softmax", None),
        ("softmax", {"axes": 1}),
        ("softmax", {"axis": 1, "beta": 2}),
        ("linear", {"axis": 1}),
    ],
)
def test_attributes_have_to_be_those_of_the_operator(op, attributes):
    with pytest.raises(ValueError, match=f"Pick as {op} needs the attributes"):
        keras_qat.register_op(Pick, op, attributes=attributes)


def test_attributes_that_are_read_later_are_checked_then():
    with (
        keras_qat.register_op(Pick, "softmax", attributes=lambda layer: {"dim": 1}),
        pytest.raises(ValueError, match="needs the attributes axis, and may have no others; it"),
    ):
        float_layers()


def test_there_has_to_be_such_an_operator():
    with pytest.raises(ValueError, match="There is no operator"):
        keras_qat.register_op(Pick, "argsort")
