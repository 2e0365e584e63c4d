# %% [markdown]
# # Several devices
#
# Train a quantized model with a strategy of `tf.distribute`, as any Keras model. The two devices
# here are halves of one processor. With GPUs, omit the next cell.

# %%
import tensorflow as tf

tf.get_logger().setLevel("ERROR")  # The strategy logs each reduction.
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

# %%
import tf_keras as keras
from sklearn.datasets import load_digits

import keras_qat

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

# %% [markdown]
# ## Inside the scope
#
# Build, quantize and compile the model inside the scope of the strategy. Each replica gets half of
# each batch.

# %%
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            keras.layers.Conv2D(32, 3, use_bias=False, name="conv"),
            keras.layers.BatchNormalization(momentum=0.9, name="conv_bn"),
            keras.layers.ReLU(name="conv_relu"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(10, name="logits"),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
batches = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(64)
model.fit(batches, epochs=6, verbose=0)
float_accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
print(f"float: {float_accuracy:.2%} on {strategy.num_replicas_in_sync} replicas")

# %%
with strategy.scope():
    qat = keras_qat.quantize_model(model)
    qat.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
steps = len(batches)  # in an epoch
callbacks = [
    keras_qat.callbacks.QuantDelay(steps),
    keras_qat.callbacks.FreezeBatchNorm(2 * steps),
]
qat.fit(batches, epochs=4, verbose=0, callbacks=callbacks)
accuracy = qat.evaluate(x_test, y_test, verbose=0)[1]
print(f"int8: {accuracy:.2%}")
assert accuracy > 0.85

# %% [markdown]
# ## Ranges
#
# In every step, each replica measures the extremes of its share of the batch, and the
# mean over all replicas updates the moving average. All replicas have the same ranges.

# %%
for quantizer in keras_qat.quantizers(qat):
    if quantizer.name.endswith("output"):
        print(f"{quantizer.name}: {quantizer.minimum:.3f} to {quantizer.maximum:.3f}")

# %%
report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x_test)
print(report)
assert report.identical == 1

# %% [markdown]
# More about clusters, GPUs and interrupted training: [Train faster](../distribution.md).
