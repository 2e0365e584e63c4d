# %% [markdown]
# # LeNet in 4 bits
#
# The recipe of `tf.contrib.quantize`, number by number, with 4-bit weights and activations.
# `tutorials/lenet_4bit.py` is the long form, on Fashion-MNIST.

# %%
import numpy as np
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = (np.round(x * 255 / 16) / 255).reshape(-1, 8, 8, 1).astype("float32")
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
# The original begins with ranges of 0 to 6 and has no need for a delay in so short a training.

# %%
found = {}
for bits in (8, 4):
    recipe = keras_qat.recipes.contrib(weight_bits=bits, activation_bits=bits)
    qat = keras_qat.quantize_model(model, recipe)
    found[bits] = train(qat, 4, 5e-4)
    print(f"{bits} bits: {found[bits]:.2%}")

# %% [markdown]
# ## The file
#
# The pixels have 256 levels from 0 to 1, so that this `input_range` takes them as they are. The
# file holds the 4-bit codes in int8; with `recipes.int4_weights()` and `pack_int4=True` there
# would be two of them in a byte.

# %%
contents = keras_qat.export_tflite(qat, input_range=(0.0, 1.0))
report = keras_qat.verify(qat, contents, x_test)
print(report)

# %% [markdown]
# The model computes in float here, as the original did, so single values next to the middle
# between two codes may differ. `simulate` gives the codes of the file.

# %%
assert found[4] > float_accuracy - 0.08
assert report.identical > 0.99
