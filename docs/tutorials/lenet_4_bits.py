# %% [markdown]
# # LeNet in 4 bits
#
# Quantize weights and activations to 4 bits with `recipes.low_bits`. It trains the ranges together
# with the weights, and keeps 8 bits in the first and the last layer. [Fewer bits](../bits.md)
# compares the recipes.

# %%
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

# %%
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        layers.Conv2D(16, 5, padding="same", activation="relu", name="conv1"),
        layers.MaxPooling2D(name="pool1"),
        layers.Conv2D(32, 5, padding="same", activation="relu", name="conv2"),
        layers.MaxPooling2D(name="pool2"),
        layers.Flatten(name="flatten"),
        layers.Dense(128, activation="relu", name="dense"),
        layers.Dense(10, name="logits"),
    ],
    name="lenet",
)


def train(model, epochs, rate):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    model.fit(x_train, y_train, epochs=epochs, batch_size=64, verbose=0)
    return model.evaluate(x_test, y_test, verbose=0)[1]


float_accuracy = train(model, 8, 2e-3)
print(f"float: {float_accuracy:.2%}")

# %% [markdown]
# ## Quantize and train
#
# `calibrate` sets the ranges that training starts from. With few bits, use `method="mse"`.

# %%
accuracy = {}
for bits in (8, 4, 2):
    recipe = keras_qat.recipes.low_bits(bits, bits)
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, x_train, method="mse")
    accuracy[bits] = train(qat, 8, 1e-3)
    print(f"{bits} bits: {accuracy[bits]:.2%}")
    if bits == 4:
        four_bits = qat

# %% [markdown]
# ## The file
#
# TFLite has no 4-bit activations. The file stores them as int8 with 16 different values, and
# computes exactly what the model computes.

# %%
contents = keras_qat.export_tflite(four_bits)
report = keras_qat.verify(four_bits, contents, x_test, y_test)
print(report)

# %% [markdown]
# 4-bit weights can be packed, two in a byte, which makes the file smaller. The TFLite kernels for
# packed weights round differently. With `pack_int4` the model rounds like these kernels.

# %%
four_bits.pack_int4 = True
packed = keras_qat.export_tflite(four_bits)
print(f"{len(contents):,} bytes, packed {len(packed):,}")

# %%
assert accuracy[4] > float_accuracy - 0.03
assert report.identical == 1
assert keras_qat.verify(four_bits, packed, x_test).identical == 1
assert len(packed) < 0.7 * len(contents)

# %% [markdown]
# To continue old work with `tf.contrib.quantize` of TensorFlow 1, use `recipes.contrib(4, 4)`:
# [Coming from tf.contrib.quantize](../coming-from-tf-contrib-quantize.md).
