"""Tests damaged and malicious models and data: their code only runs if it is allowed."""

import contextlib
import json
import sys
import zipfile

import h5py
import numpy as np
import pytest

import keras_qat
from keras_qat_cli import models
from tests.cli.running import run
from tests.helpers import images, keras, observe
from tests.networks.small import functional, layers, tiny_net


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a float and a quantized model in both formats in a folder."""
    folder = tmp_path_factory.mktemp("saved")
    model = functional((6,), build=lambda x: layers.Dense(3)(layers.Dense(4, "relu")(x)))
    qat = observe(keras_qat.quantize_model(model), images(8, (6,)))
    for ending in (".keras", ".h5"):
        qat.save(folder / f"qat{ending}")
        model.save(folder / f"float{ending}")
    return folder


def _change(source, path, change):
    """Copies a model, and changes its configuration."""
    path.write_bytes(source.read_bytes())
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            config = json.loads(file.attrs["model_config"])
            change(config["config"])
            file.attrs["model_config"] = json.dumps(config)
        return path
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            contents = archive.read(name)
            if name == "config.json":
                config = json.loads(contents)
                change(config["config"])
                contents = json.dumps(config).encode()
            changed.writestr(name, contents)
    return path


def _entry(kind, argument, kwargs, **config):
    """Returns a layer that is called with a constant while the model is loaded."""
    return {
        "class_name": kind,
        "module": "keras.layers",
        "registered_name": None,
        "config": {"name": "trap", **config},
        "name": "trap",
        "inbound_nodes": [["_CONSTANT_VALUE", -1, argument, kwargs]],
    }


def _function(module, name, kind="function", registered_name=None):
    config = name if kind == "function" else {}
    config = {"class_name": kind, "config": config, "registered_name": registered_name or name}
    return {"module": module, **config}


def _call(argument, *names, **arguments):
    function = {"function": _function(*names), "function_type": "function"}
    shape = {"output_shape": None, "output_shape_type": "raw", "output_shape_module": None}
    return _entry("Lambda", argument, {}, **function, **shape, arguments=arguments)


def _compute(function, argument, **kwargs):
    return _entry("TFOpLambda", argument, kwargs, function=function)


def _save_tensor(harm):
    """Returns a node definition, as in models of TensorFlow 2.3, that writes a checkpoint."""
    types = {"dtypes": {"list": {"type": ["DT_FLOAT"]}}}
    node = {"name": "trap", "op": "SaveV2", "input": list("pnsx"), "attr": types}
    constants = {"0": harm, "1": ["name"], "2": [""]}
    return _entry("TensorFlowOpLayer", [1.0], {}, node_def=node, constants=constants)


def _run_bytecode(harm):
    trap = layers.Lambda(lambda x, path=harm: (open(path, "w").close(), x)[1], name="trap")
    return {**_entry("Lambda", 1.0, {}), **keras.layers.serialize(trap)}


ATTACKS = {
    "a function of Python": lambda harm: _call(f"touch {harm}", "os", "system"),
    "a builtin": lambda harm: _call(f"open({harm!r}, 'w')", "builtins", "eval"),
    "a function as a class": lambda harm: _call(f"touch {harm}", "os", "_", "popen"),
    "a registered name": lambda harm: _call(f"touch {harm}", "os", "_", "_", "popen"),
    "a function of a package": lambda harm: _call(
        harm, "numpy.lib.format", "open_memmap", mode="w+", shape=[1]
    ),
    "a function of Keras": lambda harm: _call(
        harm, "keras.utils", "get_file", origin=f"file://{__file__}"
    ),
    "a function of keras_qat": lambda harm: _call(
        "x", "keras_qat.io.atomic_files", "write_contents", path=harm
    ),
    "a file of TensorFlow": lambda harm: _compute("io.write_file", harm, contents="x"),
    "a module of TensorFlow": lambda harm: _compute("io.gfile.mkdir", harm),
    "a node of TensorFlow": _save_tensor,
    "bytecode": _run_bytecode,
    "bytecode in a wrapper": lambda harm: _entry(
        "TimeDistributed", [[[1.0]]], {}, layer=_run_bytecode(harm)
    ),
}


@pytest.mark.parametrize("ending", [".keras", ".h5"])
@pytest.mark.parametrize("kind", ["qat", "float"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs_while_loading(attack, kind, ending, saved, tmp_path):
    harm = tmp_path / "harm"
    trap = ATTACKS[attack](str(harm))
    harm.unlink(missing_ok=True)
    source = saved / f"{kind}{ending}"
    path = _change(source, tmp_path / f"m{ending}", lambda it: it["layers"].append(trap))
    if kind == "float":  # In a program, Keras loads it; in a command, the library does.
        assert "Keras cannot load" in run("plan", path, code=2)
    else:
        with pytest.raises(ValueError, match=r"safe_mode=False|Unknown|Could not"):
            keras.models.load_model(path)
    assert not list(tmp_path.glob("harm*"))


PLACES = {
    "layer": lambda config, it: config["layers"][2]["config"].update(layer=it),
    "activation": lambda config, it: config["layers"][2]["config"].update(activation=it),
    "batch_norm": lambda config, it: config["layers"][2]["config"].update(batch_norm=it),
    "weight_spec": lambda config, it: config["layers"][2]["config"].update(weight_spec=it),
    "entire layer": lambda config, it: config["layers"].__setitem__(2, it),
    "recipe": lambda config, it: config["recipe"].update(weights=it),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_is_refused_in_every_place(place, saved, tmp_path):
    path, harm = tmp_path / "m.keras", tmp_path / "harm"
    trap = _run_bytecode(str(harm))
    for code in (trap, _function("os", "system"), _function("antigravity", "Layer", "Layer")):
        _change(saved / "qat.keras", path, lambda it, code=code: PLACES[place](it, code))
        error = "safe_mode=False" if code is not trap else r"\w"
        with pytest.raises((ValueError, TypeError, KeyError), match=error):
            keras.models.load_model(path)
    assert not harm.exists()
    assert "antigravity" not in sys.modules


def test_classes_that_train_import_nothing(saved, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text("class Layer: pass")
    monkeypatch.syspath_prepend(tmp_path)
    inner = {"layers": [_function("hostile", "Layer", "Layer")]}
    trained = {**_function("keras", "Sequential", "Sequential"), "config": inner, "left_out": {}}
    path = tmp_path / "m.keras"
    _change(saved / "qat.keras", path, lambda it: it.update(trained_as=trained))
    with pytest.warns(UserWarning, match="module 'hostile', which is not imported"):
        keras.models.load_model(path)
    assert "hostile" not in sys.modules


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_code_that_is_asked_for(ending, tmp_path):
    harm, path = tmp_path / "harm", tmp_path / f"model{ending}"
    trap = _run_bytecode(str(harm))
    functional((6,), build=layers.Lambda.from_config(trap["config"])).save(path)
    harm.unlink()
    assert "--trust" in run("plan", path, code=2)
    assert not harm.exists()
    models.load(path, trust=True)
    assert harm.exists()


def test_graphs_of_saved_models_are_asked_for(tmp_path):
    """Such graphs can read and write files, which no check of a configuration reveals."""
    tiny_net().save(tmp_path / "model", save_format="tf")
    assert "--trust" in run("plan", tmp_path / "model", code=2)
    models.load(tmp_path / "model", trust=True)


DAMAGES = {
    "asked_for": lambda config: config.update(asked_for=3.5),
    "output names": lambda config: config.update(output_names=7),
    "no recipe": lambda config: config.pop("recipe"),
    "bits of a recipe": lambda config: config["recipe"]["weights"].update(bits=99),
    "no layer": lambda config: config["layers"].__setitem__(2, {}),
    "class": lambda config: config["layers"][2].update(class_name=["a"]),
    "fold": lambda config: config["layers"][2]["config"].update(fold="x"),
    "weights": lambda config: config["layers"][2]["config"].update(weights=3),
    "spec": lambda config: config["layers"][1]["config"].update(spec="x"),
    "activation": lambda config: config["layers"][2]["config"].update(activation=3),
    "inputs": lambda config: config["layers"][2].update(inbound_nodes=[[[0, 0, 0, {}]]]),
    "kernels": lambda config: config.update(kernels=None),
    "float layers": lambda config: config.update(float_layers=5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_configurations_say_so(damage, saved, tmp_path):
    path = _change(saved / "qat.keras", tmp_path / "m.keras", DAMAGES[damage])
    with pytest.raises(ValueError, match=r"\w") as caught:
        keras.models.load_model(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 77)], ids=["encrypted", "method"])
def test_unreadable_archives_say_so(offset, value, saved, tmp_path):
    contents = bytearray((saved / "float.keras").read_bytes())
    start = contents.index(b"PK\1\2")
    while start >= 0:  # Each entry of the archive's directory.
        contents[start + offset] |= value
        start = contents.find(b"PK\1\2", start + 4)
    (tmp_path / "m.keras").write_bytes(contents)
    told = run("plan", tmp_path / "m.keras", code=2)
    assert "m.keras is not a Keras model, or it is damaged" in told


def test_stripping_runs_nothing_that_loading_did_not(saved, tmp_path):
    """Stripping reads the float model's configuration, which may have other layers."""
    harm = tmp_path / "harm"
    trap = layers.Lambda.from_config(_run_bytecode(str(harm))["config"])
    config = functional((6,), build=trap).get_config()
    harm.unlink()
    for layer in config["layers"]:  # As in older versions of Keras, which did not check it.
        del layer["module"]
    path = tmp_path / "m.keras"
    _change(saved / "qat.keras", path, lambda it: it.update(float_config=config))
    loaded = keras.models.load_model(path)
    for model in (loaded, keras_qat.quantize_model(loaded)):
        with pytest.raises(ValueError, match="safe_mode=False"):
            keras_qat.strip_quantization(model)
    assert not harm.exists()
    trusted = keras.models.load_model(path, safe_mode=False)
    with contextlib.suppress(Exception):  # It is another model.
        keras_qat.strip_quantization(trusted)
    assert harm.exists()


def test_data_that_is_pickled(saved, tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")

    objects = np.array([Trap()], object)
    np.save(tmp_path / "x.npy", objects)
    np.savez(tmp_path / "x.npz", objects)
    (tmp_path / "raw.npy").write_bytes(objects.dumps())
    header = str({"descr": "<f4", "fortran_order": False, "shape": (10**15, 6)}).encode()
    (tmp_path / "huge.npy").write_bytes(b"\x93NUMPY\x01\0" + bytes([len(header), 0]) + header)
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.write(tmp_path / "huge.npy", "x.npy")
    (tmp_path / "harm").unlink(missing_ok=True)
    for name in ("x.npy", "x.npz", "raw.npy", "huge.npy", "huge.npz"):
        told = run("simulate", saved / "qat.keras", tmp_path / name, code=2)
        assert f"{name} contains no readable array of numbers" in told
    assert not (tmp_path / "harm").exists()
