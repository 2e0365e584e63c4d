# %% [markdown]
# # A sensor, and a microcontroller
#
# A line scanner reads a digit row by row: 8 photodiodes, 8 lines. So the data is a sequence of 8
# measurements of 8 numbers, as that of an accelerometer or a microphone array would be. (It is
# scikit-learn's digits again; nothing has to be downloaded.) A network of one-dimensional
# convolutions goes to a microcontroller.

# %%
import numpy as np
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

# %%
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((8, 8), name="lines"),
        layers.Conv1D(32, 3, padding="same", use_bias=False, name="conv"),
        layers.BatchNormalization(momentum=0.9, name="conv_bn"),
        layers.ReLU(name="conv_relu"),
        layers.SeparableConv1D(64, 3, padding="same", activation="relu", name="separable"),
        layers.MaxPooling1D(name="pool"),
        layers.Flatten(name="flatten"),
        layers.Dense(10, name="scores"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
model.fit(x_train, y_train, epochs=10, verbose=0)
_, float_accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"float: {float_accuracy:.2%}")

# %% [markdown]
# ## For TensorFlow Lite Micro
#
# Its kernels round in a way of their own. With `kernels="tflm"` the model computes at inference
# as they do, so that `evaluate` gives the accuracy of the device. Whether TFLite Micro has every
# operator may be asked before training.

# %%
qat = keras_qat.quantize_model(model, kernels="tflm")
assert not keras_qat.targets.problems(qat, keras_qat.targets.TFLM)

qat.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
callbacks = [keras_qat.callbacks.QuantDelay(38), keras_qat.callbacks.FreezeBatchNorm(76)]
qat.fit(x_train, y_train, epochs=4, verbose=0, callbacks=callbacks)
_, accuracy = qat.evaluate(x_test, y_test, verbose=0)
print(f"on the device: {accuracy:.2%}")
assert accuracy > float_accuracy - 0.03

# %% [markdown]
# ## Memory
#
# Bytes of weights and activations, and multiply-accumulates, for each operator:

# %%
print(keras_qat.summary(qat))

# %% [markdown]
# ## Source for the firmware
#
# The file as C++ source, with scales, zero points, the operators to register, and what the
# kernels give for some examples: a test that runs on the device.

# %%
keras_qat.export_c(qat, "scanner.cc", examples=x_test[:2])
with open("scanner.h") as header:
    print(header.read())

# %% [markdown]
# `simulate` gives the same golden outputs in Python, and those of every tensor inside:

# %%
golden = keras_qat.simulate(qat, x_test, kernels="tflm")
codes = golden.outputs["scores"].codes
np.testing.assert_array_equal(codes.argmax(-1), qat.predict(x_test, verbose=0).argmax(-1))
codes[:2]
