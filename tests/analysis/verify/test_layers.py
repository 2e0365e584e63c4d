"""Tests that verification layer by layer names the differing layer, and counts correctly."""

import dataclasses
import importlib.metadata
import importlib.util

import numpy as np
import pytest

import keras_qat
from keras_qat.tflite.interpreter import KERNELS, FileInterpreter
from keras_qat.tflite.reader import FileGraph
from tests.helpers import images, keras, observe, scramble
from tests.networks.small import functional, layers, tiny_net

HERE = [kernels for kernels in KERNELS if kernels != "xnnpack_arm64"]
"""Kernels that any machine has: tests/arm64 runs those of ARM."""

NAMES = ["image", "stem", "depthwise", "project", "merge_relu", "pool", "flatten", "logits"]


@pytest.fixture(scope="module")
def report(exported):
    return keras_qat.verify(exported.model, exported.tflite, exported.x, per_layer=True)


def row(report, name):
    (result,) = [tensor for tensor in report.tensors if tensor.name == name]
    return result


def broken(exported, name):
    """Returns the file with one changed quantized value among a layer's weights."""
    graph = FileGraph(exported.tflite)
    interpreter = FileInterpreter(exported.tflite).interpreter
    (operation,) = [
        operation
        for operation in graph.operations
        if len(operation.inputs) > 1
        and graph.tensors[operation.inputs[1]].name == f"keras_qat/quant_{name}/weights"
    ]
    codes = interpreter.get_tensor(operation.inputs[1])
    changed = codes.copy()
    index = np.unravel_index(np.argmin(codes), codes.shape)
    changed[index] += 40
    assert exported.tflite.count(codes.tobytes()) == 1
    return exported.tflite.replace(codes.tobytes(), changed.tobytes())


@pytest.mark.legacy
def test_every_layer_is_there_and_agrees(report):
    assert [tensor.name for tensor in report.tensors] == NAMES
    assert report.differing == report.other_ranges == report.merged == ()
    assert report.float_operations == {}
    for tensor in report.tensors[1:]:
        assert tensor.fed.identical >= 0.999
        assert tensor.fed.max_difference <= 1
        assert tensor.run.identical >= 0.99
    assert row(report, "stem").layers == ("stem", "stem_bn", "stem_relu")
    assert row(report, "merge_relu").layers == ("merge", "merge_relu")
    assert row(report, "merge_relu").kernels == ("ADD",)
    assert row(report, "logits").layers == ("logits",)


def test_scales_and_zero_points_are_those_of_both_sides(exported, report):
    ranges = {quantizer.name: quantizer for quantizer in keras_qat.quantizers(exported.model)}
    for name in ("stem", "depthwise", "project", "logits"):
        minimum = ranges[f"quant_{name}/output"].minimum
        scale = (ranges[f"quant_{name}/output"].maximum - minimum) / 255
        result = row(report, name)
        assert result.scale == pytest.approx(scale, rel=1e-6)
        assert result.file_scale == pytest.approx(scale, rel=1e-6)
        assert result.zero_point == result.file_zero_point == round(-minimum / scale) - 128
        assert result.scale_ulps <= 2
        assert result.same_range


def test_free_run_ends_in_the_figures_of_the_outputs(report):
    (outputs,) = report.outputs
    logits = row(report, "logits").run
    assert logits.identical == outputs.identical
    assert logits.max_difference == outputs.max_difference
    assert logits.mean_difference == pytest.approx(outputs.mean_difference)


def test_a_fed_layer_is_what_numpy_computes_from_the_models_codes(exported):
    """Computes the dense layer from its int8 weights and int32 bias with TFLite's rounding."""
    model, x = exported.model, exported.x
    simulated = keras_qat.simulate(model, x)
    inputs, expected = simulated.tensors["flatten"], simulated.outputs["logits"]
    file = FileInterpreter(exported.tflite)
    details = {tensor["index"]: tensor for tensor in file.interpreter.get_tensor_details()}
    ((_, weights, bias),) = [
        operation["inputs"]
        for operation in file.interpreter._get_ops_details()
        if operation["op_name"] == "FULLY_CONNECTED"
    ]
    codes = inputs.codes.astype(np.int64) - inputs.zero_point
    sums = codes @ file.interpreter.get_tensor(weights).T.astype(np.int64)
    sums += file.interpreter.get_tensor(bias)
    scales = details[weights]["quantization_parameters"]["scales"].astype(np.float64)
    factors = np.float64(inputs.scale) * scales / np.float64(expected.scale)
    # The reference kernel multiplies in double precision. Halves round away from zero.
    products = sums * factors
    result = np.sign(products) * np.floor(np.abs(products) + 0.5) + expected.zero_point
    differences = np.abs(np.clip(result, -128, 127) - expected.codes)
    report = keras_qat.verify(
        model, exported.tflite, x, per_layer=True, kernels="reference", batch_size=96
    )
    fed = row(report, "logits").fed
    assert fed.identical == np.mean(differences == 0)
    assert fed.max_difference == differences.max()


def test_saturation_and_noise_are_what_numpy_counts(exported, report):
    file = FileInterpreter(exported.tflite)
    codes = file.run({"image": exported.x})["logits"]
    logits = row(report, "logits")
    assert logits.at_highest == np.mean(codes == 127)
    assert logits.at_lowest == np.mean(codes == -128)
    # The float layers with the trained weights.
    inner = {layer.name: layer for layer in exported.model._flatten_layers()}
    plain = keras.models.clone_model(exported.float_model)
    for layer in plain.layers:
        if layer.weights:
            layer.set_weights(inner[layer.name].get_weights())
    exact = plain.predict(exported.x, verbose=0).astype(np.float64)
    noise = file.outputs["logits"].dequantize(codes) - exact
    ratio = ((exact - exact.mean(0)) ** 2).sum() / (noise**2).sum()
    assert logits.sqnr == pytest.approx(10 * np.log10(ratio), abs=0.01)


def test_batches_make_no_difference(exported, report):
    other = keras_qat.verify(
        exported.model, exported.tflite, exported.x, per_layer=True, batch_size=7
    )
    for mine, theirs in zip(other.tensors, report.tensors, strict=True):
        sums = {"sqnr": None, "spread": 0.0, "float_range": (0.0, 0.0)}
        assert dataclasses.replace(mine, **sums) == dataclasses.replace(theirs, **sums)
        assert mine.sqnr == pytest.approx(theirs.sqnr)
        assert mine.spread == pytest.approx(theirs.spread)
        assert mine.float_range == pytest.approx(theirs.float_range)


@pytest.mark.parametrize("kernels", ["optimized", "reference"])
def test_tflites_own_kernels_stay_within_one_step(exported, kernels):
    """TFLite's kernels round twice, which changes 0.3 % of the values if there are few inputs."""
    report = keras_qat.verify(
        exported.model, exported.tflite, exported.x, per_layer=True, kernels=kernels
    )
    assert report.kernels == kernels
    for tensor in report.tensors[1:]:
        assert tensor.fed.identical >= 0.99
        assert tensor.fed.max_difference <= 1
    if kernels == "reference":
        # The integer simulation shows that only rounding differs.
        assert report.differing and report.unexplained == ()
        assert any("round differently" in finding for finding in report.findings())


@pytest.mark.parametrize("name", ["stem", "project", "logits"])
def test_names_the_layer_with_a_wrong_weight(exported, name):
    report = keras_qat.verify(exported.model, broken(exported, name), exported.x, per_layer=True)
    assert [item.name for item in report.unexplained] == [name]
    # In the free run, everything downstream differs, too.
    assert row(report, "logits").run.identical < 0.9
    assert any(name in sentence for sentence in report.findings())


def test_notices_other_ranges(exported):
    other = keras_qat.quantize_model(exported.model)
    (maximum,) = [
        weight
        for weight in other.get_layer("quant_project").weights
        if weight.name.split("/")[-1].startswith("output_max:")
    ]
    maximum.assign(1.5 * maximum)
    with pytest.warns(UserWarning, match="other weights or ranges"):
        report = keras_qat.verify(other, exported.tflite, exported.x, per_layer=True)
    assert [other_range.name for other_range in report.other_ranges] == ["project"]
    assert any("Ranges" in finding and "project" in finding for finding in report.findings())
    result = row(report, "project")
    assert result.scale > 1.2 * result.file_scale
    assert "project" in str(report)


def test_notices_a_file_of_another_model_with_the_same_ends(exported):
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(2, 3, name="another_conv"),
            layers.Flatten(),
            layers.Dense(3, name="logits"),
        ]
    )
    file = keras_qat.export_tflite(observe(keras_qat.quantize_model(model), exported.x))
    with (
        pytest.warns(UserWarning, match="another model than 'residual'"),
        pytest.raises(ValueError, match=r"another model: .* quant_another_conv"),
    ):
        keras_qat.verify(exported.model, file, exported.x, per_layer=True)


def test_refuses_a_file_that_names_no_layers(exported):
    unnamed = exported.tflite.replace(b"keras_qat/", b"something/")
    with pytest.raises(ValueError, match="does not name its layers"):
        keras_qat.verify(exported.model, unnamed, exported.x, per_layer=True)


def test_notices_what_is_computed_in_float():
    def build(x):
        x = layers.Conv2D(4, 3, name="first")(x)
        x = layers.LayerNormalization(name="norm")(x)
        return layers.Conv2D(3, 3, name="last")(x)

    model = functional((8, 8, 2), build=build)
    x = images(32, (8, 8, 2))
    qat = observe(keras_qat.quantize_model(model), x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert list(report.float_operations) == ["norm"]
    assert any("in float: norm" in finding for finding in report.findings())
    assert [tensor.name for tensor in report.tensors][1:] == ["first", "norm", "last"]
    assert row(report, "last").fed.identical >= 0.999


def test_names_calls_and_nested_layers_of_several_inputs():
    inner = keras.Sequential(
        [keras.Input((6, 6, 3)), layers.Conv2D(3, 3, padding="same", name="conv")], name="block"
    )
    inputs = {name: keras.Input((6, 6, 3), name=name) for name in ("left", "right")}
    join = layers.Concatenate(name="join")([inner(inputs["left"]), inner(inputs["right"])])
    add = layers.Add(name="sum")([inputs["left"], inputs["right"]])
    model = scramble(keras.Model(inputs, {"a": layers.Conv2D(2, 1, name="a")(join), "sum": add}))
    x = {"left": images(24, (6, 6, 3)), "right": 2 * images(24, (6, 6, 3), seed=5)}
    qat = keras_qat.quantize_model(model)
    keras_qat.freeze_batch_norm(qat)
    qat(x, training=True)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert {tensor.name for tensor in report.tensors} == {
        *("left", "right", "block/conv", "block/conv#2", "join", "a", "sum")
    }
    assert row(report, "join").layers == ("join",)
    assert row(report, "block/conv#2").layers == ("block/conv",)
    # The calls have inputs of different scales. The shared bias is exact for both.
    for tensor in report.tensors[2:]:
        assert tensor.fed.identical >= 0.995
        assert tensor.fed.max_difference <= 1


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_other_types_at_the_ends(exported, report, dtype):
    file = keras_qat.export_tflite(exported.model, input_dtype=dtype, output_dtype=dtype)
    result = keras_qat.verify(exported.model, file, exported.x, per_layer=True)
    assert [tensor.name for tensor in result.tensors] == NAMES
    for mine, theirs in zip(result.tensors[1:], report.tensors[1:], strict=True):
        assert mine.fed == theirs.fed
        assert mine.file_zero_point == theirs.file_zero_point


def test_few_bits_end_at_their_own_highest_code():
    qat = keras_qat.quantize_model(tiny_net(), keras_qat.recipes.int8(activation_bits=3))
    x = images(64, (6, 6, 2))
    observe(qat, x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert report.differing == ()
    # One of the 64 inputs is by far the largest. With 8 levels, many values are rounded to it.
    assert 0 < row(report, "conv").at_highest < 0.2
    assert row(report, "conv").at_lowest > 0.2


def test_ranges_that_follow_from_others():
    """With `contrib`, as in the original, pooling has no quantizer, but the file rounds there."""
    model = functional(
        (8, 8, 2),
        build=lambda x: layers.Dense(3, name="logits")(
            layers.Flatten()(layers.AveragePooling2D(name="pool")(layers.Conv2D(4, 3, name="c")(x)))
        ),
    )
    x = images(64, (8, 8, 2))
    qat = observe(keras_qat.quantize_model(model, "contrib"), x)
    file = keras_qat.export_tflite(qat, input_range=(-4.0, 4.0))
    report = keras_qat.verify(qat, file, np.clip(x, -4, 4), per_layer=True)
    pool = row(report, "pool")
    assert pool.same_range
    assert pool.scale == pool.file_scale == row(report, "c").file_scale
    assert pool.fed.max_difference <= 1


def test_table_fits_a_terminal(report):
    lines = report.table().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(str(report.verdict)[:30]) for line in lines)
    (line,) = [line for line in lines if line.startswith("depthwise")]
    assert "DEPTHWISE_CONV_2D" in line and "%" in line
    long = dataclasses.replace(report.tensors[1], name="a_very_long_name/" * 5)
    lines = dataclasses.replace(report, tensors=(long,)).table(100).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("…" in line for line in lines)


def test_unknown_kernels(exported):
    with pytest.raises(ValueError, match="'xnnpack', 'xnnpack_arm64', 'optimized', 'reference'"):
        keras_qat.verify(exported.model, exported.tflite, exported.x, kernels="fast")


def test_the_runtime_that_ran_is_named(exported):
    model, file, x = exported.model, exported.tflite, exported.x
    report = keras_qat.verify(model, file, x, runtime="tensorflow")
    assert report.runtime == f"tensorflow {importlib.metadata.version('tensorflow')}"
    assert report.max_difference <= 1
    off = [dataclasses.replace(tensor, identical=0.5) for tensor in report.outputs]
    other = dataclasses.replace(report, outputs=tuple(off))
    assert f"Run by {report.runtime}." in str(other)
    with pytest.raises(ValueError, match="runtime='litert': use one of 'ai-edge-litert'"):
        keras_qat.verify(model, file, x, runtime="litert")
    if importlib.util.find_spec("tflite_runtime") is None:
        with pytest.raises(ImportError, match="pip install tflite-runtime"):
            keras_qat.verify(model, file, x, runtime="tflite-runtime")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", HERE)
def test_files_that_take_one_example_at_a_time(kernels):
    """All examples are passed at once, although sizes in the file only allow one."""
    x = inputs = keras.Input((4, 6), name="steps")
    x = layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    model = keras.Model(inputs, layers.Dense(3, name="logits")(layers.Flatten()(x)))
    x = images(6, (4, 6))
    qat = observe(keras_qat.quantize_model(scramble(model)), x)
    contents = keras_qat.export_tflite(qat, batch_size=1)
    report = keras_qat.verify(qat, contents, x, per_layer=True, kernels=kernels)
    assert report.examples == 6
    assert {tensor.simulated for tensor in report.tensors} == {
        1.0 if kernels != "optimized" else None
    }
