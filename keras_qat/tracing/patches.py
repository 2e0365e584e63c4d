"""What is replaced in TensorFlow and Keras while the code of a layer is traced.

Keras' symbolic tensors can be passed to most functions of TensorFlow, but not to all, and Python
can neither count nor compare them. Each entry of `PATCHES` lets code of one kind run all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import swapped
from keras_qat.tracing.concrete_sizes import sizes_as_numbers
from keras_qat.tracing.custom_gradients import gradients_of_symbols
from keras_qat.tracing.inner_calls import (
    calls_inside,
    convolutions_at_once,
    functions_as_code,
    symbols_as_tensors,
    without_checks,
)
from keras_qat.tracing.layer_weights import let_assign, listed_as_symbols, with_symbols
from keras_qat.tracing.random_draws import draws_in_each_step, largest_draws
from keras_qat.tracing.real_transforms import transforms_of_symbols
from keras_qat.tracing.unrolled_loops import steps_written_out


@dataclasses.dataclass
class TracedCode:
    """The code of a layer and what it works on.

    Args:
        layer: the layer.
        lenders: other layers whose weights it reads.
        training: the phase in which it is traced.
        inputs: the symbolic tensors that it is called with.
        holders: the layers and objects that hold weights, each with the attributes that do.
        stand_ins: id of a variable -> what code reads instead of it.
        replacements: name of a method of the layer -> what code calls instead of it.
        tape: records which variables are read.
        assigned: is filled: id of a variable -> what code assigns to it.
    """

    layer: Any
    lenders: list[Any]
    training: bool | None
    inputs: list[Any]
    holders: list[tuple[Any, dict[str, Any]]]
    stand_ins: dict[int, Any]
    replacements: dict[str, Callable[..., Any]]
    tape: tf.GradientTape
    assigned: dict[int, Any]


@dataclasses.dataclass(frozen=True)
class Patch:
    """One thing that is replaced.

    Args:
        name: what holds while it is in place.
        apply: returns the block in which it is in place, for one trace.
        why: what goes wrong without it.
    """

    name: str
    apply: Callable[[TracedCode], contextlib.AbstractContextManager[Any]]
    why: str


@contextlib.contextmanager
def apply_patches(code: TracedCode) -> Iterator[None]:
    """Run a block with all patches in place."""
    with contextlib.ExitStack() as block:
        for patch in PATCHES:
            block.enter_context(patch.apply(code))
        yield


@contextlib.contextmanager
def _weights_as_symbols(code: TracedCode) -> Iterator[None]:
    with contextlib.ExitStack() as block:
        for owner, held in code.holders:
            block.enter_context(swapped(owner, **with_symbols(held, code.stand_ins)))
            let_assign(owner, held, code.stand_ins, code.assigned)
        yield


def _draws_in_each_step(code: TracedCode) -> contextlib.AbstractContextManager[Any]:
    if not code.training or not code.inputs:
        return contextlib.nullcontext()
    return draws_in_each_step(code.inputs[0])


PATCHES = (
    Patch(
        "weights are symbolic tensors",
        _weights_as_symbols,
        "`self.kernel` would be a constant of the trace",
    ),
    Patch(
        "losses and metrics are collected",
        lambda code: swapped(code.layer, **code.replacements),
        "`self.add_loss` would add to the layer itself",
    ),
    Patch(
        "lists of weights hold symbolic tensors",
        lambda code: listed_as_symbols(code.stand_ins),
        "`self.weights` would return variables",
    ),
    Patch(
        "calls of layers are noted",
        lambda code: calls_inside(code.tape, code.layer, code.lenders),
        "weights that layers inside read would count as borrowed",
    ),
    Patch(
        "loops of known length are unrolled",
        lambda code: steps_written_out(),
        "`tf.while_loop`, `tf.map_fn` and `tf.TensorArray` take no symbolic tensors",
    ),
    Patch(
        "Python and NumPy draw their largest random numbers",
        lambda code: largest_draws(),
        "layers that are dropped at random would be missing in the trace for good",
    ),
    Patch(
        "TensorFlow draws random numbers in each step",
        _draws_in_each_step,
        "`tf.random.normal((8,))` would be a constant of the trace",
    ),
    Patch(
        "sizes are Python's numbers",
        lambda code: sizes_as_numbers(),
        "`range(tf.shape(x)[1])` and `if tf.rank(x) == 3` need a number",
    ),
    Patch(
        "Fourier transforms take symbolic tensors",
        lambda code: transforms_of_symbols(),
        "`tf.signal.rfft` is the only kind of function that Keras does not dispatch",
    ),
    Patch(
        "functions with custom gradients take symbolic tensors",
        lambda code: gradients_of_symbols(),
        "`tf.custom_gradient` records on a tape",
    ),
    Patch(
        "functions of TensorFlow run as Python code",
        lambda code: functions_as_code(),
        "`tf.function` takes no symbolic tensors",
    ),
    Patch(
        "assertions pass",
        lambda code: without_checks(),
        "`tf.debugging.assert_equal` needs values",
    ),
    Patch(
        "`tf.nn.convolution` of a sequence is `tf.nn.conv1d`",
        lambda code: convolutions_at_once(),
        "with gaps it is three operations, of which none says what it is for",
    ),
    Patch(
        "symbolic tensors are tensors",
        lambda code: symbols_as_tensors(),
        "code asks `isinstance(x, tf.Tensor)` or `tf.is_tensor(x)`",
    ),
)
"""All patches, in the order in which they are put in place."""
