"""Finds the Keras 2 package and wraps the Keras behaviour that layers rely on."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import tensorflow as tf
from tensorflow.python.framework import func_graph


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


if TYPE_CHECKING:
    import tf_keras as keras
    from tf_keras import layers
else:
    keras = _find_keras_2()
    layers = keras.layers
_base_layer: Any = inspect.getmodule(layers.Layer)

register = keras.utils.register_keras_serializable(package="keras_qat")
"""Class decorator: `load_model` finds the class without a scope or custom objects."""


class KeepsTrainable:
    """A model whose layers keep their `trainable` flags when loaded from a SavedModel.

    Keras makes the model from its configuration and then sets the model's own flag, which
    overwrites the flags of nested layers. `None` stops Keras from setting it.
    """

    @property
    def _tracking_metadata(self) -> str:
        metadata = json.loads(super()._tracking_metadata)  # type: ignore[misc]
        return json.dumps({**metadata, "trainable": None})


def add_scalar(layer: Any, name: str, value: float, dtype: str = "float32", **options: Any) -> Any:
    """Adds a weight to a layer that is one number, does not train, and is equal on all replicas."""
    return layer.add_weight(
        name=name,
        shape=(),
        dtype=dtype,
        initializer=tf.constant_initializer(value),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        **options,
    )


def resolve_training(training: Any) -> Any:
    """Resolves the `training` argument of a `call` as Keras' layers do: a bool or a tensor."""
    if training is None:
        training = keras.backend.learning_phase()
    return bool(training) if isinstance(training, int) else training


def is_building() -> bool:
    """Returns whether Keras calls a layer only to infer the shapes of its outputs."""
    if tf.executing_eagerly():
        return False
    name = str(getattr(tf.compat.v1.get_default_graph(), "name", ""))
    return name == "keras_graph" or name.endswith("_scratch_graph")


def find_calling_layer() -> tuple[Any, Any]:
    """Returns the layer or model inside whose `call` this is, or None, and its `training`."""
    context = _base_layer.base_layer_utils.call_context()
    return context.layer, context.training


def is_in_converter() -> bool:
    """Whether TFLite's converter is tracing a Keras model.

    Walks the call stack, as the converter leaves no other mark: to a model it looks like any other
    saving. Without this, users of `from_keras_model` would read pages about unknown operators.
    """
    frame = None if tf.executing_eagerly() else inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "tensorflow.lite.python.lite":
            return True
        frame = frame.f_back
    return False


def get_keras_mask(x: Any) -> Any:
    """Returns the mask that a tensor carries, or None."""
    return getattr(x, "_keras_mask", None)


def set_keras_mask(x: Any, mask: Any) -> None:
    """Makes a tensor carry a mask, for the layers that read it."""
    if mask is not None:
        x._keras_mask = mask


def get_attention_components(layer: Any) -> dict[str, Any]:
    """Returns the parts of a MultiHeadAttention.

    They are its four EinsumDense layers by name, its equations, the axes that it attends over, the
    scale of its queries and its dropout rate.
    """
    projections = {
        part: getattr(layer, f"_{part}_dense") for part in ("query", "key", "value", "output")
    }
    return {
        **projections,
        "product": layer._dot_product_equation,
        "combination": layer._combine_equation,
        "axes": tuple(layer._attention_axes),
        "scale": layer._key_dim**-0.5,
        "dropout": layer._dropout,
    }


def accepts_mask(layer: Any) -> bool:
    """Returns whether a layer's `call` has an argument `mask`."""
    return bool(layer._call_spec.expects_mask_arg)


def is_symbolic(x: Any) -> bool:
    """Returns whether anything, also what is no tensor, is a symbolic tensor of Keras."""
    return hasattr(x, "_keras_history")


def has_mask_argument(layer: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a call says itself what the argument `mask` of a layer is."""
    by_position = layer._call_spec.arg_was_passed("mask", args, {}, inputs_in_args=True)
    return bool(by_position or kwargs.get("mask") is not None)


@contextlib.contextmanager
def replace_rnn(rnn: Callable[..., Any], *layers: Any) -> Iterator[None]:
    """Runs a block in which recurrent layers compute with `rnn` in place of `keras.backend.rnn`.

    Replaces the function in Keras' module, as no layer takes another loop as an argument: all of
    them, a user's own included, look it up there. LSTM and GRU are kept from their GPU kernels.
    """
    module: Any = inspect.getmodule(keras.backend.rnn)
    inner = [part for layer in layers for part in layer._flatten_layers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(swap_attributes(module, rnn=rnn))
        for layer in inner:
            if hasattr(layer, "_could_use_gpu_kernel"):
                stack.enter_context(swap_attributes(layer, _could_use_gpu_kernel=False))
        yield


def reset_dropout_mask(layer: keras.layers.Layer) -> None:
    """Resets the dropout mask of a recurrent layer's cell, as each call of the layer does."""
    layer._maybe_reset_cell_dropout_mask(layer.cell)


def infer_output_shape(layer: Any, input_shape: Any) -> Any:
    """Returns the shape of a built layer's output, also where EinsumDense leaves sizes out.

    An Embedding computes any shape, whatever its `input_length` says.
    """
    if isinstance(layer, keras.layers.Embedding):
        return tf.TensorShape([*input_shape, layer.output_dim])
    if not isinstance(layer, keras.layers.EinsumDense):
        return layer.compute_output_shape(input_shape)
    with tf.Graph().as_default():
        x, kernel = (
            tf.raw_ops.Placeholder(dtype=tf.float32, shape=shape)
            for shape in (input_shape, layer.kernel.shape)
        )
        return tf.einsum(layer.equation, x, kernel).shape


def get_steps_per_execution(model: Any) -> int:
    """Returns how many training steps Keras runs at a time."""
    steps = model._steps_per_execution  # A variable, or one for each replica.
    return 1 if steps is None else int(steps.value())


def make_training_variables(model: Any, batches: Any, training: bool) -> None:
    """Makes the variables of the optimizer and the metrics before the first step is traced.

    TensorFlow traces a function twice if the first trace makes variables, as Keras' does. Nothing
    is done for distributed data or without targets. `batches` is the iterator of training data.
    """
    if not isinstance(batches, tf.data.Iterator):
        return
    _, targets, weights = keras.utils.unpack_x_y_sample_weight(batches.element_spec)
    if targets is None or model.compiled_loss is None:
        return
    if training and hasattr(model.optimizer, "build"):  # Legacy optimizers have no such method.
        model.optimizer.build(model.trainable_variables)

    def measure(targets: Any, outputs: Any, weights: Any) -> None:
        with AUTOGRAPH_AS_USUAL:
            model.compiled_loss(targets, outputs, weights)
            model.compiled_metrics.update_state(targets, outputs, weights)

    def with_any_batch(tensor: Any) -> Any:
        """Targets may come in other batches than a model's inputs are said to have."""
        spec = tensor.type_spec
        is_plain = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_plain else spec

    outputs = tf.nest.map_structure(with_any_batch, model.output)
    # A `tf.function` would be traced twice, as there are variables to make.
    func_graph.func_graph_from_py_func("measure", measure, (targets, outputs, weights), {})


def make_tf_function(function: Callable[..., Any], **options: Any) -> Any:
    """Makes a `tf.function` that does not warn of frequent tracing, as each model makes its own."""
    return silence_retracing(tf.function(function, autograph=False, **options))


AUTOGRAPH_AS_USUAL = tf.__internal__.autograph.control_status_ctx()
"""Scope in which Keras lets AutoGraph convert the `call` of users' layers, within functions that
are not converted themselves."""

without_autograph = tf.autograph.experimental.do_not_convert
"""Calls Python as it is, also in a `tf.function`, whose code AutoGraph has converted for Keras."""

FEW_CALLS = 20
"""Number of calls that `trace_after_few_calls` runs without tracing."""


def trace_after_few_calls(function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that is traced after `FEW_CALLS` calls, which is what tracing costs.

    Its graph is called as it is: to look for it by its arguments takes longer than reading weights.
    """
    graph, calls = (
        functools.cache(make_tf_function(function).get_concrete_function),
        itertools.count(),
    )
    return lambda: (graph() if next(calls) >= FEW_CALLS else function)()


def silence_retracing(function: Any) -> Any:
    """Stops a `tf.function` from warning of frequent tracing, and returns it."""
    if hasattr(function, "_omit_frequent_tracing_warning"):
        function._omit_frequent_tracing_warning = True
    return function


@contextlib.contextmanager
def allow_any_batch_sizes() -> Iterator[None]:
    """Runs a block in which Keras does not warn that a model's inputs differ in their first sizes.

    Inputs that stand for weights have no batch.
    """
    logger = tf.get_logger()

    def is_other(record: Any) -> bool:
        return "incompatible static batch sizes" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Runs a block with garbage collection off, as it makes many objects that stay."""
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
    """Decorator: threads take turns, because functions swap weights of layers."""

    @functools.wraps(verb)
    def in_turn(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with _TURN:
            return verb(*args, **kwargs)

    return in_turn


@contextlib.contextmanager
def patch_members(owner: Any, **members: Any) -> Iterator[None]:
    """Runs a block in which members of a module or a class are replaced.

    Other threads call the functions that were there before.
    """
    before, thread = dict(vars(owner)), threading.get_ident()

    def in_this_thread(new: Any, old: Any) -> Any:
        @functools.wraps(old)
        def called(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == thread else old)(*args, **kwargs)

        return called

    try:
        for name, new in members.items():
            old = before.get(name)
            has_both = isinstance(new, FunctionType) and callable(old)
            setattr(owner, name, in_this_thread(new, old) if has_both else new)
        yield
    finally:
        for name in members:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


@contextlib.contextmanager
def swap_attributes(layer: Any, **attributes: Any) -> Iterator[None]:
    """Runs a block with attributes of `layer` replaced, e.g. its kernel by a quantized one.

    Keras' attribute tracking is bypassed, so the layer keeps its weights. The layer's own `call`
    then computes with the replacement and all of its options. Attributes of the class are hidden.
    """
    own = vars(layer)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        own.update(before)
        for name in attributes.keys() - before.keys():
            del own[name]
