"""Files that version 0.1.0 wrote: models load, and compute, train and export as they did then.

The files of tests/fixtures were written on TensorFlow 2.15 and 2.21. Each of the two runs all of
the tests on its own. TensorFlow 2.21 also loads models of 2.15, as those who move on from there do.
Not the other way round: Keras 2.15 itself refuses what the InputLayer of later ones writes
(`Unrecognized keyword arguments: ['optional']`). Weights alone go both ways.
"""

from __future__ import annotations

import dataclasses
import functools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import keras
from tests.fixtures.make import EPOCH, codes_of, outputs_of, ranges_of, train
from tests.fixtures.models import CASES, Case

pytestmark = pytest.mark.legacy

FOLDER = Path(__file__).parent / "fixtures"
OF_2_15, OF_2_21 = "0.1.0-tf2.15", "0.1.0-tf2.21"
OWN, OTHER = (OF_2_15, OF_2_21) if tf.__version__.startswith("2.15.") else (OF_2_21, OF_2_15)

WEIGHTS_ALONE = (".weights.h5", ".ckpt")

MOVED_ON = ("int8_network", "int8_sequence", "int16x8", "contrib")
"""Models of TensorFlow 2.15 that later ones load."""

BROKEN: dict[str, str] = {}
"""Case -> what of 0.1.0 does not work in it yet."""

OTHERWISE = {
    "int8_six_bits": 1,  # 0.1.0's file and model differed with fewer than 8 bits.
    "contrib": 1,  # 0.1.0 rounded weights of layers in float again, to what int8 kernels hold.
}
"""Case -> how many LSB its file may be from that of 0.1.0."""


def marks(name: str) -> Any:
    """Marks of a case where version 0.1.0 computes with a model at inference."""
    return pytest.mark.xfail(reason=BROKEN[name], strict=True) if name in BROKEN else ()


@dataclasses.dataclass
class Opened:
    """The files of a case and what the model in them computed."""

    case: Case
    stem: str
    arrays: dict[str, np.ndarray]

    def load(self, ending: str = ".keras") -> Any:
        """The model as it was saved."""
        if ending in WEIGHTS_ALONE:
            model = self.case.quantized()
            model.load_weights(self.stem + ending)
            return model
        return keras.models.load_model(self.stem + ending)

    @functools.cached_property
    def model(self) -> Any:
        """The model of the .keras file, loaded once. Tests must not change it."""
        return self.load()

    def recorded(self, kind: str) -> dict[str, np.ndarray]:
        """Arrays by the names of inputs or outputs."""
        start = f"{kind}/"
        return {
            name.removeprefix(start): each
            for name, each in self.arrays.items()
            if name.startswith(start)
        }

    @property
    def x(self) -> dict[str, np.ndarray]:
        return self.recorded("x")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: Any) -> Callable[..., Opened]:
    """Opens the files of a case."""

    @functools.cache
    def open_files(name: str, written_by: str = OWN) -> Opened:
        folder = tmp_path_factory.mktemp(f"{name}-{written_by}")
        with zipfile.ZipFile(FOLDER / written_by / f"{name}.zip") as archive:
            archive.extractall(folder)
        with np.load(folder / f"{name}.npz") as arrays:
            return Opened(CASES[name], str(folder / name), dict(arrays))

    return open_files


def files() -> Iterator[Any]:
    """Parameters: who wrote a file, its case, its ending."""
    for name, case in CASES.items():
        for ending in case.files:
            written_by = [OWN]
            is_read = OTHER == OF_2_15 and ending == ".keras" and name in MOVED_ON
            if ending in WEIGHTS_ALONE or is_read:
                written_by.append(OTHER)
            if ending != ".tflite":
                for each in written_by:
                    yield pytest.param(each, name, ending, marks=marks(name))


def assert_outputs(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], exact: bool
) -> None:
    """Fails unless outputs are equal, up to single steps somewhere inside if not `exact`."""
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        if exact:
            np.testing.assert_array_equal(found[name], theirs, err_msg=name)
            continue
        size = np.ptp(theirs)
        off = np.abs(found[name] - theirs)
        # Sums in another order: where a number lies between two codes, it is rounded otherwise.
        assert np.mean(off > 1e-4 * size) < 0.1, name
        assert off.max() < 0.03 * size, name


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Fails unless outputs without quantization are equal up to float's last bits."""
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        np.testing.assert_allclose(found[name], theirs, rtol=1e-4, atol=1e-5 * np.ptp(theirs))


@pytest.mark.parametrize(("written_by", "name", "ending"), files())
def test_model_is_the_one_that_was_saved(
    written_by: str, name: str, ending: str, opened: Callable[..., Opened]
) -> None:
    file = opened(name, written_by)
    model = file.model if ending == ".keras" else file.load(ending)
    found = ranges_of(model)
    for column in ("names", "tensors", "bits"):
        np.testing.assert_array_equal(found[column], file.arrays[column])
    for end in ("minimum", "maximum"):  # Weights' follow from the weights, in float.
        np.testing.assert_allclose(found[end], file.arrays[end], rtol=1e-6, err_msg=end)
    assert_outputs(outputs_of(model, file.x), file.recorded("y"), file.case.exact)


@pytest.mark.parametrize("name", ["int8_network", "int8_recurrent", "int16x8", "contrib_in_delay"])
def test_predict_gives_what_a_call_gives(name: str, opened: Callable[..., Opened]) -> None:
    """For some, as tracing takes more time than all else here."""
    file = opened(name)
    found = outputs_of(file.model, file.x, predict=True)
    assert_outputs(found, file.recorded("y"), file.case.exact)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_quantization_is_switched(name: str, opened: Callable[..., Opened]) -> None:
    file = opened(name)
    weights = file.model.get_weights()
    try:
        keras_qat.set_quantization(file.model, False)
        assert_close(outputs_of(file.model, file.x), file.recorded("off"))
        keras_qat.set_quantization(file.model, True)
        assert_outputs(outputs_of(file.model, file.x), file.recorded("on"), file.case.exact)
    finally:
        file.model.set_weights(weights)  # When it quantizes is among them.


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(name: str, opened: Callable[..., Opened]) -> None:
    """As if it had never ended: with the optimizer, and how many batches a range is made of."""
    file = opened(name)
    model = file.load()
    train(model, file.x, EPOCH)
    found = ranges_of(model)
    size = file.arrays["resumed_maximum"] - file.arrays["resumed_minimum"]
    for end in ("minimum", "maximum"):
        # A weight that is rounded otherwise moves all that follows, but not by much.
        off = np.abs(found[end] - file.arrays[f"resumed_{end}"]) / size
        assert off.max() < 0.002, found["names"][off.argmax()]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_float_model_is_the_one_that_was_trained(
    name: str, folded: bool, opened: Callable[..., Opened]
) -> None:
    file = opened(name)
    plain = keras_qat.strip_quantization(file.model, folded=folded)
    found, expected = outputs_of(plain, file.x), file.recorded("off")
    if folded:  # An activation that was part of a layer is now one, with a name of its own.
        found = {name.removesuffix("_activation"): each for name, each in found.items()}
    assert_close(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_recipe_is_the_one_it_was_made_with(name: str, opened: Callable[..., Opened]) -> None:
    """Only a model of the same recipe is copied."""
    file = opened(name)
    copy = keras_qat.quantize_model(file.model, file.case.recipe)
    np.testing.assert_equal(ranges_of(copy), ranges_of(file.model))
    with pytest.raises(ValueError, match="already quantized"):
        keras_qat.quantize_model(file.model, file.case.recipe.override("Dense", weight_bits=3))


@pytest.mark.filterwarnings("ignore:The weights of . layers are rounded again")
@pytest.mark.parametrize(
    ("name", "export"),
    [(name, export) for name, case in CASES.items() for export in case.exports],
)
def test_codes_of_the_exported_file(name: str, export: str, opened: Callable[..., Opened]) -> None:
    file = opened(name)
    contents = keras_qat.export_tflite(file.model, **file.case.exports[export])
    found = codes_of(contents, file.x)
    expected = file.recorded(export)
    assert found.keys() == expected.keys()
    for output, theirs in expected.items():
        assert found[output].dtype == theirs.dtype
        off = np.abs(found[output].astype(int) - theirs)
        if name in OTHERWISE:
            assert np.mean(off > OTHERWISE[name]) <= 0.05, output
            continue
        # What is computed in float, between integers, may lie on the other side of a half.
        assert off.max() <= (0 if file.case.exact_file else 1), output
        assert np.mean(off > 0) <= 0.05, output


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if ".tflite" in case.files])
def test_exported_file_is_of_the_model(name: str, opened: Callable[..., Opened]) -> None:
    file = opened(name)
    contents = Path(file.stem + ".tflite").read_bytes()
    for output, codes in codes_of(contents, file.x).items():
        np.testing.assert_array_equal(codes, file.arrays[f"codes/{output}"])
    assert keras_qat.read_metadata(contents)["version"] == "0.1.0"
    assert keras_qat.verify(file.model, contents, file.x).identical == 1


def test_quantization_begins_at_its_step(opened: Callable[..., Opened]) -> None:
    """At the 6th; the model has been trained for 4."""

    def is_quantized() -> bool:
        plain = keras_qat.strip_quantization(model)
        found, expected = (outputs_of(each, file.x)["logits"] for each in (model, plain))
        return not np.allclose(found, expected, rtol=1e-4, atol=1e-4)

    file = opened("contrib_in_delay")
    model = file.load()
    found = [is_quantized()]
    for _ in range(2):
        train(model, file.x, 1)
        found.append(is_quantized())
    assert found == [False, False, True]


def test_batch_norm_freezes_at_its_step(opened: Callable[..., Opened]) -> None:
    """At the 6th; the model has been trained for 4."""

    def statistics() -> np.ndarray:
        return keras_qat.strip_quantization(model).get_layer("stem_bn").moving_mean.numpy()

    file = opened("int8_delays")
    model = file.load()
    before, moved = statistics(), []
    for _ in range(3):
        train(model, file.x, 1)
        after = statistics()
        moved.append(bool(np.any(after != before)))
        before = after
    assert moved == [True, False, False]
