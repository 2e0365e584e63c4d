"""Tests a small member of each family of `keras.applications`, from float model to int8 file.

Families differ in their blocks, so each model has few blocks, or ends after its first blocks.
`python -m benchmarks.zoo` uses the complete models.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.comparison import KERNELS, assert_identical
from tests.helpers import keras, rng

apps = keras.applications
CLASSES = 10
OPTIONS = {"weights": None, "classes": CLASSES, "classifier_activation": None}
SMALL = {"input_shape": (32, 32, 3), **OPTIONS}


def module(constructor: Any) -> Any:
    """Returns the module of a constructor. It has a general constructor for any blocks, too."""
    return inspect.getmodule(constructor)


def cut(model: Any, layer: str) -> Any:
    x = keras.layers.GlobalAveragePooling2D()(model.get_layer(layer).output)
    return keras.Model(model.input, keras.layers.Dense(CLASSES, name="logits")(x))


def resnet(version: int) -> Any:
    resnet = module(apps.ResNet50)
    stack = (resnet.stack1, resnet.stack2)[version - 1]

    def stacks(x: Any) -> Any:
        x = stack(x, 8, 2, **({"stride1": 1} if version == 1 else {}), name="conv2")
        return stack(x, 16, version, **({} if version == 1 else {"stride1": 1}), name="conv3")

    return resnet.ResNet(stacks, preact=version == 2, use_bias=True, **SMALL)


def resnet_rs() -> Any:
    blocks = [{"input_filters": 16, "num_repeats": 2}, {"input_filters": 24, "num_repeats": 1}]
    return module(apps.ResNetRS50).ResNetRS(depth=50, block_args=blocks, **SMALL)


def densenet() -> Any:
    return module(apps.DenseNet121).DenseNet([2, 1, 1, 1], **SMALL)


def efficientnet() -> Any:
    efficientnet = module(apps.EfficientNetB0)
    (block,) = efficientnet.DEFAULT_BLOCKS_ARGS[1:2]
    return efficientnet.EfficientNet(0.5, 1.0, 32, blocks_args=[{**block, "repeats": 2}], **SMALL)


def efficientnet_v2() -> Any:
    efficientnet = module(apps.EfficientNetV2B0)
    fused, _, plain = efficientnet.DEFAULT_BLOCKS_ARGS["efficientnetv2-b0"][1:4]
    blocks = [{**fused, "num_repeat": 1}, {**plain, "num_repeat": 2}]
    return efficientnet.EfficientNetV2(0.5, 1.0, 32, blocks_args=blocks, **SMALL)


def regnet(block_type: str) -> Any:
    sizes = [1, 1, 1, 1], [16, 24, 32, 40], 8
    return module(apps.RegNetX002).RegNet(*sizes, block_type, 32, **SMALL)


def convnext() -> Any:
    sizes = [1, 1, 1, 1], [8, 16, 24, 32]
    return module(apps.ConvNeXtTiny).ConvNeXt(*sizes, layer_scale_init_value=0.5, **SMALL)


def nasnet() -> Any:
    model = module(apps.NASNetMobile).NASNet(
        (32, 32, 3), 96, 1, 8, skip_reduction=False, weights=None, include_top=False
    )
    return cut(model, "normal_concat_0")


def whole(constructor: Any, size: int = 32, layer: str = "", **options: Any) -> Any:
    """Returns a complete model, or the model up to a layer."""
    top = {"include_top": False, "weights": None} if layer else OPTIONS
    model = constructor(input_shape=(size, size, 3), **top, **options)
    return cut(model, layer) if layer else model


FAMILIES: dict[str, Callable[[], Any]] = {
    "vgg": lambda: whole(apps.VGG16, layer="block3_pool"),
    "resnet": lambda: resnet(1),
    "resnet_v2": lambda: resnet(2),
    "resnet_rs": resnet_rs,
    "inception": lambda: whole(apps.InceptionV3, 75, "mixed0"),
    "inception_reduction": lambda: whole(apps.InceptionV3, 75, "mixed4"),
    "inception_resnet": lambda: whole(apps.InceptionResNetV2, 75, "block35_1_ac"),
    "xception": lambda: whole(apps.Xception, 71, "block4_sepconv1_act"),
    "mobilenet": lambda: whole(apps.MobileNet, alpha=0.25, layer="conv_pw_5_relu"),
    "mobilenet_v2": lambda: whole(apps.MobileNetV2, alpha=0.35, layer="block_4_add"),
    "mobilenet_v3": lambda: whole(apps.MobileNetV3Small, layer="expanded_conv_3/project/BatchNorm"),
    "mobilenet_v3_minimalistic": lambda: whole(
        apps.MobileNetV3Small, layer="expanded_conv_3/project/BatchNorm", minimalistic=True
    ),
    "densenet": densenet,
    "nasnet": nasnet,
    "efficientnet": efficientnet,
    "efficientnet_v2": efficientnet_v2,
    "convnext": convnext,
    "regnet_x": lambda: regnet("X"),
    "regnet_y": lambda: regnet("Y"),
}
FLOAT = {"convnext": {"LayerNormalization"}}
"""Layers for which the runtime has no int8 kernel."""


@functools.cache
def taken_through(family: str) -> tuple[Any, Any, np.ndarray, bytes, Any]:
    """Returns plan, trained model, inputs, file and report of a family, computed once.

    BatchNormalization has the offset 1.5, so most units are in the linear range of their
    activation. Otherwise random deep networks would amplify a difference of one step.
    """
    keras.utils.set_random_seed(1)
    model = FAMILIES[family]()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.center:
            layer.beta.assign(np.full(layer.beta.shape, 1.5))
    bytes_in = any(isinstance(layer, keras.layers.Rescaling) for layer in model._flatten_layers())
    x = rng(1).uniform(*((0, 255) if bytes_in else (-1, 1)), (16, *model.input_shape[1:]))
    x = x.astype(np.float32)
    qat = keras_qat.quantize_model(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Runs eagerly, because tracing takes longer than the step. The benchmark traces.
    qat.compile(keras.optimizers.SGD(1e-4), loss, run_eagerly=True)
    assert np.isfinite(qat.train_on_batch(x[:4], np.arange(4)))
    keras_qat.freeze_batch_norm(qat)
    for start in range(0, len(x), 8):
        qat(x[start : start + 8], training=True)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x)
    return keras_qat.plan(model), qat, x, contents, report


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_computes_in_int8(family):
    plan, _, _, contents, _ = taken_through(family)
    kinds = {call.name: type(call.layer).__name__ for call in plan.graph.calls}
    assert {kinds[name] for name in plan.float_layers} == FLOAT.get(family, set())
    floating = {
        name
        for name, reads, writes in FileInterpreter(contents).operations()
        if any(dtype.kind == "f" for dtype in reads + writes)
    }
    kernels = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "BATCH_MATMUL"}
    assert not floating & kernels
    assert family in FLOAT or not floating


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_gives_the_codes_of_the_model(family):
    (output,) = taken_through(family)[-1].outputs
    assert output.mean_difference <= (1 if family in FLOAT else 0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_integer_simulation_gives_the_codes_of_the_file(family, kernels):
    _, qat, x, contents, _ = taken_through(family)
    if family in FLOAT:  # Sums in float depend on their order.
        assert keras_qat.simulate(qat, x, kernels).float_layers
    else:
        assert assert_identical(qat, x, kernels, contents).float_layers == ()


def test_a_mean_over_one_pixel_keeps_its_range():
    """The converter drops a mean over one pixel, as in RegNet at 32 pixels."""
    inputs = keras.Input((2, 2, 4))
    x = keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = keras.layers.GlobalAveragePooling2D(keepdims=True, name="mean")(x)
    plan = keras_qat.plan(keras.Model(inputs, keras.layers.Conv2D(4, 1)(x)))
    (mean,) = (row for row in plan.rows if row.tensor == "mean")
    assert isinstance(mean.spec, keras_qat.specs.SharedSpec)
