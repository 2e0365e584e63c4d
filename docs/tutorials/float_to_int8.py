# %% [markdown]
# # From float to int8, with and without training
#
# Quantize the same float network in two ways: post-training quantization with some examples, and
# quantization-aware training. With 8 bits both are as accurate as float. With fewer bits they are
# not.

# %%
import numpy as np
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# %% [markdown]
# ## A pretrained float model
#
# It has depthwise convolutions, which are harder to quantize than others.


# %%
def block(x, filters, strides=1):
    x = keras.layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)(x)
    x = keras.layers.ReLU(6.0)(keras.layers.BatchNormalization(momentum=0.9)(x))
    x = keras.layers.Conv2D(filters, 1, use_bias=False)(x)
    return keras.layers.ReLU(6.0)(keras.layers.BatchNormalization(momentum=0.9)(x))


image = keras.Input((8, 8, 1), name="image")
z = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(image)
z = block(block(z, 32, strides=2), 64)
z = keras.layers.GlobalAveragePooling2D()(z)
model = keras.Model(image, keras.layers.Dense(10, name="logits")(z))
rate = keras.optimizers.schedules.CosineDecay(3e-3, 20 * 38)
model.compile(keras.optimizers.Adam(rate), loss)
model.fit(x_train, y_train, epochs=20, verbose=0)


def accuracy(model):
    return float(np.mean(model.predict(x_test, verbose=0).argmax(-1) == y_test))


print(f"float: {accuracy(model):.2%}")

# %% [markdown]
# ## Without training
#
# `calibrate` measures the ranges of the activations on some examples. It needs no labels.


# %%
def without_training(recipe, method="minmax"):
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, x_train[:200], method=method)
    return qat


# %% [markdown]
# ## With training
#
# A few epochs with a small learning rate, starting from the same float weights.


# %%
def with_training(recipe):
    qat = without_training(recipe, "mse")
    qat.compile(keras.optimizers.Adam(3e-4), loss)
    steps = len(x_train) // 32
    callbacks = [keras_qat.callbacks.FreezeBatchNorm(3 * steps)]
    qat.fit(x_train, y_train, epochs=6, verbose=0, callbacks=callbacks)
    return qat


# %% [markdown]
# ## The comparison
#
# `predict` returns the outputs of the file, so its accuracy is the accuracy of the file. `verify`
# checks this.

# %%
accuracies = {}
for bits in (8, 4, 3):
    recipe = keras_qat.recipes.int8(weight_bits=bits, activation_bits=bits)
    models = {
        "extremes": without_training(recipe),
        "mse": without_training(recipe, "mse"),
        "training": with_training(recipe),
    }
    for name, qat in models.items():
        report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x_test)
        assert report.identical == 1
        accuracies[bits, name] = accuracy(qat)
        print(f"{bits} bits, {name:<9} {accuracies[bits, name]:.2%}")

# %% [markdown]
# With 8 bits all three are equal. With 4 bits, ranges with the smallest squared error are better
# than the extremes. With 3 bits, only training makes the network usable.

# %%
methods = ("extremes", "mse", "training")
assert min(accuracies[8, name] for name in methods) > accuracy(model) - 0.03
assert accuracies[3, "training"] > accuracies[3, "mse"] + 0.1
