# %% [markdown]
# # A model with custom layers
#
# keras_qat traces custom layers and quantizes the operations inside. If a layer cannot be traced,
# the plan shows the reason.

# %%
import tensorflow as tf
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

tf.get_logger().setLevel("ERROR")  # Keras 2 warns of weights that a function of a model reads.
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

# %% [markdown]
# ## Three kinds of custom layers
#
# One is built from other layers, one has its own weight, and one moves values.


# %%
class SqueezeExcite(keras.layers.Layer):
    """Is built from other layers."""

    def build(self, shape):
        self.pool = keras.layers.GlobalAveragePooling2D(keepdims=True)
        self.squeeze = keras.layers.Conv2D(shape[-1] // 4, 1, activation="relu")
        self.excite = keras.layers.Conv2D(shape[-1], 1, activation="sigmoid")

    def call(self, x):
        return x * self.excite(self.squeeze(self.pool(x)))


class Scale(keras.layers.Layer):
    """Has its own weight."""

    def build(self, shape):
        self.factor = self.add_weight("factor", shape[-1:], initializer="ones")

    def call(self, x):
        return tf.nn.relu(x * self.factor)


class ChannelShuffle(keras.layers.Layer):
    """Moves values."""

    def call(self, x):
        return tf.concat([x[..., ::2], x[..., 1::2]], -1)


image = keras.Input((8, 8, 1), name="image")
z = keras.layers.Conv2D(16, 3, activation="relu", name="conv")(image)
z = SqueezeExcite(name="se")(z)
z = ChannelShuffle(name="shuffle")(z)
z = Scale(name="scale")(keras.layers.Conv2D(32, 3, name="conv_2")(z))
z = keras.layers.GlobalMaxPooling2D(name="max")(z)
model = keras.Model(image, keras.layers.Dense(10, name="logits")(z))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
model.fit(x_train, y_train, epochs=10, verbose=0)
print(f"float: {model.evaluate(x_test, y_test, verbose=0)[1]:.2%}")

# %% [markdown]
# ## The plan
#
# The plan lists the operations inside each custom layer. All of them are int8.

# %%
plan = keras_qat.plan(model)
print(plan)
assert not plan.float_layers

# %%
qat = keras_qat.quantize_model(model)
qat.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
qat.fit(x_train, y_train, epochs=3, verbose=0)
report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x_test, per_layer=True)
print(report)
assert report.identical == 1 and not report.findings()

# %% [markdown]
# ## Register a layer as an operator
#
# A registered layer is not traced. Here it becomes one operator that moves values instead of two
# slices and a concatenation; both are correct. At the end of the `with` block the registration is
# removed.

# %%
with keras_qat.register_op(ChannelShuffle, "move"):
    for row in keras_qat.plan(model).rows:
        if "shuffle" in row.tensor:
            print(row.tensor, row.layer, row.reason, sep=", ")

# %% [markdown]
# ## Back to the float model
#
# `strip_quantization` returns the original layers with the trained weights:

# %%
stripped = keras_qat.strip_quantization(qat)
print([type(layer).__name__ for layer in stripped.layers])
assert isinstance(stripped.get_layer("se"), SqueezeExcite)
