"""Tests messages for users' mistakes: which layer, what happened, what to do."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.callbacks import FreezeBatchNorm, QuantDelay
from tests.helpers import Trainer, images, keras, observe
from tests.networks.small import functional, layers, tiny_net

pytestmark = pytest.mark.legacy
X = images(16, (6, 6, 2))


def refuse_weights(**weights):
    return keras_qat.register_op(Mine, "dense", weights=weights)


SCOPES = {
    r"'logitss' matches no layer. Did you mean 'logits'\? .*conv, bn": ["conv", "logitss"],
    r"'conv2', 'Dens' matches no layer. Did you mean 'conv', 'Dense'\?": ("conv2", "Dens"),
    "^The function <lambda> matches no layer. The layers are: conv": lambda layer: False,
    r"'head\*' matches no layer. The layers are: conv": ["conv", "head*"],
    "3 is not a scope: pass the name of a layer": 3,
    "'' is not a scope: pass the name of a layer": "",
    "The scope contains a class: pass its name, 'Dense'": layers.Dense,
    "The scope contains a layer: pass its name, 'r'": [layers.ReLU(name="r")],
}


@pytest.mark.parametrize("message", SCOPES)
def test_scopes(message):
    for verb in (keras_qat.plan, keras_qat.quantize_model):
        with pytest.raises(ValueError, match=message):
            verb(tiny_net(), scope=SCOPES[message])


OPTIONS = {
    "target='etos_u55': use one of 'xnnpack', 'tflm'": {"target": "etos_u55"},
    "kernels='xnpack': use one of 'xnnpack'": {"kernels": "xnpack"},
    "TFLite Micro has the kernels 'tflm'. Leave": {"target": "tflm", "kernels": "xnnpack"},
    "has no kernels for .* 16 bits": {"target": "edgetpu", "recipe": recipes.int16x8()},
    "'convv' matches no layer. Did you mean 'conv'": {
        "recipe": recipes.int8().override("convv", weight_bits=4)
    },
    r"recipes.int8 is the function .*: pass int8\(\)": {"recipe": recipes.int8},
    r"no recipe {'bits': 4}. Use one of \['contrib'": {"recipe": {"bits": 4}},
    "no recipe 'int16'. Did you mean 'int16x8'": {"recipe": "int16"},
    r"Target. Did you mean 'ethos_u55'\?": {"target": "ethosu55"},
}


@pytest.mark.parametrize("message", OPTIONS)
def test_options(message):
    with pytest.raises(ValueError, match=message):
        keras_qat.quantize_model(tiny_net(), **OPTIONS[message])


COUNTS = {
    "steps='percentile'": lambda qat: keras_qat.calibrate(qat, X, "percentile"),
    "steps=0": lambda qat: keras_qat.calibrate(qat, X, steps=0),
    "batch_size=0": lambda qat: keras_qat.calibrate(qat, X, batch_size=0),
    "iterations=0": lambda qat: keras_qat.learn_rounding(qat, X, iterations=0),
    "examples=1.5": lambda qat: keras_qat.diagnose(qat, X, examples=1.5),
    "batch_size=False": lambda qat: keras_qat.simulate(qat, X, batch_size=False),
    "batch_size=-1": lambda qat: keras_qat.verify(qat, b"TFL3", X, batch_size=-1),
    "batch_size='1'": lambda qat: keras_qat.export_tflite(qat, batch_size="1"),
}
MISTAKES = {
    **{f"{given}: pass an integer of at least 1": call for given, call in COUNTS.items()},
    "a layer or a class, e.g. 'Dense'": lambda _: recipes.int8().override(layers.Dense),
    "a layer or a class, e.g. 'r'": lambda _: recipes.int8().override(layers.ReLU(name="r")),
    "a class, e.g. 'Dense'": lambda _: recipes.int8().override("", weight_bits=4),
    "or a class, e.g. 'Dense'": lambda _: recipes.int8().override(lambda layer: True),
    r"override\('Dense'\) changes nothing.*quantize=": lambda _: recipes.int8().override("Dense"),
    "once for each": lambda _: recipes.int8().override(["a", "b"], quantize=False),
    "the function tiny_net: pass its": lambda _: keras_qat.quantize_model(tiny_net),
    "Expected a Keras model, got bytes": lambda _: keras_qat.diagnose(b"file", X),
    "got the model 'tiny': pass a file": lambda _: keras_qat.TFLiteModel(tiny_net()),
    r"float model.*plan\(model, target='tflm'\)\.problems": lambda _: keras_qat.targets.problems(
        tiny_net(), "tflm"
    ),
    r"no operator 'moves'. Did you mean 'move'\? The op": lambda _: keras_qat.register_op(
        Mine, "moves"
    ),
    "pass Mine, without parentheses": lambda _: keras_qat.register_op(Mine(), "softmax"),
    "got 'Mine': pass the class itself": lambda _: keras_qat.register_op("Mine", "softmax"),
    r"counted from the end: \(-1,\), or \(\)": lambda _: refuse_weights(weight=(1,)),
    r"from the end: \(-1,\), or \(\)": lambda _: refuse_weights(weight="kernel"),
    r"the output channels of dense are axes \(-1,\)": lambda _: refuse_weights(weight=(-2,)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message):
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        MISTAKES[message](keras_qat.quantize_model(tiny_net()))


def test_what_is_no_model():
    order = "arguments come in the order model, file, data"
    for given, message in (
        (b"TFL3", order),
        (X, order),
        (keras.Model, "got the class Model"),
        ([keras.Sequential()], "got a list of models. Pass one model per call"),
        ("model.tflite", r"file 'model\.tflite', which cannot be turned into one\. Arguments come"),
        ("model.keras", r"Load it first: keras\.models\.load_model\('model\.keras'\)"),
    ):
        with pytest.raises(ValueError, match=message):
            keras_qat.verify(given, b"TFL3", X)
        for verb in (keras_qat.quantize_model, keras_qat.strip_quantization, keras_qat.plan):
            with pytest.raises(ValueError, match=message):
                verb(given)


OF_FLOAT_MODELS = {
    "quantizers": keras_qat.quantizers,
    "summary": keras_qat.summary,
    "calibrate": lambda model: keras_qat.calibrate(model, X),
    "simulate": lambda model: keras_qat.simulate(model, X),
    "diagnose": lambda model: keras_qat.diagnose(model, X),
    "verify": lambda model: keras_qat.verify(model, b"TFL3", X),
    "set_quantization": keras_qat.set_quantization,
    "freeze_batch_norm": keras_qat.freeze_batch_norm,
    "freeze_ranges": keras_qat.freeze_ranges,
    "export_c": lambda model: keras_qat.export_c(model, "model.cc"),
    "export_tflite": keras_qat.export_tflite,
    "export_saved_model": lambda model: keras_qat.export_saved_model(model, "folder"),
    "QuantDelay": lambda model: QuantDelay(2, model=model).on_train_begin(),
}


@pytest.mark.parametrize("verb", OF_FLOAT_MODELS)
def test_float_models(verb):
    with pytest.raises(
        ValueError, match=r"'tiny' is not quantization-aware: call keras_qat\.quantize_model"
    ):
        OF_FLOAT_MODELS[verb](tiny_net())


@pytest.mark.parametrize(("name", "verb"), [("m.tflite", "export_tflite"), ("m.cc", "export_c")])
def test_saving_what_is_exported(name, verb, tmp_path):
    """Keras would create a directory of that name."""
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(ValueError, match=rf"call keras_qat\.{verb}\(model, '.*{name}'\)"):
        qat.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("weights.h5", {}), ("checkpoint", {}), ("new.weights.h5", {})),
        *(("weights.h5", {"by_name": True}), ("whole.h5", {"by_name": True})),
    ],
)
def test_weights_of_the_float_model(name, options, tmp_path):
    """From a checkpoint, Keras would silently load some weights, and none by name."""
    model = tiny_net()
    (model.save if name == "whole.h5" else model.save_weights)(str(tmp_path / name))
    qat = keras_qat.quantize_model(model)
    with pytest.raises(
        ValueError, match="Load float weights into the float model, and then quantize"
    ):
        qat.load_weights(str(tmp_path / name), **options)
    qat.save_weights(str(tmp_path / "same.h5"))
    qat.load_weights(str(tmp_path / "same.h5"), by_name=True)
    with pytest.raises(ValueError, match=r"9 weights were passed, but 'tiny' has \d+, including"):
        qat.set_weights([*model.get_weights(), np.zeros(1)])


def test_training_data_with_nan():
    """The training data contains NaN. Training has not diverged."""
    qat = keras_qat.quantize_model(tiny_net())
    x = X.copy()
    x[3, 0, 0, 0] = np.nan
    qat(x, training=True)
    with pytest.raises(ValueError, match=r"data for 'image' held NaN .*Remove such examples"):
        keras_qat.export_tflite(qat)


class Mine(layers.Layer):
    """A dense layer."""

    def build(self, shape):
        self.weight = self.add_weight("kernel", (shape[-1], 3))
        self.offset = self.add_weight("bias", (3,))

    def call(self, x):
        return x @ self.weight + self.offset


NO_KERNEL = r"Mine was registered .* 'kernel', which layer 'mine' does not have.*: weight, offset\."
REGISTERED = [
    ("dense", {"weights": {"kernel": (-1,)}}, NO_KERNEL),
    ("dense", {"weights": {"weight": (), "kernel": (-1,)}}, NO_KERNEL),
    ("dense", {"weights": {"weight": (-1,)}}, "layer 'mine' also has weights in offset"),
    (
        "softmax",
        {"attributes": lambda layer: {"axis": layer.dim}},
        "Mine was registered as softmax .* layer 'mine': .* no attribute 'dim'",
    ),
]


@pytest.mark.parametrize(("kind", "options", "message"), REGISTERED)
def test_registrations_that_do_not_fit_the_layer(kind, options, message):
    model = functional((4,), build=Mine(name="mine"))
    registration = keras_qat.register_op(Mine, kind, **options)
    with registration, pytest.raises(ValueError, match=message):
        keras_qat.quantize_model(model)


def test_names_of_simulated_tensors():
    qat = observe(keras_qat.quantize_model(tiny_net()), X)
    simulated = keras_qat.simulate(qat, X)
    with pytest.raises(KeyError, match=r"no tensor 'logit'. Similar names: logits"):
        simulated.tensors["logit"]
    with pytest.raises(KeyError, match=r"no tensor 'z'. Known names: logits"):
        simulated.outputs["z"]
    assert "logit" not in simulated.tensors
    assert simulated.tensors.get("logit") is None


def test_names_of_layers_with_quantizers():
    listed = keras_qat.quantizers(keras_qat.quantize_model(tiny_net()))
    assert [x.name for x in listed["conv"]] == ["quant_conv/kernel", "quant_conv/output"]
    assert listed["conv/kernel"] == listed["quant_conv/kernel"] == listed["conv"][:1]
    with pytest.raises(KeyError, match=r"no layer or tensor 'logit'. Similar names: logits"):
        listed["logit"]


def test_shapes_that_are_not_known():
    def unknown(x):
        return tf.py_function(lambda a: a, [x], tf.float32)

    model = functional((4,), build=lambda x: layers.Lambda(unknown, name="free")(x))
    with pytest.raises(ValueError, match=r"'free' of .*number of axes.*tf.ensure_shape"):
        keras_qat.quantize_model(model)


@pytest.mark.slow
def test_converter_of_tflite():
    """Users of tfmot call it first."""
    qat = observe(keras_qat.quantize_model(tiny_net()), X)
    converter = tf.lite.TFLiteConverter.from_keras_model(qat)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    with pytest.raises(ValueError, match=r"convert 'tiny'.*keras_qat\.export_tflite\(model, path"):
        converter.convert()
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


@pytest.mark.slow
def test_saved_models_tell_the_converter_what_to_call(tmp_path):
    """TFLite's converter refuses float64, and prints the scope of each operation."""
    qat = observe(keras_qat.quantize_model(tiny_net()), X)
    qat.export(tmp_path)
    functions = tf.saved_model.load(str(tmp_path)).signatures["serving_default"].graph
    names = [node.name for f in functions.as_graph_def().library.function for node in f.node_def]
    assert any("convert_with_keras_qat.export_tflite" in name for name in names)


@pytest.mark.parametrize("callback", [QuantDelay, FreezeBatchNorm])
def test_delays_in_a_model_that_trains_others(callback):
    trainer = Trainer(keras_qat.quantize_model(tiny_net()))
    trainer.compile("sgd", "mse")
    message = rf"Trainer 'trainer.*' trains other models.*{callback.__name__}\(2, model=qat\)"
    with pytest.raises(ValueError, match=message):
        trainer.fit(X, np.zeros((16, 3)), verbose=0, callbacks=[callback(2)])


def test_calibration_where_nothing_is_quantized():
    with pytest.warns(UserWarning, match="recipe contrib quantizes nothing") as warned:
        model = keras_qat.quantize_model(functional((4,), build=layers.Softmax()), "contrib")
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.raises(ValueError, match=r"Nothing in '\w+' is quantized: recipe contrib leaves"):
        keras_qat.calibrate(model, images(8, (4,)))


def test_configuration_begins_with_how_to_load_it():
    """Keras 3 shows it at the beginning of an error of thousands of characters."""
    qat = keras_qat.quantize_model(tiny_net())
    name, code = next(iter(qat.get_config().items()))
    assert (name, code.split(";")[0]) == ("load_with", "import keras_qat")
    assert type(qat).from_config(qat.get_config()).name == qat.name
