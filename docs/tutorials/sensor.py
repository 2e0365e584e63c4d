# %% [markdown]
# # From Keras to a microcontroller
#
# Train a network of one-dimensional convolutions for sensor data, and prepare it for a
# microcontroller. A line scanner with 8 photodiodes reads a digit in 8 lines, so an example is a
# sequence of 8 measurements with 8 values. The data is scikit-learn's digits.

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
# ## Check the target before training
#
# A target describes the operators of a device and how they round. `plan` lists layers that do not
# run there; this model has none.

# %%
print(keras_qat.plan(model, target="tflm"))

# %% [markdown]
# TFLite Micro has no kernel for GELU. A plan with a GELU reports this:

# %%
bent = keras.Sequential([keras.Input((8, 8)), layers.Activation("gelu", name="bent")])
for problem in keras_qat.plan(bent, target="tflm").problems:
    print(problem)

# %% [markdown]
# ## Training with the device's rounding
#
# TFLite Micro rounds differently than TFLite on a PC. With this target the model rounds as TFLite
# Micro does at inference, so `evaluate` returns the accuracy of the device.

# %%
qat = keras_qat.quantize_model(model, target="tflm")
qat.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
steps = len(x_train) // 32  # in an epoch
callbacks = [
    keras_qat.callbacks.QuantDelay(steps),
    keras_qat.callbacks.FreezeBatchNorm(2 * steps),
]
qat.fit(x_train, y_train, epochs=4, verbose=0, callbacks=callbacks)
_, accuracy = qat.evaluate(x_test, y_test, verbose=0)
print(f"on the device: {accuracy:.2%}")
assert accuracy > float_accuracy - 0.03

# %% [markdown]
# ## The file, in TFLite Micro
#
# Files for this target accept one example at a time, and all sizes are fixed. `verify` runs the
# file on this computer in TFLite Micro's interpreter (the package `tflite-micro`): the whole file,
# and each layer. All outputs are identical. The arena is the memory for tensors. A 32-bit chip
# needs slightly less, and more while it starts.

# %%
keras_qat.export_tflite(qat, "scanner.tflite")
report = keras_qat.verify(qat, "scanner.tflite", x_test, per_layer=True)
print(report)
assert report.identical == 1
print(f"arena: {report.arena_size} bytes")

# %% [markdown]
# Bytes and multiply-accumulates of each operator:

# %%
print(keras_qat.summary(qat))

# %% [markdown]
# ## Source for the firmware
#
# `export_c` writes the file as C++ source, with scales, zero points, the operators to register, and
# the expected outputs for some examples, for a test on the device. A camera can pass its
# [pixels](../feeding.md#camera-pixels) directly.

# %%
keras_qat.export_c(qat, "scanner.cc", examples=x_test[:2])
with open("scanner.h") as header:
    print(header.read())

# %% [markdown]
# This firmware needs the sources of [tflite-micro](https://github.com/tensorflow/tflite-micro).
# Compiled for a computer, `Test` returns 0:
#
# ```cpp
# #include "scanner.h"
# #include "tensorflow/lite/micro/micro_interpreter.h"
# #include "tensorflow/lite/micro/micro_mutable_op_resolver.h"
#
# alignas(16) static uint8_t arena[16 * 1024];  // the arena above, plus some for the start
#
# int Test() {
#   tflite::MicroMutableOpResolver<scanner::kOperators> resolver;
#   scanner::AddOperators(resolver);
#   tflite::MicroInterpreter interpreter(
#       tflite::GetModel(scanner::kFile), resolver, arena, sizeof(arena));
#   if (interpreter.AllocateTensors() != kTfLiteOk) return 1;
#   for (size_t example = 0; example < scanner::kGoldenExamples; ++example) {
#     for (size_t i = 0; i < scanner::kLinesSize; ++i)
#       interpreter.input(0)->data.int8[i] = scanner::kGoldenLines[example][i];
#     if (interpreter.Invoke() != kTfLiteOk) return 1;
#     for (size_t i = 0; i < scanner::kScoresSize; ++i)
#       if (interpreter.output(0)->data.int8[i] != scanner::kGoldenScores[example][i]) return 1;
#   }
#   return 0;
# }
# ```
#
# CMSIS-NN and ESP-NN have other kernels: see [Microcontrollers](../boards.md), and
# [Targets](../targets.md) for NPUs.

# %% [markdown]
# `simulate` returns the same expected outputs in Python, with the values of all tensors:

# %%
golden = keras_qat.simulate(qat, x_test)
codes = golden.outputs["scores"].codes
np.testing.assert_array_equal(codes.argmax(-1), qat.predict(x_test, verbose=0).argmax(-1))
codes[:2]
