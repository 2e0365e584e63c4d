# %% [markdown]
# # From Keras to a microcontroller
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
# ## What the device will run, before any training
#
# A target says which operators there are, of which types, and how they round. `plan` names what
# would not run there, and what helps. Here all of it runs.

# %%
print(keras_qat.plan(model, target="tflm"))

# %% [markdown]
# Had there been a GELU, for which TFLite Micro has no kernel, the plan would have said so:

# %%
bent = keras.Sequential([keras.Input((8, 8)), layers.Activation("gelu", name="bent")])
for problem in keras_qat.plan(bent, target="tflm").problems:
    print(problem)

# %% [markdown]
# ## Training with the device's rounding
#
# TFLite Micro's kernels round in a way of their own. With the target the model computes as they do
# at inference, so that `evaluate` gives the accuracy of the device.

# %%
qat = keras_qat.quantize_model(model, target="tflm")
qat.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
steps = len(x_train) // 32  # of an epoch
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
# The target's files take one example at a time, with all sizes known. `verify` runs this one in
# TFLite Micro's own interpreter (the package `tflite-micro`), on this computer, whole and layer by
# layer: all codes are those of the model. The arena is what the interpreter keeps for tensors; a
# chip of 32 bits keeps somewhat less, and takes more for a moment while it starts.

# %%
keras_qat.export_tflite(qat, "scanner.tflite")
report = keras_qat.verify(qat, "scanner.tflite", x_test, per_layer=True)
print(report)
assert report.identical == 1
print(f"arena: {report.arena_size} bytes")

# %% [markdown]
# Bytes of weights and activations, and multiply-accumulates, for each operator:

# %%
print(keras_qat.summary(qat))

# %% [markdown]
# ## Source for the firmware
#
# The file as C++ source, with scales, zero points, the operators to register, and what the
# kernels give for some examples: a test that runs on the device. Where the sensor is a camera, the
# firmware can hand over its [camera pixels](../feeding.md#camera-pixels).

# %%
keras_qat.export_c(qat, "scanner.cc", examples=x_test[:2])
with open("scanner.h") as header:
    print(header.read())

# %% [markdown]
# The firmware, with the sources of [tflite-micro](https://github.com/tensorflow/tflite-micro) in
# its build. With those of July 2026, their reference kernels and g++ 12 it compiles, and returns 0
# on a computer; on a device it was not run:
#
# ```cpp
# #include "scanner.h"
# #include "tensorflow/lite/micro/micro_interpreter.h"
# #include "tensorflow/lite/micro/micro_mutable_op_resolver.h"
#
# alignas(16) static uint8_t arena[16 * 1024];  // the arena above, and some for the start
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
# With CMSIS-NN or ESP-NN in the build the kernels are others. Their sources say that they give the
# same numbers; the golden examples tell. [Targets](../targets.md) has the NPUs.

# %% [markdown]
# `simulate` gives the same golden outputs in Python, and those of every tensor inside:

# %%
golden = keras_qat.simulate(qat, x_test)
codes = golden.outputs["scores"].codes
np.testing.assert_array_equal(codes.argmax(-1), qat.predict(x_test, verbose=0).argmax(-1))
codes[:2]
