"""What is replaced in TensorFlow and Keras while the code of a layer is traced.

Keras' symbolic tensors can be passed to most functions of TensorFlow, but not to all, and Python
can neither count nor compare them. Each entry of `PATCHES` lets code of one kind run all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from keras_qat.keras2.backend import swap_attributes
from keras_qat.tracing.concrete_sizes import read_sizes_as_integers
from keras_qat.tracing.custom_gradients import record_custom_gradients
from keras_qat.tracing.inner_calls import calls_inside
from keras_qat.tracing.layer_weights import let_assign, listed_as_symbols, with_symbols
from keras_qat.tracing.random_draws import draws_in_each_step, largest_draws
from keras_qat.tracing.replaced_functions import (
    convolutions_at_once,
    count_symbols_as_tensors,
    deny_eager_execution,
    record_transforms,
    run_functions_eagerly,
    skip_assertions,
)
from keras_qat.tracing.unrolled_loops import unroll_loops


@dataclasses.dataclass(frozen=True)
class Patch:
    """One thing that is replaced.

    Args:
        name: what holds while it is in place.
        apply: returns the block in which it is in place, for a `Trace`.
        why: what goes wrong without it.
    """

    name: str
    apply: Callable[[Any], contextlib.AbstractContextManager[Any]]
    why: str


@contextlib.contextmanager
def apply_patches(trace: Any) -> Iterator[None]:
    """Run a block with all patches in place."""
    with contextlib.ExitStack() as block:
        for patch in PATCHES:
            block.enter_context(patch.apply(trace))
        yield


@contextlib.contextmanager
def _weights_as_symbols(trace: Any) -> Iterator[None]:
    with contextlib.ExitStack() as block:
        for owner, held in trace.holders:
            block.enter_context(swap_attributes(owner, **with_symbols(held, trace.stand_ins)))
            let_assign(owner, held, trace.stand_ins, trace.assigned)
        yield


def _draws_in_each_step(trace: Any) -> contextlib.AbstractContextManager[Any]:
    if not trace.training or not trace.inputs:
        return contextlib.nullcontext()
    return draws_in_each_step(next(iter(trace.inputs.values())))


PATCHES = (
    Patch(
        "weights are symbolic tensors",
        _weights_as_symbols,
        "`self.kernel` would be a constant of the trace",
    ),
    Patch(
        "losses and metrics are collected",
        lambda trace: swap_attributes(trace.layer, **trace.replacements),
        "`self.add_loss` would add to the layer itself",
    ),
    Patch(
        "lists of weights hold symbolic tensors",
        lambda trace: listed_as_symbols(trace.stand_ins),
        "`self.weights` would return variables",
    ),
    Patch(
        "calls of layers are noted",
        lambda trace: calls_inside(trace.tape, trace.layer, trace.lenders),
        "weights that layers inside read would count as borrowed",
    ),
    Patch(
        "loops of known length are unrolled",
        lambda trace: unroll_loops(),
        "`tf.while_loop`, `tf.map_fn` and `tf.TensorArray` take no symbolic tensors",
    ),
    Patch(
        "Python and NumPy draw their largest random numbers",
        lambda trace: largest_draws(),
        "layers that are dropped at random would be missing in the trace for good",
    ),
    Patch(
        "TensorFlow draws random numbers in each step",
        _draws_in_each_step,
        "`tf.random.normal((8,))` would be a constant of the trace",
    ),
    Patch(
        "sizes are Python's numbers",
        lambda trace: read_sizes_as_integers(),
        "`range(tf.shape(x)[1])` and `if tf.rank(x) == 3` need a number",
    ),
    Patch(
        "Fourier transforms take symbolic tensors",
        lambda trace: record_transforms(),
        "`tf.signal.rfft` is the only kind of function that Keras does not dispatch",
    ),
    Patch(
        "functions with custom gradients take symbolic tensors",
        lambda trace: record_custom_gradients(),
        "`tf.custom_gradient` records on a tape",
    ),
    Patch(
        "functions of TensorFlow run as Python code",
        lambda trace: run_functions_eagerly(),
        "`tf.function` takes no symbolic tensors",
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
        lambda trace: convolutions_at_once(),
        "with gaps it is three operations, of which none says what it is for",
    ),
    Patch(
        "symbolic tensors are tensors",
        lambda trace: count_symbols_as_tensors(),
        "code asks `isinstance(x, tf.Tensor)` or `tf.is_tensor(x)`",
    ),
)
"""All patches, in the order in which they are put in place."""
