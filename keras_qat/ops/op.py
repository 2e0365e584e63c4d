"""Defines an operator: one row that says all there is to know about it.

Placement, inference, simulation, the exporters, the Layers page and the contract tests read rows;
none of them asks a layer for its options. A new operator is a new row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import FAMILIES, KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call, map_values
from keras_qat.graph.precision import compute_in_float32
from keras_qat.keras2.layers_and_models import accepts_training

if TYPE_CHECKING:
    from keras_qat.ops.emission import Emission

Attributes = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OwnRange:
    """The output has a quantizer of its own.

    Args:
        non_negative: whether the output is never below zero.
        symmetric: whether its zero point is 0, for ranges inside an operator.
    """

    non_negative: bool = False
    symmetric: bool = False


@dataclasses.dataclass(frozen=True)
class SharedRange:
    """The output and all inputs have the same quantization parameters.

    Args:
        rounds: whether results fall between quantized values, and are rounded again.
    """

    rounds: bool = False


@dataclasses.dataclass(frozen=True)
class FixedRange:
    """The kernels fix the output's quantization parameters.

    Args:
        minimum, maximum: real values of the lowest and the highest int8 value.
        wide: real values of the lowest and the highest int16 value.
        is_bound: whether no result is below the lowest value.
    """

    minimum: float
    maximum: float
    wide: tuple[float, float] = (-1.0, 32767 / 32768)
    is_bound: bool = False

    def params(self, bits: int) -> QuantParams:
        """Returns the parameters of TFLite's kernels. Fewer than 8 bits are converted from 8."""
        limits = self.wide if bits == 16 else (self.minimum, self.maximum)
        return _of_range(*limits, 16 if bits == 16 else 8)


_of_range = functools.cache(QuantParams.from_range)

OutputRange = OwnRange | SharedRange | FixedRange

OWN = OwnRange()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of an integer computation.

    Args:
        family: the kernel family whose rounding is used.
        attributes: the operator's options in this call.
        q: for each input the quantized values less the zero point: whole numbers in float32, in
            float64 where they have 16 bits. Constants of an operation are inputs like tensors.
        params: the quantization parameters of each input, as float64 scalar tensors.
        output: the quantization parameters of the result.
        call: the call, for operators that compute with its own layer, on integers.
        weights: the `Weights` of a weighted operator, else None.
        merges_relu: whether results below zero count as zero.
        sized: whether the file knows the batch size, even where the call does not.
        numbers: what the row's `prepare` returned.
    """

    family: KernelFamily
    attributes: Attributes
    q: list[Any]
    params: list[QuantParams]
    output: QuantParams
    call: Call
    weights: Any = None
    merges_relu: bool = False
    sized: bool = False
    prepared: Any = None

    @property
    def wide(self) -> bool:
        """Whether the inputs have 16 bits."""
        return self.params[0].bits == 16

    def on(self, prepared: list[Any]) -> Any:
        """Calls the call's own layer on other numbers, one for each tensor that it reads."""
        remaining = iter(prepared)
        args, kwargs = map_values(lambda value: next(remaining), (self.call.args, self.call.kwargs))
        if accepts_training(self.call.layer):
            kwargs = {**kwargs, "training": False}
        with compute_in_float32(self.call.layer):
            return self.call.layer.call(*args, **kwargs)


def get_held_dtype(params: QuantParams) -> tf.DType:
    """Returns the type that holds quantized values less the zero point."""
    return tf.float64 if params.bits > 8 else tf.float32


Prepare = Callable[[Arguments], Any]
"""Computes the numbers that follow from ranges and weights alone, in any structure.

`q` then holds the shapes and types of the inputs as `tf.TensorSpec`s, one object for each tensor.
Numbers are computed in TensorFlow: eagerly, whenever ranges or weights have changed, or in a graph
that reads both each time. `compute` gets them as `numbers`, but neither weights nor scales."""

Compute = Callable[[Arguments], Any]
"""Computes the output's quantized values less its zero point, or a structure of several outputs.

Results may lie outside of the range: the caller clips them."""

Emit = Callable[["Emission"], object]
"""Writes the operator into a TFLite file."""


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An operator: a row.

    Args:
        name: the row's name, in plans and for `register_op`.
        doc: its description on the page of operators.
        layers: Keras layer classes that are this operator. Where several rows list a class, the
            first one that accepts a call has it.
        paths: module paths of such classes that Keras does not export, as `get_class_path` returns.
        kinds: kinds of operations on symbolic tensors that are this operator.
        functions: activation functions that are this operator.
        attributes: reads the options of a call, once; everything else uses what it returns.
        needs: names of the attributes that `register_op` has to be given.
        defaults: values of the attributes that `register_op` need not be given.
        accepts: returns why a call has no integer kernel, in a few words that `plan` prints, or ""
            if another row gives the reason; None if it has one.
        max_axes: the most axes of an input that kernels take.
        integers: types of integers that kernels compute as well, all by default.
        bits: bits of activations for which there are kernels; 8 stands for 2 to 8.
        families: bits -> whether a kernel family has kernels for them, where not all have.
        on_request: whether its layers are in float unless an override says `quantize=True`.
        output: how the output is quantized.
        weights: attribute of the layer that holds a weight -> axes of its output channels, counted
            from the end, `()` for one scale for all.
        trains_weights: whether training computes with quantized weights, in a wrapper.
        takes_int4: whether there are kernels for weights of 4 bits.
        folds_batch_norm: whether a BatchNormalization behind it is folded into its weights.
        takes_clip: whether kernels compute a ReLU behind it.
        clips: whether it is a ReLU that the operator before it can compute.
        elementwise: whether it treats all axes alike, wherever the channels are.
        alias: whether the output is the input itself at run time, so that nothing is computed.
        only_rounds: whether it passes real numbers on, so that rounding is all that it does.
        is_constant: whether files hold its output, whose range alone depends on its input.
        reads_only_weights: whether it computes from weights alone: the values of its inputs are
            not read, and its range is the current minimum and maximum of the result.
        has_mark: whether its output holds a number of its own, far outside of the others.
        is_table: whether its input holds indices, which are not quantized. Of weights, which are a
            table, the output consists of entries, which have the quantization parameters of it.
        gates: number of gates that the columns of its weights are split into, each with a scale of
            its own. With more than one, training simulates the gates and the states between steps.
        multiplies_tensors: whether it adds up products of two tensors.
        falls_back_to_input_range: whether an output without a quantizer has the range of the
            inputs, as means have in `recipes.contrib`.
        takes_constants: whether numbers and arrays among the arguments are quantized as inputs.
        inner: returns the ranges of tensors inside the operator, by name.
        symmetric: indices of inputs whose zero point should be 0, with which kernels are faster.
        converts: index of an input -> the range that it is converted to. An input of the model
            that only such operators read has that range from the start.
        prepare: computes the numbers of the integer implementation that follow from ranges and
            weights alone, once for many batches. Without it `compute` gets ranges and weights.
        compute: the integer implementation, for every kernel family and all `bits`.
        emit: writes the operator into a TFLite file.
        onnx_kernel: whether onnxruntime has an integer kernel, besides those of operators that have
            weights or only move values. All other operators compute in float there.
        products: counts the multiply-accumulates of a call for one example; None if a size is not
            known.
    """

    name: str
    compute: Compute
    emit: Emit
    doc: str = ""
    layers: tuple[type, ...] = ()
    paths: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    functions: tuple[Any, ...] = ()
    attributes: Callable[[Call], Attributes] = lambda call: {}
    needs: tuple[str, ...] = ()
    defaults: Attributes = dataclasses.field(default_factory=dict)
    accepts: Callable[[Call, Attributes], str | None] = lambda call, attributes: None
    max_axes: int = 99
    integers: tuple[str, ...] | None = None
    bits: tuple[int, ...] = (8, 16)
    families: Mapping[int, Callable[[KernelFamily], bool]] = dataclasses.field(default_factory=dict)
    on_request: bool = False
    output: OutputRange = OWN
    weights: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    trains_weights: bool = True
    supports_int4: bool = False
    folds_batch_norm: bool = False
    can_merge_relu: bool = False
    clips: bool = False
    elementwise: bool = False
    quantizes_constants: bool = False
    inner: Callable[[Attributes], Mapping[str, OwnRange]] = lambda attributes: {}
    symmetric: tuple[int, ...] = ()
    converts: Mapping[int, FixedRange] = dataclasses.field(default_factory=dict)
    alias: bool = False
    prepare: Prepare | None = None
    only_rounds: bool = False
    is_constant: bool = False
    reads_only_weights: bool = False
    has_mark: bool = False
    is_table: bool = False
    gates: int = 1
    multiplies_tensors: bool = False
    falls_back_to_input_range: bool = False
    onnx_kernel: bool = False
    products: Callable[[Call], int | None] = lambda call: 0

    @property
    def is_weighted(self) -> bool:
        """Whether it has weights that training quantizes."""
        return bool(self.weights) and self.trains_weights

    @property
    def casts_indices(self) -> bool:
        """Whether it makes integers of indices, which may be real numbers."""
        return self.is_table and not self.weights

    @property
    def is_affine(self) -> bool:
        """Whether its weights are one factor and one offset for each channel."""
        return "" in self.weights

    def has_kernel_for(self, bits: int, family: KernelFamily | None = None) -> bool:
        """Whether a kernel family, or any, has kernels for activations of this many bits."""
        bits = 16 if bits == 16 else 8
        has_some = self.families.get(bits, lambda family: True)
        return bits in self.bits and (family is None or has_some(family))

    def only_families(self, bits: int) -> tuple[str, ...]:
        """Returns the families that have kernels for this many bits, by name; () if all have."""
        if bits not in self.families:
            return ()
        return tuple(name for name, family in FAMILIES.items() if self.families[bits](family))

    def prepare_arguments(self, a: Arguments) -> Arguments:
        """Returns the arguments with what `prepare` makes of them."""
        if self.prepare is None:
            return a
        specs = {id(q): tf.TensorSpec(q.shape, q.dtype) for q in a.q}
        of_shapes = dataclasses.replace(a, q=[specs[id(q)] for q in a.q])
        return dataclasses.replace(a, prepared=self.prepare(of_shapes), weights=None)

    def __call__(self, a: Arguments) -> Any:
        """Prepares and computes."""
        return self.compute(self.prepare_arguments(a))

    def __repr__(self) -> str:
        return f"<Op {self.name}>"
