# %% [markdown]
# # Quickstart
#
# Train a network on handwritten digits, quantize it, export it to int8, and verify the file. The
# data comes with scikit-learn, and the notebook runs in about ten seconds.

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
# The digits are sorted by writer, so the test images come from other people than the training
# images.
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
# ## The plan
#
# `plan` changes nothing. It shows how each tensor will be quantized, and why.

# %%
print(keras_qat.plan(model))

# %% [markdown]
# ## Quantization-aware training
#
# The first epoch only observes ranges; after that, values are rounded. In the second half,
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
# `evaluate` computes the integers of the int8 file. Next, we write the file and compare.
#
# ## The file

# %%
keras_qat.export_tflite(qat, "model.tflite")
report = keras_qat.verify(qat, "model.tflite", x_test)
print(report)

# %%
assert report.identical == 1, "all outputs are identical"
assert accuracy > float_accuracy - 0.02

# %% [markdown]
# ## Size and memory on the device

# %%
print(keras_qat.summary(qat))

# %% [markdown]
# ## Save and load

# %%
qat.save("qat.keras")
again = keras.models.load_model("qat.keras")
assert keras_qat.export_tflite(again) == keras_qat.export_tflite(qat)
