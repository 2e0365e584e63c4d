# %% [markdown]
# # Find the layer that hurts
#
# A network loses accuracy when it is quantized. Which layer is it? `verify(per_layer=True)` says
# how much noise each tensor has, and `override` mends it.

# %%
import numpy as np
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

# %% [markdown]
# ## A network with a weak place
#
# Beside its features it takes the amount of ink, in raw units of some hundreds. In float that
# does not matter, as a BatchNormalization follows. Such things happen: a counter, a pressure, a
# coordinate in pixels.

# %%
layers = keras.layers
image = keras.Input((8, 8, 1), name="image")
z = layers.Conv2D(16, 3, activation="relu", name="conv")(image)
z = layers.Conv2D(32, 3, activation="relu", name="conv_2")(z)
features = layers.Dense(16, activation="tanh", name="features")(layers.Flatten(name="flat")(z))
mean = layers.GlobalAveragePooling2D(name="mean")(image)
ink = layers.Rescaling(1024.0, name="ink")(mean)
both = layers.Concatenate(name="both")([features, ink])
z = layers.BatchNormalization(momentum=0.9, name="norm")(both)
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
qat = quantized(recipe)
print(f"int8: {accuracy(qat):.2%}")

# %% [markdown]
# ## The report
#
# File and model agree in every code, so it is no fault of the export: it is the rounding itself.
# *SQNR* is the signal to quantization noise of each tensor against the network in float, in dB; 6
# dB are a bit.

# %%
report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x_test, per_layer=True)
print(report)

# %% [markdown]
# It falls little by little, and at `both_input0` all at once: that is the first input of `both`,
# the features, rounded to the range that a concatenation shares. (`both` as a whole looks good,
# as the large number hides the small ones; behind `norm` it shows again.) The steps say the same:

# %%
for each in report.tensors:
    print(f"{each.name:<20} step {each.scale:.5f}   SQNR {each.sqnr:5.1f} dB")

# %% [markdown]
# Features between -1 and 1 have 255 codes before `both`, and a few in it: they share one range
# with a number of some hundreds.

# %%
steps = {each.name: each.scale for each in report.tensors}
print(f"from -1 to 1 there are {2 / steps['both']:.1f} steps of 'both'")
assert steps["both"] > 50 * steps["features_activation"]

# %% [markdown]
# ## The cure
#
# Without training anew: leave these two layers in float. The rest of the file is int8 as before.

# %%
cured = quantized(recipe.override("both", quantize=False).override("norm", quantize=False))
report = keras_qat.verify(cured, keras_qat.export_tflite(cured), x_test, per_layer=True)
print(f"with a float island: {accuracy(cured):.2%}")
print(*report.findings(), sep="\n")

# %% [markdown]
# Better, for a device that has no float: take the cause away, and bring the number to the size of
# the features before they meet (`Rescaling(2.0)` in place of 1024 here, or a BatchNormalization
# in front of the concatenation), and train.

# %%
assert accuracy(cured) > accuracy(qat) + 0.02
assert accuracy(cured) > accuracy(model) - 0.01
