"""Lists the functions of TensorFlow and Keras that are replaced while a layer is traced.

Some TensorFlow functions do not accept Keras' symbolic tensors. Python cannot iterate over symbolic
tensors or compare them. Each entry of `PATCHES` adds support for one kind of code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from keras_qat.keras2.backend import swap_attributes
from keras_qat.tracing.concrete_sizes import read_sizes_as_integers
from keras_qat.tracing.inner_calls import trace_inner_calls
from keras_qat.tracing.layer_weights import let_assign, list_symbols_as_weights, replace_variables
from keras_qat.tracing.replaced_functions import (
    count_symbols_as_tensors,
    deny_eager_execution,
    draw_in_each_step,
    draw_largest,
    keep_convolutions,
    record_custom_gradients,
    record_transforms,
    run_functions_eagerly,
    skip_assertions,
)
from keras_qat.tracing.unrolled_loops import unroll_loops

if TYPE_CHECKING:
    from keras_qat.tracing.trace_layer import Trace


@contextlib.contextmanager
def apply_patches(trace: Trace) -> Iterator[None]:
    with contextlib.ExitStack() as block:
        for patch in PATCHES.values():
            block.enter_context(patch(trace))
        yield


@contextlib.contextmanager
def _replace_weights(trace: Trace) -> Iterator[None]:
    with contextlib.ExitStack() as block:
        for owner, held in trace.holders:
            block.enter_context(
                swap_attributes(owner, **replace_variables(held, trace.substitutes))
            )
            let_assign(owner, held, trace.substitutes, trace.assigned)
        yield


def _draw_in_each_step(trace: Trace) -> contextlib.AbstractContextManager[Any]:
    if not trace.training or not trace.inputs:
        return contextlib.nullcontext()
    return draw_in_each_step(next(iter(trace.inputs.values())))


PATCHES: dict[str, Callable[[Trace], contextlib.AbstractContextManager[Any]]] = {
    # `self.kernel` would be a constant of the trace.
    "weights are symbolic tensors": _replace_weights,
    # `self.add_loss` would add to the layer itself.
    "losses are collected": lambda trace: swap_attributes(trace.layer, **trace.replacements),
    # `self.weights` would return variables.
    "lists of weights are symbolic": lambda trace: list_symbols_as_weights(trace.substitutes),
    # Weights of inner layers would count as borrowed.
    "inner calls are recorded": lambda trace: trace_inner_calls(
        trace.tape, trace.layer, trace.lenders
    ),
    # `tf.while_loop`, `tf.map_fn` and `tf.TensorArray` accept no symbolic tensors.
    "loops are unrolled": lambda trace: unroll_loops(),
    # Layers that are dropped at random would be missing in the trace.
    "Python and NumPy draw their largest values": lambda trace: draw_largest(),
    # `tf.random.normal((8,))` would be a constant of the trace.
    "TensorFlow draws in each step": _draw_in_each_step,
    # `range(tf.shape(x)[1])` and `if tf.rank(x) == 3` need an integer.
    "sizes are integers": lambda trace: read_sizes_as_integers(),
    # Keras does not dispatch `tf.signal.rfft`, unlike all other functions.
    "Fourier transforms are recorded": lambda trace: record_transforms(),
    # `tf.custom_gradient` accepts no symbolic tensors.
    "custom gradients are recorded": lambda trace: record_custom_gradients(),
    # `tf.function` accepts no symbolic tensors.
    "functions of TensorFlow run as Python code": lambda trace: run_functions_eagerly(),
    # In eager execution, custom code may read the values of tensors.
    "code is not executed eagerly": lambda trace: deny_eager_execution(),
    # `tf.debugging.assert_equal` needs values.
    "assertions pass": lambda trace: skip_assertions(),
    # With dilations, `tf.nn.convolution` becomes three operations.
    "a convolution of a sequence is one operation": lambda trace: keep_convolutions(),
    # Custom code may check `isinstance(x, tf.Tensor)` or `tf.is_tensor(x)`.
    "symbolic tensors are tensors": lambda trace: count_symbols_as_tensors(),
}
"""Maps a description of each patch to a context manager. The first entry is activated first."""
