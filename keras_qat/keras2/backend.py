"""Finds the package that holds Keras 2 (`keras` or `tf_keras`), and wraps its private functions."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import gen_resource_variable_ops


def _find_keras_2() -> Any:
    major, minor = (int(number) for number in tf.__version__.split(".")[:2])
    if (major, minor) < (2, 16):
        return tf.keras
    try:
        import tf_keras
    except ImportError as error:
        raise ImportError(
            f"keras_qat needs Keras 2, which is the package tf-keras since TensorFlow 2.16. "
            f"Install the matching version: pip install 'tf-keras~={major}.{minor}.0'"
        ) from error
    return tf_keras


if TYPE_CHECKING:
    import tf_keras as keras
    from tf_keras import layers
    from tf_keras.src.engine.keras_tensor import KerasTensor
    from tf_keras.src.engine.node import Node
else:
    keras = _find_keras_2()
    layers = keras.layers
    _tensor = keras.Input((1,), name="symbol")
    KerasTensor = type(_tensor)
    """Keras' class of symbolic tensors. One that is created directly has no layer."""
    Node = type(_tensor.node)
    """Keras' class of layer calls."""

_base_layer: Any = inspect.getmodule(layers.Layer)

register = keras.utils.register_keras_serializable(package="keras_qat")
"""A class decorator. `load_model` then finds the class without custom objects."""


class KeepsTrainable:
    """A model that keeps the `trainable` flags of its layers when loaded from a SavedModel.

    Keras creates the model from its configuration and then sets the model's own flag, which
    overwrites the flags of nested layers. If the saved flag is `None`, Keras does not set it.
    """

    @property
    def _tracking_metadata(self) -> str:
        metadata = json.loads(super()._tracking_metadata)  # type: ignore[misc]
        return json.dumps({**metadata, "trainable": None})


def add_scalar(
    layer: keras.layers.Layer, name: str, value: float, dtype: str = "float32", **options: object
) -> tf.Variable:
    """Adds a scalar weight that is not trained and is equal on all replicas."""
    return layer.add_weight(
        name=name,
        shape=(),
        dtype=dtype,
        initializer=tf.constant_initializer(value),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        **options,
    )


def resolve_training(training: bool | int | tf.Tensor | None) -> bool | tf.Tensor:
    """Returns the `training` argument of a `call`, resolved to a bool or a tensor as in Keras."""
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
    """Returns the layer or model that is being called (or None), and its `training` argument."""
    context = _base_layer.base_layer_utils.call_context()
    return context.layer, context.training


def is_in_converter() -> bool:
    """Returns whether TFLite's converter is tracing a Keras model.

    It inspects the call stack, because nothing else distinguishes conversion from saving. Without
    this check, users of `from_keras_model` would get long errors about unknown operators.
    """
    frame = None if tf.executing_eagerly() else inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "tensorflow.lite.python.lite":
            return True
        frame = frame.f_back
    return False


def make_input(shape: object, dtype: str | tf.DType, name: str | None = None) -> KerasTensor:
    """Returns a symbolic input. The shape includes the batch axis."""
    return keras.Input(type_spec=tf.TensorSpec(shape, dtype), name=name)


def is_symbolic(x: object) -> bool:
    """Returns whether an object, of any type, is the symbolic output of a Keras layer."""
    return hasattr(x, "_keras_history")


def get_keras_mask(x: tf.Tensor) -> tf.Tensor | None:
    """Returns the Keras mask (`_keras_mask`) that a tensor carries, or None."""
    return getattr(x, "_keras_mask", None)


def set_keras_mask(x: tf.Tensor, mask: tf.Tensor | None) -> None:
    """Attaches a Keras mask (`_keras_mask`) to a tensor, for the layers that read it."""
    if mask is not None:
        x._keras_mask = mask


def accepts_mask(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer's `call` has an argument `mask`."""
    return bool(layer._call_spec.expects_mask_arg)


def has_mask_argument(layer: keras.layers.Layer, args: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether a call passes an explicit `mask` to a layer."""
    by_position = layer._call_spec.arg_was_passed("mask", args, {}, inputs_in_args=True)
    return bool(by_position or kwargs.get("mask") is not None)


def get_attention_components(layer: keras.layers.MultiHeadAttention) -> dict[str, Any]:
    """Returns the private attributes of a MultiHeadAttention that define its computation.

    These are its four EinsumDense layers by name, its equations, the axes that it attends over, the
    scale of its queries and its dropout rate.
    """
    projections = {
        name: getattr(layer, f"_{name}_dense") for name in ("query", "key", "value", "output")
    }
    return {
        **projections,
        "product": layer._dot_product_equation,
        "combination": layer._combine_equation,
        "axes": tuple(layer._attention_axes),
        "scale": layer._key_dim**-0.5,
        "dropout": layer._dropout,
    }


@contextlib.contextmanager
def replace_rnn(rnn: Callable[..., Any], *layers: keras.layers.Layer) -> Iterator[None]:
    """Makes recurrent layers use `rnn` instead of `keras.backend.rnn` inside a `with` block.

    Replaces the function in Keras' module, because all recurrent layers, including custom layers,
    look it up there. LSTM and GRU do not use their GPU kernels in this block.
    """
    module: Any = inspect.getmodule(keras.backend.rnn)
    inner = [item for layer in layers for item in layer._flatten_layers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(swap_attributes(module, rnn=rnn))
        for layer in inner:
            if hasattr(layer, "_could_use_gpu_kernel"):
                stack.enter_context(swap_attributes(layer, _could_use_gpu_kernel=False))
        yield


def reset_dropout_mask(layer: keras.layers.Layer) -> None:
    """Resets the dropout mask of a recurrent layer's cell, as each call of the layer does."""
    layer._maybe_reset_cell_dropout_mask(layer.cell)


def infer_output_shape(layer: keras.layers.Layer, input_shape: Any) -> Any:
    """Returns the shape of a built layer's output, even if Keras does not infer all sizes.

    Keras does not infer all sizes of EinsumDense, and allows only one length for an Embedding.
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


def get_steps_per_execution(model: keras.Model) -> int:
    """Returns how many training steps Keras runs at a time."""
    steps = model._steps_per_execution  # A variable, possibly per replica.
    return 1 if steps is None else int(steps.value())


def make_training_variables(model: keras.Model, batches: object, training: bool) -> None:
    """Creates the variables of the optimizer and the metrics before the first step is traced.

    Normally, the first trace creates these variables, so TensorFlow traces a second time. This
    function has no effect for distributed data or without targets.

    Args:
        model: the model.
        batches: the iterator of training data.
        training: whether to create the optimizer's variables, too.
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

    def allow_any_batch(tensor: KerasTensor) -> Any:
        """Returns the specification of a tensor, with any batch size, for targets of that shape."""
        spec = tensor.type_spec
        is_plain = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_plain else spec

    outputs = tf.nest.map_structure(allow_any_batch, model.output)
    # A `tf.function` would be traced twice, because it creates variables.
    func_graph.func_graph_from_py_func("measure", measure, (targets, outputs, weights), {})


def make_tf_function(function: Callable[..., Any], **options: object) -> Any:
    """Creates a `tf.function` that does not warn about frequent tracing."""
    return silence_retracing(tf.function(function, autograph=False, **options))


def trace_for_any_batch(function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Any:
    """Traces a function for any batch size. Keras allows any, even if a model fixes the size.

    A layer that reads the batch size, as in `tf.zeros([x.shape[0], 8])`, reads the size in `specs`.
    """
    open_specs = [
        tf.TensorSpec([None, *spec.shape[1:]] if spec.shape.rank else spec.shape, spec.dtype)
        for spec in specs
    ]
    traced = make_tf_function(function)
    try:
        return traced.get_concrete_function(*open_specs)
    except (TypeError, ValueError):
        if open_specs == specs:
            raise
        return traced.get_concrete_function(*specs)


AUTOGRAPH_AS_USUAL = tf.__internal__.autograph.control_status_ctx()
"""A scope in functions without AutoGraph. In it, AutoGraph converts custom layers' `call`."""

without_autograph = tf.autograph.experimental.do_not_convert
"""A decorator. AutoGraph then leaves a function unchanged, even in a `tf.function` of Keras."""

FEW_CALLS = 20
"""Number of calls that `trace_after_few_calls` runs without tracing."""


def trace_after_few_calls(function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that is traced only after `FEW_CALLS` calls, so tracing saves time.

    After that, it calls the graph directly, without the slow lookup of a `tf.function`.
    """
    get_graph = functools.cache(make_tf_function(function).get_concrete_function)
    calls = itertools.count()
    return lambda: (get_graph() if next(calls) >= FEW_CALLS else function)()


def silence_retracing(function: Any) -> Any:
    """Stops a `tf.function` from warning of frequent tracing, and returns it."""
    if hasattr(function, "_omit_frequent_tracing_warning"):
        function._omit_frequent_tracing_warning = True
    return function


@contextlib.contextmanager
def allow_any_batch_sizes() -> Iterator[None]:
    """Suppresses Keras' warning about inputs with different first sizes inside a `with` block.

    Such inputs represent weights, which have no batch.
    """
    logger = tf.get_logger()

    def is_other(record: Any) -> bool:
        return "incompatible static batch sizes" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_TURN = threading.RLock()


def one_at_a_time(verb: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorates a function that swaps weights, so that only one thread at a time runs it."""

    @functools.wraps(verb)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with _TURN:
            return verb(*args, **kwargs)

    return run


@contextlib.contextmanager
def patch_members(owner: object, **members: Any) -> Iterator[None]:
    """Replaces members of a module or a class inside a `with` block.

    Other threads still call the original functions.
    """
    before, thread = dict(vars(owner)), threading.get_ident()

    def dispatch(new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def call_by_thread(*args: object, **kwargs: object) -> Any:
            return (new if threading.get_ident() == thread else old)(*args, **kwargs)

        return call_by_thread

    try:
        for name, new in members.items():
            old = before.get(name)
            has_both = isinstance(new, FunctionType) and callable(old)
            setattr(owner, name, dispatch(new, old) if has_both else new)  # type: ignore[arg-type]
        yield
    finally:
        for name in members:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


@contextlib.contextmanager
def create_quickly() -> Iterator[None]:
    """Pauses garbage collection while a block creates many permanent objects.

    Variables created inside have no debug names, which would cost 0.5 ms for each variable.
    """
    make, was_enabled = gen_resource_variable_ops.var_handle_op, gc.isenabled()

    def make_unnamed(**options: Any) -> Any:
        if "debug_name" in options:  # TensorFlow 2.15 has none.
            options["debug_name"] = ""
        return make(**options)

    gc.disable()
    try:
        with patch_members(gen_resource_variable_ops, var_handle_op=make_unnamed):
            yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def swap_attributes(layer: object, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of a layer, such as its kernel, inside a `with` block.

    The layer's `call` then uses the replacements. Keras does not track them, so the layer keeps its
    weights. They also hide attributes of the class, such as properties.
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
