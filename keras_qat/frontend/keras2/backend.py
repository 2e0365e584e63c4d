"""Which Keras 2 this is, and the Keras behaviour that layers lean on.

With `graph` the module that knows most of Keras' internals; others of this package know the rest.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import tensorflow as tf

__all__ = [
    "CustomObjects",
    "KeepsTrainable",
    "applications_scope",
    "attention_parts",
    "check_modules",
    "custom_objects_in",
    "deserialization_scope",
    "in_safe_mode",
    "is_building",
    "is_in_converter",
    "keras",
    "make_training_variables",
    "mask_of",
    "missing_config",
    "one_at_a_time",
    "output_shape",
    "recurrence",
    "register",
    "resolve_training",
    "serialize",
    "set_mask",
    "steps_per_execution",
    "swapped",
    "takes_mask",
    "traced",
    "without_warnings",
]


def _find_keras_2() -> Any:
    major, minor = (int(part) for part in tf.__version__.split(".")[:2])
    if (major, minor) < (2, 16):
        return tf.keras
    try:
        import tf_keras
    except ImportError as error:
        raise ImportError(
            f"keras_qat works on Keras 2, which is the package tf-keras since TensorFlow 2.16. "
            f"Install the one that matches: pip install 'tf-keras~={major}.{minor}.0'"
        ) from error
    return tf_keras


keras = _find_keras_2()

register = keras.utils.register_keras_serializable(package="keras_qat")
"""Class decorator: `load_model` finds the class without a scope or custom objects."""


class KeepsTrainable:
    """A model whose layers are loaded from a SavedModel with the `trainable` flags they had.

    Keras sets the model's own flag on it after it was made from its configuration, and that
    overwrites the flags of the layers that its layers hold. `None` makes Keras leave it.
    """

    @property
    def _tracking_metadata(self) -> str:
        metadata = json.loads(super()._tracking_metadata)  # type: ignore[misc]
        return json.dumps({**metadata, "trainable": None})


def applications_scope() -> Any:
    """A scope in which layers load that `keras.applications` has but did not register: ConvNeXt's.

    Keras itself cannot load a model with them. Classes of the user's with these names stay.
    """
    module = inspect.getmodule(keras.applications.ConvNeXtTiny)
    names = ("LayerScale", "StochasticDepth")
    missing = [name for name in names if keras.utils.get_registered_object(name) is None]
    found = {name: getattr(module, name) for name in missing if hasattr(module, name)}
    return keras.utils.custom_object_scope(found)


def _serialization() -> Any:
    return inspect.getmodule(keras.saving.deserialize_keras_object)


def in_safe_mode() -> bool | None:
    """Whether Keras is loading a file none of whose code may run; None if nobody said."""
    return _serialization().in_safe_mode()


def check_modules(config: Any) -> None:
    """Raises a `ValueError` if Keras would import a module that a configuration names.

    What was registered or imported already, by a program that trusts it, is fine.
    """
    if isinstance(config, dict):
        if "class_name" in config and not _is_known(config):
            raise ValueError(
                f"The model's configuration has the class {config['class_name']!r} of the module "
                f"{config['module']!r}, which is not imported. If you trust the file, import the "
                f"module before you load it, or pass safe_mode=False."
            )
        config = config.values()
    elif not isinstance(config, (list, tuple)):
        return
    for each in config:
        check_modules(each)


def _is_known(config: dict[str, Any]) -> bool:
    module, name = config.get("module"), config.get("registered_name")
    if not isinstance(module, str) or module in sys.modules:
        return True
    if module.split(".")[0] in ("keras", "tf_keras", "tensorflow", "builtins"):
        return True
    return isinstance(name, str) and keras.utils.get_registered_object(name) is not None


class CustomObjects(NamedTuple):
    """What Keras cannot make from configurations by itself.

    Args:
        classes: by their names.
        has_lambda: whether there is a `Lambda`.
    """

    classes: dict[str, Any]
    has_lambda: bool


def custom_objects_in(layers: Iterable[Any]) -> CustomObjects:
    """Custom classes of layers and of what they hold, and functions that are activations."""
    layers = list(layers)
    own = ("keras", "tf_keras", "keras_qat")
    kinds: Any = keras.initializers.Initializer, keras.regularizers.Regularizer
    kinds = (*kinds, keras.constraints.Constraint)
    parts = [each for layer in layers for each in vars(layer).values() if isinstance(each, kinds)]
    custom: dict[str, Any] = {
        type(each).__name__: type(each)
        for each in [*layers, *parts]
        if type(each).__module__.split(".")[0] not in own
    }
    functions = [getattr(layer, "activation", None) for layer in layers]
    custom |= {
        each.__name__: each
        for each in functions
        if inspect.isfunction(each) and each.__module__.split(".")[0] not in (*own, "tensorflow")
    }
    return CustomObjects(
        custom,
        any(isinstance(layer, keras.layers.Lambda) for layer in layers),
    )


@contextlib.contextmanager
def deserialization_scope(*customs: CustomObjects, safe: bool | None = None) -> Iterator[None]:
    """A scope in which Keras makes layers with custom parts from configurations.

    Custom classes need not be registered. A `Lambda`, which Keras makes only where that was
    allowed, is made if there was one: it was allowed then, or never saved. Otherwise `safe` says
    whether it is not made; None leaves that to Keras.
    """
    has_lambda = any(each.has_lambda for each in customs)
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(applications_scope())
        for each in customs:
            scopes.enter_context(keras.utils.custom_object_scope(each.classes))
        if has_lambda or safe is not None:
            scopes.enter_context(_serialization().SafeModeScope(safe and not has_lambda))
        yield


def missing_config(layer: Any) -> dict[str, Any]:
    """What Keras leaves out of a layer's configuration: that BatchNormalization is synchronized."""
    is_norm = isinstance(layer, keras.layers.BatchNormalization)
    return {"synchronized": True} if is_norm and getattr(layer, "synchronized", False) else {}


def serialize(layer: Any) -> dict[str, Any]:
    """A layer as Keras serializes it, and what it leaves out."""
    found = keras.layers.serialize(layer)
    found["config"].update(missing_config(layer))
    return found


def resolve_training(training: Any) -> Any:
    """The `training` argument of a `call` as Keras' own layers read it: a bool or a tensor."""
    if training is None:
        training = keras.backend.learning_phase()
    return bool(training) if isinstance(training, int) else training


def is_building() -> bool:
    """Whether Keras calls a layer just to find out the shapes of what it gives."""
    if tf.executing_eagerly():
        return False
    name = str(getattr(tf.compat.v1.get_default_graph(), "name", ""))
    return name == "keras_graph" or name.endswith("_scratch_graph")


def is_in_converter() -> bool:
    """Whether TFLite's converter traces a Keras model, which it was given as such."""
    frame = None if tf.executing_eagerly() else inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "tensorflow.lite.python.lite":
            return True
        frame = frame.f_back
    return False


def mask_of(x: Any) -> Any:
    """The mask that a tensor carries, or None."""
    return getattr(x, "_keras_mask", None)


def set_mask(x: Any, mask: Any) -> None:
    """Makes a tensor carry a mask, for the layers that read it."""
    if mask is not None:
        x._keras_mask = mask


def attention_parts(layer: Any) -> dict[str, Any] | None:
    """What a MultiHeadAttention computes with; None if it attends over several axes at once.

    Its four EinsumDense layers by what they project, its equations, the factor of its queries and
    its rate of dropout.
    """
    if len(layer._attention_axes) > 1:
        return None
    projections = {
        part: getattr(layer, f"_{part}_dense") for part in ("query", "key", "value", "output")
    }
    return {
        **projections,
        "product": layer._dot_product_equation,
        "combination": layer._combine_equation,
        "scale": layer._key_dim**-0.5,
        "dropout": layer._dropout,
    }


def takes_mask(layer: Any) -> bool:
    """Whether a layer's `call` has an argument `mask`."""
    return bool(layer._call_spec.expects_mask_arg)


@contextlib.contextmanager
def recurrence(rnn: Callable[..., Any], *layers: Any) -> Iterator[None]:
    """Runs a block in which `rnn` stands for `keras.backend.rnn`, also in LSTM and GRU.

    Keras' recurrent layers all compute with that function; those two have other ways besides.
    """
    module: Any = inspect.getmodule(keras.backend.rnn)
    inner = [each for layer in layers for each in layer._flatten_layers()]
    chooses = [each for each in inner if hasattr(each, "_could_use_gpu_kernel")]
    before = module.rnn, [each._could_use_gpu_kernel for each in chooses]
    module.rnn = rnn
    for each in chooses:
        each._could_use_gpu_kernel = False
    try:
        yield
    finally:
        module.rnn = before[0]
        for each, could in zip(chooses, before[1], strict=True):
            each._could_use_gpu_kernel = could


def forget_dropout(layer: Any) -> None:
    """Lets the cell of a recurrent layer draw what it drops anew, as each call does."""
    layer._maybe_reset_cell_dropout_mask(layer.cell)


def output_shape(layer: Any, input_shape: Any) -> Any:
    """The shape of a built layer's output. EinsumDense itself leaves out what it was not told."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return layer.compute_output_shape(input_shape)
    with tf.Graph().as_default():
        x, kernel = (
            tf.raw_ops.Placeholder(dtype=tf.float32, shape=shape)
            for shape in (input_shape, layer.kernel.shape)
        )
        return tf.einsum(layer.equation, x, kernel).shape


def steps_per_execution(model: Any) -> int:
    """How many training steps Keras runs at a time."""
    steps = model._steps_per_execution  # A variable, on each replica where there are several.
    return 1 if steps is None else int(keras.backend.get_value(steps))


def make_training_variables(model: Any, batches: Any, training: bool) -> None:
    """Makes the variables of the optimizer and the metrics, for steps on `batches`, an iterator.

    Keras makes them while it traces the first step, and TensorFlow traces a function twice that
    made variables. Leaves that to Keras if data is distributed, or if there are no targets.
    """
    if not isinstance(batches, tf.data.Iterator):
        return
    _, targets, weights = keras.utils.unpack_x_y_sample_weight(batches.element_spec)
    if targets is None or model.compiled_loss is None:
        return
    if training and hasattr(model.optimizer, "build"):  # Legacy optimizers have no such method.
        model.optimizer.build(model.trainable_variables)

    def measure(targets: Any, outputs: Any, weights: Any) -> None:
        model.compiled_loss(targets, outputs, weights)
        model.compiled_metrics.update_state(targets, outputs, weights)

    outputs = tf.nest.map_structure(lambda each: each.type_spec, model.output)
    tf.function(measure).get_concrete_function(targets, outputs, weights)


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of one model, so that TensorFlow has no need to warn of many."""
    return without_warnings(tf.function(function, autograph=False, **options))


FEW_CALLS = 20
"""So often `traced_in_time` runs a function as it is."""


def traced_in_time(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function that is traced if it is called often: tracing takes as long as so many runs."""
    graph, calls = traced(function), itertools.count()
    return lambda: (graph if next(calls) >= FEW_CALLS else function)()


def without_warnings(function: Any) -> Any:
    """A `tf.function` that is made anew for each model or phase: no fault of its caller's."""
    if hasattr(function, "_omit_frequent_tracing_warning"):
        function._omit_frequent_tracing_warning = True
    return function


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Runs a block that makes many objects, and all to stay: Python looks for no garbage in it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_TURN = threading.RLock()


def one_at_a_time(verb: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorator: threads take turns, as layers have other weights in between (see `swapped`)."""

    @functools.wraps(verb)
    def in_turn(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with _TURN:
            return verb(*args, **kwargs)

    return in_turn


@contextlib.contextmanager
def swapped(layer: Any, **attributes: Any) -> Iterator[None]:
    """Runs a block with attributes of `layer` replaced, e.g. its kernel by a quantized one.

    Goes past Keras' attribute tracking, so that the layer keeps owning its weights. The layer's
    own `call` then computes with the replacement: every option it has is honoured.
    """
    before = {name: layer.__dict__[name] for name in attributes}
    layer.__dict__.update(attributes)
    try:
        yield
    finally:
        layer.__dict__.update(before)
