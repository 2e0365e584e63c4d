# %% [markdown]
# # Quickstart
#
# A network for handwritten digits: trained in float, quantization-aware, exported to int8,
# verified. The data comes with scikit-learn; all of it takes some ten seconds.

# %%
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]
len(x_train), len(x_test)

# %% [markdown]
# The test images are by other writers than the training images, as the digits are in the order in
# which they were written.
#
# ## A float model

# %%
model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(32, 3, use_bias=False, name="conv"),
        keras.layers.BatchNormalization(name="conv_bn"),
        keras.layers.ReLU(name="conv_relu"),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(10, name="logits"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
model.fit(x_train, y_train, epochs=10, verbose=0)
_, float_accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"float: {float_accuracy:.2%}")

# %% [markdown]
# ## What will be done to it
#
# Nothing is changed yet: the plan says for each tensor how it will be quantized, and why.

# %%
print(keras_qat.plan(model))

# %% [markdown]
# ## Quantization-aware training
#
# For one epoch ranges are observed only; then values are rounded to them. For the second half
# BatchNormalization uses its moving statistics, as the file does.

# %%
qat = keras_qat.quantize_model(model)
qat.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
steps = len(x_train) // 32
callbacks = [
    keras_qat.callbacks.QuantDelay(steps),
    keras_qat.callbacks.FreezeBatchNorm(2 * steps),
]
qat.fit(x_train, y_train, epochs=4, verbose=0, callbacks=callbacks)
_, accuracy = qat.evaluate(x_test, y_test, verbose=0)
print(f"int8: {accuracy:.2%}")

# %% [markdown]
# `evaluate` computes what the int8 file computes, in integers. That is what comes next: the file,
# and the proof.
#
# ## The file

# %%
keras_qat.export_tflite(qat, "model.tflite")
report = keras_qat.verify(qat, "model.tflite", x_test)
print(report)

# %%
assert report.identical == 1, "every code of every output is the same"
assert accuracy > float_accuracy - 0.02

# %% [markdown]
# ## What it takes on a device

# %%
print(keras_qat.summary(qat))

# %% [markdown]
# ## Save it, and go on another day

# %%
qat.save("qat.keras")
again = keras.models.load_model("qat.keras")
assert keras_qat.export_tflite(again) == keras_qat.export_tflite(qat)
