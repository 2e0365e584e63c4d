"""Imports Keras 2, from `tf.keras` or `tf_keras`, and wraps private functions of Keras."""

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
"""Class decorator. `load_model` finds decorated classes without `custom_objects`."""


class KeepsTrainable:
    """Mixin for a model. A SavedModel of the model keeps the `trainable` flags of all layers.

    When Keras loads a SavedModel, it sets the flag of the model. This would overwrite the flags of
    all layers. The mixin saves None as the model's flag, so Keras does not set it.
    """

    @property
    def _tracking_metadata(self) -> str:
        metadata = json.loads(super()._tracking_metadata)  # type: ignore[misc]
        return json.dumps({**metadata, "trainable": None})


def add_scalar(
    layer: keras.layers.Layer, name: str, value: float, dtype: str = "float32", **options: object
) -> tf.Variable:
    """Adds a non-trainable scalar weight. Distribution strategies use the first replica's value."""
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
    """Converts a `training` argument to a bool or a tensor. None becomes Keras' learning phase."""
    if training is None:
        training = keras.backend.learning_phase()
    return bool(training) if isinstance(training, int) else training


def is_building() -> bool:
    """Returns True if Keras calls a layer on symbolic tensors to infer output shapes."""
    if tf.executing_eagerly():
        return False
    name = str(getattr(tf.compat.v1.get_default_graph(), "name", ""))
    return name == "keras_graph" or name.endswith("_scratch_graph")


def find_calling_layer() -> tuple[Any, Any]:
    """Returns `(layer, training)` of the current call of a Keras layer, or None for both."""
    context = _base_layer.base_layer_utils.call_context()
    return context.layer, context.training


def is_in_converter() -> bool:
    """Returns True if TFLite's converter is tracing a Keras model.

    Users of `from_keras_model` then get a helpful error instead of long errors about operators.
    Saving a model traces it in the same way, so only the call stack shows the difference.
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
    return hasattr(x, "_keras_history")


def get_keras_mask(x: tf.Tensor) -> tf.Tensor | None:
    return getattr(x, "_keras_mask", None)


def set_keras_mask(x: tf.Tensor, mask: tf.Tensor | None) -> None:
    if mask is not None:
        x._keras_mask = mask


def accepts_mask(layer: keras.layers.Layer) -> bool:
    return bool(layer._call_spec.expects_mask_arg)


def has_mask_argument(layer: keras.layers.Layer, args: Any, kwargs: dict[str, Any]) -> bool:
    """Returns True if a call passes an explicit `mask` to a layer."""
    by_position = layer._call_spec.arg_was_passed("mask", args, {}, inputs_in_args=True)
    return bool(by_position or kwargs.get("mask") is not None)


def get_attention_components(layer: keras.layers.MultiHeadAttention) -> dict[str, Any]:
    """Returns the private attributes of a MultiHeadAttention that define its computation.

    The entries are four EinsumDense layers, two equations, the attention axes, the scale of queries
    and the dropout rate.
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

    All recurrent layers, even custom layers, read `rnn` from Keras' module. LSTM and GRU layers in
    `layers` do not use GPU kernels, which would not call `rnn`.
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
    """Discards the dropout mask of a recurrent layer's cell, so the next call draws a new one."""
    layer._maybe_reset_cell_dropout_mask(layer.cell)


def infer_output_shape(layer: keras.layers.Layer, input_shape: Any) -> Any:
    """Returns the output shape of a built layer.

    `compute_output_shape` omits some sizes for EinsumDense, and rejects some for an Embedding.
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
    """Returns the number of training steps that Keras runs at a time."""
    steps = model._steps_per_execution  # A variable, possibly per replica.
    return 1 if steps is None else int(steps.value())


def make_training_variables(model: keras.Model, batches: object, training: bool) -> None:
    """Creates the variables of the optimizer and the metrics before the first step is traced.

    TensorFlow traces a function twice if the first trace creates variables. Does nothing for
    distributed data, or for data without targets. Omits the optimizer unless `training`.
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
        spec = tensor.type_spec
        is_plain = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_plain else spec

    outputs = tf.nest.map_structure(allow_any_batch, model.output)
    # A `tf.function` would be traced twice, because it creates variables.
    func_graph.func_graph_from_py_func("measure", measure, (targets, outputs, weights), {})


def make_tf_function(function: Callable[..., Any], **options: object) -> Any:
    return silence_retracing(tf.function(function, autograph=False, **options))


def trace_for_any_batch(function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Any:
    """Traces a function for any batch size, even if `specs` have a fixed batch size.

    Some layers need a fixed batch size, as in `tf.zeros([x.shape[0], 8])`. In this case, the
    function is traced for `specs`.
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
"""Scope in which AutoGraph converts `layer.call`, even in a function without AutoGraph."""

without_autograph = tf.autograph.experimental.do_not_convert
"""Decorator. AutoGraph does not convert decorated functions, even in a `tf.function` of Keras."""

FEW_CALLS = 20
"""Number of calls that `trace_after_few_calls` runs without tracing."""


def trace_after_few_calls(function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that is traced only after `FEW_CALLS` calls, because tracing takes long.

    Later calls are faster than those of a `tf.function`, which first searches its graphs.
    """
    get_graph = functools.cache(make_tf_function(function).get_concrete_function)
    calls = itertools.count()
    return lambda: (get_graph() if next(calls) >= FEW_CALLS else function)()


def silence_retracing(function: Any) -> Any:
    """Turns off the warning of a `tf.function` about frequent tracing. Returns the function."""
    if hasattr(function, "_omit_frequent_tracing_warning"):
        function._omit_frequent_tracing_warning = True
    return function


@contextlib.contextmanager
def allow_any_batch_sizes() -> Iterator[None]:
    """Inside a `with` block, suppresses Keras' warning that batch sizes of inputs differ.

    The warning is wrong for inputs that represent weights. Weights have no batch.
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
    """Decorator for functions that replace weights for a while. One thread at a time runs them."""

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
    """Makes the creation of many permanent objects faster inside a `with` block.

    Garbage collection is paused. Variables get no debug name, because each name costs 0.5 ms.
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

    `layer.call` then reads the replacements. Keras does not track replacements, so `layer.weights`
    stays the same. A replacement may also hide a property of the class.
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
