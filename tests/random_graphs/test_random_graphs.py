"""Tests random models of all operators with every recipe: no errors, and equal results."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, reject, settings
from hypothesis import strategies as some

from keras_qat import recipes, targets
from keras_qat.keras2.backend import keras
from tests.ops.examples import elementwise, movement, products, weighted
from tests.random_graphs.lifecycle import Refused, live, live_on
from tests.random_graphs.program import as_program
from tests.random_graphs.sketch import STEPS, Sketch, Step, built, random_inputs

SHAPES = ((6,), (8,), (4, 3), (5, 4, 4), (6, 6, 3), (None, 4), (None, None, 3))

BITS = some.integers(2, 8)

RECIPES = some.one_of(
    some.just(recipes.int8()),
    some.just(recipes.int4_weights()),
    some.just(recipes.int16x8()),
    some.just(recipes.contrib()),
    some.builds(recipes.int8, BITS, BITS, per_channel=some.booleans()),
    some.builds(recipes.int16x8, BITS, per_channel=some.booleans()),
    some.builds(recipes.contrib, BITS, BITS),
)


def symmetric(recipe: recipes.Recipe) -> recipes.Recipe:
    """Returns the recipe with symmetric ranges of activations, as users may create it."""
    activations = dataclasses.replace(recipe.activations, symmetric=True)
    return dataclasses.replace(recipe, activations=activations)


SYMMETRIC = some.one_of(
    some.just(recipes.symmetric()),
    some.just(recipes.power_of_two()),
    some.builds(symmetric, some.builds(recipes.int8, BITS, BITS, per_channel=some.booleans())),
)

MORE_RECIPES = some.one_of(
    RECIPES,
    SYMMETRIC,
    some.builds(
        recipes.int4_weights, BITS, per_channel=some.booleans(), end_bits=some.none() | BITS
    ),
    some.builds(
        recipes.contrib,
        *(BITS, BITS, some.booleans()),
        weight_narrow_range=some.booleans(),
        quantize_folded_weights_use_ema=some.booleans(),
    ),
)

FOR_TARGETS = some.one_of(
    some.just(recipes.int8()),
    some.just(recipes.int16x8()),
    some.builds(recipes.int8, BITS, BITS, per_channel=some.booleans()),
    some.builds(recipes.int16x8, BITS, per_channel=some.booleans()),
)

PLACES = some.sampled_from(
    ("tflm", "tflm", "tflm", "ethos_u55", "ethos_u85", "stm32_npu", "edgetpu")
)
"""Targets, mostly TFLite Micro, because its files run here."""

# Statistics of random layers do not match random data.
pytestmark = pytest.mark.filterwarnings("ignore:(The data for input|Input) ':UserWarning")


def sketches(
    shapes: tuple[tuple[int | None, ...], ...], kinds: tuple[str, ...] = tuple(sorted(STEPS))
) -> some.SearchStrategy[Sketch]:
    """Returns a strategy for models with inputs of these shapes and steps of these kinds."""
    step = some.builds(
        Step,
        some.sampled_from(kinds),
        some.integers(0, 2**20),
        some.tuples(*[some.integers(0, 3)] * 3),
    )
    return some.builds(
        Sketch,
        shapes=some.lists(some.sampled_from(shapes), min_size=1, max_size=3).map(tuple),
        steps=some.lists(step, min_size=1, max_size=7).map(tuple),
        outputs=some.integers(1, 3),
        scale=some.sampled_from((1.0, 1.0, 1e-3, 1e3)),
    )


SKETCHES = sketches(SHAPES)
KNOWN_SHAPES = tuple(shape for shape in SHAPES if None not in shape)
KNOWN_SIZES = sketches(KNOWN_SHAPES)
RECURRENT = sketches(
    KNOWN_SHAPES,
    (*["recurrent"] * 6, "merged", "activated", "dense", "as_it_is", "masked", "relu", "affine"),
)


@contextlib.contextmanager
def reported(model: object, *args: object) -> Iterator[None]:
    """Rejects refused models. For failures, hypothesis prints the smallest as a program."""
    try:
        yield
    except Refused:
        reject()
    except Exception:
        with contextlib.suppress(TypeError):  # Keras cannot save models with `x[..., 0]`.
            note(as_program(model, *args))
        raise


def try_out(sketch: Sketch, recipe: recipes.Recipe, folder: object) -> None:
    keras.backend.clear_session()
    model = built(sketch)
    assume(len(model.layers) > len(model.inputs))
    inputs = random_inputs(model, scale=sketch.scale)
    with reported(model, inputs, recipe, sketch.scale):
        live(model, inputs, recipe, folder)


def try_on(name: str, sketch: Sketch, recipe: recipes.Recipe) -> None:
    target = targets.get(name)
    assume((16 if recipe.activations.bits == 16 else 8) in target.bits)
    keras.backend.clear_session()
    model = built(sketch)
    assume(len(model.layers) > len(model.inputs))
    inputs = random_inputs(model, scale=sketch.scale)
    with reported(model, inputs, recipe, sketch.scale, name):
        live_on(target, model, inputs, recipe)


def trials(count: int, **options: object) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_layers_of_examples_are_registered():
    """Keras cannot load other models, float or not: "'str' object is not callable"."""
    for module in (elementwise, movement, products, weighted):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, keras.layers.Layer):
                assert keras.saving.get_registered_name(value) != value.__name__


@pytest.mark.slow
def test_what_fails_is_printed_as_a_program(capsys):
    sketch = Sketch(((6,),), (Step("dense", 1), Step("relu", 2), Step("add", 3)), scale=1e3)
    model = built(sketch)
    inputs = random_inputs(model, scale=sketch.scale)
    names: dict[str, object] = {}
    exec(as_program(model, inputs, recipes.int8(7), sketch.scale), names)
    given = names["inputs"] if len(inputs) > 1 else [names["inputs"]]
    for mine, theirs in zip(inputs, given, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(model.get_weights(), names["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert names["report"].identical == 1
    assert "100" in capsys.readouterr().out


@trials(1, derandomize=True, phases=[Phase.generate])  # Reducing it takes minutes.
@given(SKETCHES, RECIPES)
def test_a_sample(folder, sketch, recipe):
    try_out(sketch, recipe, folder)


@pytest.mark.slow
def test_many_more(folder, seeds):
    @trials(seeds, derandomize=True)
    @given(SKETCHES, MORE_RECIPES)
    def test(sketch, recipe):
        try_out(sketch, recipe, folder)

    test()


@trials(1, derandomize=True, phases=[Phase.generate])
@given(PLACES, KNOWN_SIZES, FOR_TARGETS)
def test_a_sample_on_targets(name, sketch, recipe):
    pytest.importorskip("tflite_micro")
    try_on(name, sketch, recipe)


@pytest.mark.slow
def test_many_more_on_targets(seeds):
    pytest.importorskip("tflite_micro")

    @trials(seeds, derandomize=True)
    @given(PLACES, KNOWN_SIZES, some.one_of(FOR_TARGETS, SYMMETRIC))
    def test(name, sketch, recipe):
        try_on(name, sketch, recipe)

    test()


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "tflm"])
def test_recurrent_layers(folder, seeds, name):
    @trials(max(1, seeds // 4), derandomize=True)
    @given(RECURRENT, MORE_RECIPES if name is None else some.one_of(FOR_TARGETS, SYMMETRIC))
    def test(sketch, recipe):
        if name is None:
            try_out(sketch, recipe, folder)
        else:
            pytest.importorskip("tflite_micro")
            try_on(name, sketch, recipe)

    test()


@pytest.mark.slow
def test_learned_ranges(folder, seeds):
    ranges = some.sampled_from(["learned", "learned", "learned_clipping"])

    @trials(max(1, seeds // 4), derandomize=True, phases=[Phase.generate])
    @given(SKETCHES, some.builds(recipes.low_bits, BITS, BITS, ranges=ranges))
    def test(sketch, recipe):
        try_out(sketch, recipe, folder)

    test()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_in_half_precision(folder, seeds, policy):
    @trials(max(1, seeds // 8), derandomize=True, phases=[Phase.generate])
    @given(SKETCHES, RECIPES)
    def test(sketch, recipe):
        assume(recipe.activations.bits < 16)  # `quantize_model` refuses them.
        keras.mixed_precision.set_global_policy(policy)
        try:
            try_out(sketch, recipe, folder)
        finally:
            keras.mixed_precision.set_global_policy("float32")

    test()
