"""Tests reading data: formats that `predict` and TFLite's converter accept, and refused data."""

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.io import data as data_lib
from keras_qat.io.data import count_batches, read_arrays, read_batches
from tests.helpers import assert_all_equal, images, keras, observe
from tests.networks.small import functional, layers, out_of_order, tiny_net

pytestmark = pytest.mark.legacy
X = images(10, (6, 6, 2))
Y = np.arange(10)
A, B = images(10, (6,), seed=1), images(10, (4,), seed=2)


class Batches(keras.utils.Sequence):
    """Returns four examples at a time, with labels."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        part = slice(4 * index, 4 * index + 4)
        return X[part], Y[part]


class OnlyNumbered:
    """A sequence without an iterator that never raises IndexError."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[2 * index : 2 * index + 2]


def representative():
    for row in X:
        yield [row[np.newaxis]]


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays[0] if len(arrays) == 1 else arrays)


IMAGES = {
    "array": lambda: X,
    "tensor": lambda: tf.constant(X),
    "numbers": lambda: X.tolist(),
    "double": lambda: X.astype(np.float64),
    "in a list": lambda: [X],
    "in a tuple": lambda: (X,),
    "by name": lambda: {"image": X, "label": Y},
    "with labels": lambda: (X, Y),
    "with weights": lambda: (X, Y, Y),
    "list of images": lambda: list(X),
    "images with labels": lambda: (list(X), list(Y)),
    "list of pairs": lambda: list(zip(X, Y, strict=True)),
    "list of batches": lambda: [X[:4], X[4:8], X[8:]],
    "list of lists": lambda: [[X[:4]], [X[4:]]],
    "list of dicts": lambda: [{"image": X[:4]}, {"image": X[4:]}],
    "dataset": lambda: dataset(X).batch(4),
    "examples": lambda: dataset(X),
    "dataset with labels": lambda: dataset(X, Y).batch(4),
    "examples with labels": lambda: dataset(X, Y),
    "dataset of dicts": lambda: dataset({"image": X}, Y).batch(4),
    "sequence": Batches,
    "numbered": OnlyNumbered,
    "generator": lambda: (X[at : at + 4] for at in (0, 4, 8)),
    "generator of labels too": lambda: ((X[at : at + 4], Y[at : at + 4]) for at in (0, 4, 8)),
    "generator of examples": lambda: iter(X),
    "representative data": lambda: representative,
    "representative data made": lambda: representative(),
    "representative dicts": lambda: lambda: ({"image": row[np.newaxis]} for row in X),
    "of a signature": lambda: lambda: (("serve", {"image": row[np.newaxis]}) for row in X),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("form", IMAGES)
def test_forms_for_one_input(form):
    (array,) = read_arrays(tiny_net(), IMAGES[form]())
    np.testing.assert_array_equal(array.astype(np.float32), X)


PAIRS = {
    "list": lambda: [A, B],
    "tuple": lambda: (A, B),
    "numbers": lambda: [A.tolist(), B.tolist()],
    "dict": lambda: {"left": B, "right": A, "other": Y},
    "with labels": lambda: ([A, B], Y),
    "tuple with labels": lambda: ((A, B), Y, Y),
    "dict with labels": lambda: ({"left": B, "right": A}, Y),
    "list of examples": lambda: [[a, b] for a, b in zip(A, B, strict=True)],
    "list of dicts": lambda: [{"left": b, "right": a} for a, b in zip(A, B, strict=True)],
    "dataset": lambda: dataset(A, B).batch(4),
    "examples with labels": lambda: dataset((A, B), Y),
    "dataset of dicts": lambda: dataset({"left": B, "right": A}, Y).batch(4),
    "representative data": lambda: lambda: ([a[None], b[None]] for a, b in zip(A, B, strict=True)),
}


@pytest.mark.parametrize("form", PAIRS)
def test_forms_for_two_inputs(form):
    right, left = read_arrays(out_of_order(), PAIRS[form]())
    np.testing.assert_array_equal(right.astype(np.float32), A)
    np.testing.assert_array_equal(left.astype(np.float32), B)


def test_inputs_in_a_dict_of_other_names():
    """The model's dict has other keys than the names of inputs. Both are accepted."""
    inputs = {"b": keras.Input((4,), name="left"), "a": keras.Input((6,), name="right")}
    joined = layers.Concatenate()([inputs["a"], inputs["b"]])
    model = keras.Model(inputs, layers.Dense(2)(joined))
    for given in ({"a": A, "b": B}, {"left": B, "right": A}, [A, B], ({"a": A, "b": B}, Y)):
        assert_all_equal(read_arrays(model, given), (A, B))


def test_keys_that_are_the_names_of_other_inputs():
    """As in `predict`, keys of the model's dict have priority over names of its inputs."""
    inputs = {"b": keras.Input((4,), name="a"), "a": keras.Input((6,), name="b")}
    model = keras.Model(inputs, layers.Concatenate()([inputs["a"], inputs["b"]]))
    assert_all_equal(read_arrays(model, {"a": A, "b": B}), (A, B))


def test_inputs_nested_in_lists():
    one, two, three = (keras.Input((4,)) for _ in range(3))
    model = keras.Model([[one, two], three], layers.Add()([one, two, three]))
    for given in ([[B, 2 * B], 3 * B], ([[B, 2 * B], 3 * B], Y), [B, 2 * B, 3 * B]):
        for factor, result in enumerate(read_arrays(model, given), start=1):
            np.testing.assert_array_equal(result, factor * B)


def test_a_last_axis_of_size_1():
    """Keras adds and removes such an axis."""
    gray, flat = (
        functional((6, 6, 1), build=layers.Flatten()),
        functional((6,), build=layers.ReLU()),
    )
    for model, given, wanted in (
        (gray, X[..., 0], X[..., :1]),
        (gray, list(X[..., 0]), X[..., :1]),
        (gray, dataset(X[..., 0]).batch(3), X[..., :1]),
        (gray, dataset(X[..., :1]), X[..., :1]),
        (flat, A[..., np.newaxis], A),
    ):
        (array,) = read_arrays(model, given)
        np.testing.assert_array_equal(array, wanted)


def test_sizes_of_batches():
    """Batches in the data stay unchanged. Arrays and single examples are collected into batches."""

    def sizes(data, *args):
        return [len(batch[0]) for batch in read_batches(tiny_net(), data, *args)]

    assert sizes(X) == [10]
    assert sizes(X, 4) == sizes(iter(X), 4) == sizes(dataset(X), 4) == [4, 4, 2]
    assert sizes(dataset(X).batch(3), 4) == sizes(dataset(X).batch(3)) == [3, 3, 3, 1]
    assert sizes(dataset(X).batch(3).repeat(), None, 5) == [3, 3, 3, 1, 3]
    assert sizes(X, 4, 2) == [4, 4]


def test_how_many_batches_there_will_be():
    """The number of batches is known if no data must be read."""
    model = tiny_net()
    for data, size, steps, count in (
        (X, 4, None, 3),
        ((X, Y), None, None, 1),
        ({"label": Y, "image": X}, 3, 2, 2),
        (Batches(), None, None, 3),
        (dataset(X, Y).batch(4), None, None, 3),
        (dataset(X).batch(4).repeat(), None, 7, 7),
        (dataset(X), 4, None, None),
        (iter(X), 4, None, None),
        (list(X), 4, None, None),
    ):
        assert count_batches(model, data, size, steps) == count
        result = sum(1 for _ in read_batches(model, data, size, steps))
        assert count in (None, result)


def test_examples_of_different_sizes():
    model = functional((None, 2), build=layers.Conv1D(3, 1))
    signals = [np.zeros((3, 2)), np.ones((3, 2)), np.zeros((5, 2))]
    assert [batch.shape for (batch,) in read_batches(model, signals)] == [(2, 3, 2), (1, 5, 2)]
    with pytest.raises(ValueError, match=r"different sizes, such as \(3, 2\), \(5, 2\)"):
        read_arrays(model, signals)


def test_types_stay():
    """Integers may be quantized values or token ids."""
    (array,) = read_arrays(tiny_net(), X.astype(np.int8))
    assert array.dtype == np.int8
    half = dataset(tf.cast(X, tf.bfloat16))
    (array,) = read_arrays(tiny_net(), half)
    assert array.dtype == np.float32


def with_nan(value=np.nan):
    x = X.copy()
    x[7, 2, 3] = value
    return x


REFUSED = {
    "nothing": (lambda: None, "The data for 'tiny' is None"),
    "no examples": (lambda: X[:0], r"The data for 'tiny' is empty\.$"),
    "empty list": (list, "The data for 'tiny' is empty"),
    "no batches": (lambda: dataset(X).batch(4).take(0), "The data for .* is empty"),
    "used up": (lambda: iter([]), "is empty.*Create a new one"),
    "path": (lambda: "x.npy", "The data for 'tiny' cannot be 'x.npy'.*numpy.load"),
    "path object": (lambda: Path("x.npy"), "cannot be .*x.npy.*Load files"),
    "contents": (lambda: b"TFL3", "contents of a file.*model, file, data"),
    "model": (tiny_net, "The data for 'tiny' cannot be .*order"),
    "number": (lambda: 3, r"cannot be 3|not \(\)"),
    "object": (object, "The data for 'tiny' cannot be .*Pass an array"),
    "words": (lambda: np.full((4, 6, 6, 2), "a"), "Input 'image' .* expects numbers, not text"),
    "other shape": (lambda: X[:, 1:], r"'image' .* shape \(None, 6, 6, 2\), not \(10, 5, 6, 2\)"),
    "one image": (lambda: X[0], r"not \(6, 6, 2\). That is one example: pass a batch, x\[np"),
    "other images": (lambda: [X[0], X[1, 1:]], r"not \(5, 6, 2\) in item 1 of the data"),
    "other batch": (lambda: iter([X, X[:, 1:]]), r"not \(10, 5, 6, 2\) in item 1 of the data"),
    "uneven rows": (lambda: [[1.0], [1.0, 2.0]], "'image' .* cannot be converted to an array"),
    "no axis": (lambda: X[..., :0], r"not \(10, 6, 6, 0\)"),
    "other name": (lambda: {"img": X}, "'tiny' has the inputs 'image', but the data has 'img'"),
    "NaN": (with_nan, "'image' of 'tiny' contains NaN, first in example 7 of the data"),
    "NaN in a batch": (
        lambda: dataset(with_nan()).batch(4),
        "'image' of 'tiny' contains NaN, first in example 3 in item 1 of the data",
    ),
    "ragged": (lambda: tf.ragged.constant([[1.0], []]), "expects numbers, not RaggedTensor"),
    "endless": (lambda: dataset(X).repeat(), r"never ends.*dataset\.take"),
    "function of one argument": (lambda: lambda x: [x], "called without arguments"),
    "class": (lambda: Batches, "cannot be .*Batches"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as info:
        read_arrays(tiny_net(), make())
    assert len(str(info.value)) < 400


REFUSED_PAIRS = {
    "one of two": (lambda: A, "has 2 inputs, but the data has 1. Pass .* for 'right', 'left'"),
    "one of two in a list": (lambda: [A], "has 2 inputs, but the data has 1"),
    "three": (lambda: [A, B, A], "has 2 inputs, but the data has 3"),
    "swapped": (lambda: [B, A], r"'right' .* shape \(None, 6\), not \(10, 4\)"),
    "other name": (
        lambda: {"right": A, "lift": B},
        "inputs 'right', 'left', but the data has .*'lift'",
    ),
    "other counts": (lambda: [A[:3], B], "different numbers of examples: right 3, left 10"),
    "labels for an input": (lambda: (A, Y), r"'left' .* not \(10,\)"),
    "one example of one": (lambda: [A[0], B], r"'right' .* not \(6,\)"),
    "NaN in the second": (lambda: [A, B * np.nan], "'left' .* contains NaN"),
}


@pytest.mark.parametrize("case", REFUSED_PAIRS)
def test_what_is_refused_of_two_inputs(case):
    make, message = REFUSED_PAIRS[case]
    with pytest.raises(ValueError, match=message):
        read_arrays(out_of_order(), make())


def test_verbs_refuse_it_too(two_inputs):
    qat, contents = two_inputs
    message = r"'right' .* shape \(None, 6\), not \(10, 4\)"
    with pytest.raises(ValueError, match=message):
        keras_qat.simulate(qat, [B, A])
    with pytest.raises(ValueError, match=message):
        keras_qat.verify(qat, contents, [B, A])


def test_an_axis_of_size_0():
    model = functional((None, 2), build=layers.Conv1D(3, 1))
    with pytest.raises(ValueError, match=r"is empty: its shape is \(8, 0, 2\)"):
        read_arrays(model, np.zeros((8, 0, 2), np.float32))


def test_infinity():
    """A range cannot include infinity. Quantized values represent it by the range's end."""
    infinite = with_nan(-np.inf)
    with pytest.raises(ValueError, match=r"'image' .* contains infinity, first in example 7"):
        list(read_batches(tiny_net(), infinite, finite=True))
    read_arrays(tiny_net(), infinite)


@pytest.fixture(scope="module")
def two_inputs():
    qat = observe(keras_qat.quantize_model(out_of_order()), A, B)
    return qat, keras_qat.export_tflite(qat)


@pytest.mark.parametrize("form", ["dict with labels", "representative data"])
def test_verbs(form, two_inputs):
    qat, contents = two_inputs
    assert keras_qat.verify(qat, contents, PAIRS[form]()).identical == 1
    assert keras_qat.simulate(qat, PAIRS[form]()).tensors["left"].codes.shape == (10, 4)
    keras_qat.calibrate(keras_qat.quantize_model(out_of_order()), PAIRS[form]())


def test_progress(two_inputs, capsys):
    """The bar looks like Keras' bar, and is only shown on request."""
    qat, contents = two_inputs
    for verbose in (0, 1):
        keras_qat.simulate(qat, [A, B], batch_size=4, verbose=verbose)
        keras_qat.verify(qat, contents, [A, B], batch_size=4, verbose=verbose)
        fresh = keras_qat.quantize_model(out_of_order())
        keras_qat.calibrate(fresh, iter([[A[:4], B[:4]], [A[4:], B[4:]]]), verbose=verbose)
        shown = capsys.readouterr().out
        if not verbose:
            assert not shown
    for what in ("The simulation", "The file", "The model", "Calibration"):
        assert what in shown
    assert shown.count("3/3 [") >= 3
    assert "2/Unknown" in shown


class Endless(Batches):
    """A sequence whose iterator never ends, like `ImageDataGenerator`'s."""

    def __iter__(self):
        return self

    def __next__(self):
        raise AssertionError("iterated")


def test_sequences_are_read_by_their_length():
    model = tiny_net()
    assert [len(x) for (x,) in read_batches(model, Endless())] == [4, 4, 2]
    assert [len(x) for (x,) in read_batches(model, Endless(), steps=2)] == [4, 4]
    flow = keras.preprocessing.image.ImageDataGenerator().flow(X, Y, batch_size=4)
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, flow, method="percentile")  # Reads it twice.
    (name,) = qat.output_names
    file = keras_qat.export_tflite(qat)
    assert keras_qat.simulate(qat, flow).outputs[name].codes.shape[0] == len(X)
    assert keras_qat.verify(qat, file, flow).examples == len(X)
    assert len(keras_qat.TFLiteModel(file).predict(flow)) == len(X)


@pytest.mark.parametrize(
    "endless",
    [
        lambda: itertools.repeat(X[:2]),
        lambda: lambda: itertools.cycle([[X[:1]]]),
        lambda: dataset(X).repeat().filter(lambda x: True).batch(2),
    ],
    ids=["generator", "function", "dataset of unknown length"],
)
def test_data_that_may_never_end(endless, monkeypatch):
    monkeypatch.setattr(data_lib, "MANY", 5)
    monkeypatch.setattr(data_lib, "MOST", 8)
    qat = keras_qat.quantize_model(tiny_net())
    with (
        pytest.warns(UserWarning, match=r"5 batches .*there are more.*pass steps=100"),
        pytest.raises(ValueError, match=r"8 batches of the data for .* have been read"),
    ):
        keras_qat.calibrate(qat, endless())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(read_batches(qat, endless(), steps=6))) == 6
        assert len(list(read_batches(qat, [X[:2]] * 20))) == 20
        assert len(list(read_batches(qat, dataset(X).batch(1)))) == 10


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, tf.constant])
def test_integers_of_all_types(kind):
    callbacks, integer = keras_qat.callbacks, kind(3)
    made = [callbacks.QuantDelay(integer).steps]
    recipe = keras_qat.recipes.int8(weight_bits=integer).override("Dense", weight_bits=integer)
    made += [recipe.weights.bits, recipe.overrides[0].weight_bits]
    made += [keras_qat.recipes.contrib(quant_delay=integer).quant_delay]
    assert made == [3] * len(made)
    assert {type(number) for number in made} == {int}
    assert len(list(read_batches(tiny_net(), X, batch_size=integer, steps=integer))) == 3
