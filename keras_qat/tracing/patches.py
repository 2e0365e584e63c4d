"""Lists the replacements in TensorFlow and Keras while the code of a layer is traced.

Most functions of TensorFlow accept Keras' symbolic tensors, but not all, and Python can neither
count nor compare them. Each entry of `PATCHES` supports one kind of code.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from keras_qat.keras2.backend import swap_attributes
from keras_qat.tracing.concrete_sizes import read_sizes_as_integers
from keras_qat.tracing.inner_calls import trace_inner_calls
from keras_qat.tracing.layer_weights import (
    let_assign,
    list_symbols_as_weights,
    replace_variables,
)
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


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replacement.

    Args:
        name: its effect.
        apply: returns a context manager for a `Trace`.
        why: the problem without it.
    """

    name: str
    apply: Callable[[Trace], contextlib.AbstractContextManager[Any]]
    why: str


@contextlib.contextmanager
def apply_patches(trace: Trace) -> Iterator[None]:
    """Activates all patches inside a `with` block."""
    with contextlib.ExitStack() as block:
        for patch in PATCHES:
            block.enter_context(patch.apply(trace))
        yield


@contextlib.contextmanager
def _replace_weights(trace: Trace) -> Iterator[None]:
    with contextlib.ExitStack() as block:
        for owner, held in trace.holders:
            block.enter_context(swap_attributes(owner, **replace_variables(held, trace.stand_ins)))
            let_assign(owner, held, trace.stand_ins, trace.assigned)
        yield


def _draw_in_each_step(trace: Trace) -> contextlib.AbstractContextManager[Any]:
    if not trace.training or not trace.inputs:
        return contextlib.nullcontext()
    return draw_in_each_step(next(iter(trace.inputs.values())))


PATCHES = (
    Patch(
        "weights are symbolic tensors",
        _replace_weights,
        "`self.kernel` would be a constant of the trace",
    ),
    Patch(
        "losses and metrics are collected",
        lambda trace: swap_attributes(trace.layer, **trace.replacements),
        "`self.add_loss` would add to the layer itself",
    ),
    Patch(
        "lists of weights hold symbolic tensors",
        lambda trace: list_symbols_as_weights(trace.stand_ins),
        "`self.weights` would return variables",
    ),
    Patch(
        "calls of layers are recorded",
        lambda trace: trace_inner_calls(trace.tape, trace.layer, trace.lenders),
        "weights of inner layers would count as borrowed",
    ),
    Patch(
        "loops of known length are unrolled",
        lambda trace: unroll_loops(),
        "`tf.while_loop`, `tf.map_fn` and `tf.TensorArray` accept no symbolic tensors",
    ),
    Patch(
        "Python and NumPy draw their largest random values",
        lambda trace: draw_largest(),
        "layers that are dropped at random would be missing in the trace for good",
    ),
    Patch(
        "TensorFlow draws random values in each step",
        _draw_in_each_step,
        "`tf.random.normal((8,))` would be a constant of the trace",
    ),
    Patch(
        "sizes are integers",
        lambda trace: read_sizes_as_integers(),
        "`range(tf.shape(x)[1])` and `if tf.rank(x) == 3` need an integer",
    ),
    Patch(
        "Fourier transforms accept symbolic tensors",
        lambda trace: record_transforms(),
        "Keras does not dispatch `tf.signal.rfft`, unlike all other functions",
    ),
    Patch(
        "functions with custom gradients accept symbolic tensors",
        lambda trace: record_custom_gradients(),
        "`tf.custom_gradient` records on a tape",
    ),
    Patch(
        "functions of TensorFlow run as Python code",
        lambda trace: run_functions_eagerly(),
        "`tf.function` accepts no symbolic tensors",
    ),
    Patch(
        "code is not executed eagerly",
        lambda trace: deny_eager_execution(),
        "code raises for tensors that are not eager, or reads their values",
    ),
    Patch(
        "assertions pass",
        lambda trace: skip_assertions(),
        "`tf.debugging.assert_equal` needs values",
    ),
    Patch(
        "`tf.nn.convolution` of a sequence is `tf.nn.conv1d`",
        lambda trace: keep_convolutions(),
        "with dilations it becomes three operations",
    ),
    Patch(
        "symbolic tensors are tensors",
        lambda trace: count_symbols_as_tensors(),
        "code asks `isinstance(x, tf.Tensor)` or `tf.is_tensor(x)`",
    ),
)
"""All patches, in the order of their activation."""
