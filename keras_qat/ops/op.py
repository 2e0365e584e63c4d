"""The class `Op`: all properties of an operator, from its layers to its integer arithmetic.

Placement, inference, simulation, the exporters, the page of operators and the generated tests read
only `Op` objects, never the options of a layer. To add an operator, add an `Op`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import FAMILIES, KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call, map_values
from keras_qat.graph.precision import compute_in_float32
from keras_qat.keras2.layers_and_models import accepts_training

Attributes = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OwnRange:
    """The output has its own range, observed by a quantizer.

    Args:
        non_negative: whether the output is never below zero.
        symmetric: whether the zero point is 0. This is used only for ranges inside an operator.
    """

    non_negative: bool = False
    symmetric: bool = False


@dataclasses.dataclass(frozen=True)
class SharedRange:
    """The output and all inputs have the same quantization parameters.

    Args:
        rounds: whether results can lie between two quantized values, and are rounded.
    """

    rounds: bool = False


@dataclasses.dataclass(frozen=True)
class FixedRange:
    """The kernels require fixed quantization parameters of the output.

    Args:
        minimum, maximum: float values that the lowest and the highest int8 value represent.
        wide: float values that the lowest and the highest int16 value represent.
        is_bound: whether the function cannot return less than `minimum`.
    """

    minimum: float
    maximum: float
    wide: tuple[float, float] = (-1.0, 32767 / 32768)
    is_bound: bool = False

    def params(self, bits: int) -> QuantParams:
        """Returns the quantization parameters that TFLite's kernels require, for 8 or 16 bits."""
        limits = self.wide if bits == 16 else (self.minimum, self.maximum)
        return _from_range(*limits, 16 if bits == 16 else 8)


_from_range = functools.cache(QuantParams.from_range)

OutputRange = OwnRange | SharedRange | FixedRange

OWN = OwnRange()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of `Op.compute` and `Op.prepare`.

    Args:
        family: the kernel family that defines the rounding.
        attributes: the operator's options in this call.
        q: the quantized values of each input relative to its zero point: integers in float32, or in
            float64 with 16 bits. Constant arguments of an operation are inputs too.
        params: the quantization parameters of each input, as float64 scalar tensors.
        output: the quantization parameters of the result.
        call: the call. Some operators run the layer of the call on integers.
        weights: the weights of a weighted operator, or None.
        merges_relu: whether the operator has a fused ReLU, which replaces negative results by 0.
        sized: whether the file has a fixed batch size, even if the call does not.
        prepared: the result of the operator's `prepare`.
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

    def run_layer(self, inputs: list[tf.Tensor]) -> Any:
        """Calls the layer on `inputs`, in the order of the tensors that the original call reads."""
        remaining = iter(inputs)
        args, kwargs = map_values(lambda value: next(remaining), (self.call.args, self.call.kwargs))
        if accepts_training(self.call.layer):
            kwargs = {**kwargs, "training": False}
        with compute_in_float32(self.call.layer):
            return self.call.layer.call(*args, **kwargs)


def get_held_dtype(params: QuantParams) -> tf.DType:
    """Returns the float type for storing quantized values relative to the zero point."""
    return tf.float64 if params.bits > 8 else tf.float32


Prepare = Callable[[Arguments], Any]
"""A function that computes all parameters that depend only on ranges and weights. They may have any
structure. In its `Arguments`, `q` holds a `tf.TensorSpec` for each input. Equal tensors are the
same object. The function runs in TensorFlow, eagerly or in a graph. `compute` receives its result
as `prepared`, but receives neither weights nor scales."""

Compute = Callable[[Arguments], Any]
"""A function that computes the quantized values of the output relative to its zero point, or a
structure of outputs. The caller clips them to the range."""

Emit = Callable[..., object]
"""A function of an `Emission` that adds the operator to a TFLite file."""


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An operator.

    Args:
        name: the name in plans and for `register_op`.
        doc: the description on the page of operators.
        layers: the Keras layer classes that it computes. If several operators list a class, the
            first that accepts a call computes it.
        paths: class paths, as from `get_class_path`, of layers that Keras does not export.
        kinds: the kinds of operations on symbolic tensors that it computes.
        functions: the activation functions that it computes.
        attributes: returns the options of a call by name. All other code reads this result.
        needs: names of the attributes that `register_op` requires.
        defaults: default values of the other attributes.
        accepts: returns None if a call has an integer kernel. Otherwise returns the reason in a few
            words, which `plan` prints, or "" if another operator returns the reason.
        max_axes: the maximum number of axes of an input.
        integers: types of integer inputs that kernels support; all by default.
        bits: bits of activations for which there are kernels; 8 stands for 2 to 8.
        families: for bits that some kernel families do not support: bits -> function that returns
            whether a family supports them.
        accepts_wide: returns whether 16-bit kernels support a call.
        on_request: whether its layers stay in float unless an override has `quantize=True`.
        output: how the output is quantized.
        weights: attribute of the layer that holds a weight -> axes of its output channels, counted
            from the end, or `()` for one scale per tensor.
        trains_weights: whether a wrapper fake-quantizes its weights in training.
        supports_int4: whether there are kernels for 4-bit weights.
        folds_batch_norm: whether a BatchNormalization after it is folded into its weights.
        can_merge_relu: whether its kernels can have a fused ReLU.
        clips: whether it is a ReLU that can be fused into the operator before it.
        elementwise: whether it treats all axes alike, so the channels may be any axis.
        alias: whether its output is its input, so nothing is computed at run time.
        only_rounds: whether it only rounds float values.
        is_constant: whether its output is a constant in files. The input only determines the range.
        reads_only_weights: whether the output depends only on weights. Its range is then the
            current minimum and maximum.
        has_mark: whether its output may contain an outlier that marks masked entries.
        is_table: whether its inputs are indices, which are not quantized. If it has weights, they
            are a lookup table with the quantization parameters of the output.
        gates: number of gates in the columns of its weights. Each gate has its own scale. With
            several gates, training simulates the gates and the states between steps.
        multiplies_tensors: whether it sums products of two tensors.
        falls_back_to_input_range: whether an output without a quantizer has the range of the
            inputs. For example, this applies to means in `recipes.contrib`.
        quantizes_constants: whether constant arguments are quantized like inputs.
        inner: returns the ranges of tensors inside the operator by name, given the attributes.
        symmetric: indices of inputs that should have zero point 0, which makes kernels faster.
        converts: index of an input -> the range to which it converts this input. If all consumers
            of a model input convert it, the input has that range from the start.
        prepare: computes, once for many batches, what depends only on ranges and weights. Without
            it, `compute` reads ranges and weights.
        compute: the integer arithmetic, for every kernel family and all `bits`.
        emit: adds the operator to a TFLite file.
        products: counts the multiply-accumulates of a call for one example; None if a size is
            unknown.
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
    accepts_wide: Callable[[Call], bool] = lambda call: True
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
    products: Callable[[Call], int | None] = lambda call: 0

    @property
    def is_weighted(self) -> bool:
        """Whether the operator has weights that training quantizes."""
        return bool(self.weights) and self.trains_weights

    @property
    def is_affine(self) -> bool:
        """Whether the operator computes x * factor + offset for each channel."""
        return "" in self.weights

    def has_kernel_for(self, bits: int, family: KernelFamily | None = None) -> bool:
        """Whether `family` (None: any family) has kernels for activations of `bits` bits."""
        bits = 16 if bits == 16 else 8
        has_some = self.families.get(bits, lambda family: True)
        return bits in self.bits and (family is None or has_some(family))

    def only_families(self, bits: int) -> tuple[str, ...]:
        """Returns the names of the families with kernels for `bits` bits; () if all have them."""
        if bits not in self.families:
            return ()
        return tuple(name for name, family in FAMILIES.items() if self.families[bits](family))

    def prepare_arguments(self, a: Arguments) -> Arguments:
        """Calls `prepare`, and returns the arguments with its result as `prepared`."""
        if self.prepare is None:
            return a
        specs = {id(q): tf.TensorSpec(q.shape, q.dtype) for q in a.q}
        prepared = self.prepare(dataclasses.replace(a, q=[specs[id(q)] for q in a.q]))
        return dataclasses.replace(a, prepared=prepared, weights=None)

    def __call__(self, a: Arguments) -> Any:
        """Calls `prepare` and `compute`, and returns the result."""
        return self.compute(self.prepare_arguments(a))

    def __repr__(self) -> str:
        return f"<Op {self.name}>"
