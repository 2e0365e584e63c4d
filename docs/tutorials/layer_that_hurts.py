# %% [markdown]
# # Find the layer that hurts
#
# A network loses accuracy when it is quantized. Which layer is the cause, and what helps?
# `diagnose` tries remedies and measures them.

# %%
import warnings

import numpy as np
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

# %% [markdown]
# ## A network with a weak spot
#
# Besides its features, the network uses the amount of ink, in raw units of several hundred. In
# float this works, because a BatchNormalization follows. Counters, pressures and pixel coordinates
# cause the same problem.

# %%
layers = keras.layers
image = keras.Input((8, 8, 1), name="image")
z = layers.Conv2D(16, 3, activation="relu", name="conv")(image)
z = layers.Conv2D(32, 3, activation="relu", name="conv_2")(z)
features = layers.Dense(16, activation="tanh", name="features")(layers.Flatten(name="flat")(z))
mean = layers.GlobalAveragePooling2D(name="mean")(image)
ink = layers.Rescaling(1024.0, name="ink")(mean)
both = layers.Concatenate(name="both")([features, ink])
z = layers.BatchNormalization(momentum=0.9, name="norm")(layers.ReLU(name="relu")(both))
model = keras.Model(image, layers.Dense(10, name="logits")(z))
model.compile(
    keras.optimizers.Adam(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x_train, y_train, epochs=10, verbose=0)


def accuracy(model):
    return float(np.mean(model.predict(x_test, verbose=0).argmax(-1) == y_test))


print(f"float: {accuracy(model):.2%}")

# %% [markdown]
# ## The damage


# %%
def quantized(recipe):
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, x_train[:200])
    return qat


recipe = keras_qat.recipes.int8()
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    qat = quantized(recipe)
print(f"int8: {accuracy(qat):.2%}")
print(shown[0].message)

# %% [markdown]
# ## The diagnosis
#
# `calibrate` warns about ranges like this one. `diagnose` measures what each layer costs.
#
# *dB* is the signal to quantization noise of the logits against the float network; 6 dB are one
# bit. *argmax* is the share of images that keep their class. No labels are needed.

# %%
diagnosis = keras_qat.diagnose(qat, x_train[:300])
print(diagnosis)

# %% [markdown]
# The line with `!` names the cause: large values of `ink` set a range that the features share. The
# range fits the data, so calibrating again does not help. The signal gets worse at `both`, where
# features between -1 and 1 share one range with values of several hundred, so these
# features have only a few of its 256 levels. 16 bits for all activations help, or float for the
# layers after `both`.

# %%
step = keras_qat.simulate(qat, x_test).tensors["both"].scale
print(f"from -1 to 1 there are {2 / step:.1f} steps of 'both'")
assert "both" in diagnosis.layers

# %% [markdown]
# ## The remedy
#
# Keep the layers with the weak signal in float, or use 16 bits for all activations, as the
# diagnosis recommends. Neither needs training.

# %%
for layer in ("both", "relu", "norm"):
    recipe = recipe.override(layer, quantize=False)
cured = quantized(recipe)
print(f"three layers in float: {accuracy(cured):.2%}")
wide = quantized(keras_qat.recipes.int16x8())
print(f"with 16 bits: {accuracy(wide):.2%}")

# %% [markdown]
# For a device without float it is better to remove the cause: scale the value to the size of the
# features before the concatenation (`Rescaling(2.0)` instead of 1024 here, or a
# BatchNormalization), and train again.
#
# `verify(per_layer=True)` shows the same for each tensor. It also shows that the file computes
# exactly what the model computes: the loss comes from rounding, not from the export.

# %%
assert accuracy(cured) > accuracy(qat) + 0.02
assert min(accuracy(cured), accuracy(wide)) > accuracy(model) - 0.01
