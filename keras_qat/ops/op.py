"""The class `Op`, which describes an operator from its Keras layers to its integer arithmetic.

To add an operator, add an `Op`. Placement, inference, simulation, the exporters, the page of
operators and the generated tests read only `Op` objects. They never read the options of a layer.
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
    """The output has its own range, which a quantizer observes.

    Args:
        non_negative: whether all outputs are at least 0.
        symmetric: whether the zero point is 0. Used for tensors inside an operator, such as an
            LSTM.
    """

    non_negative: bool = False
    symmetric: bool = False


@dataclasses.dataclass(frozen=True)
class SharedRange:
    """The output has the same quantization parameters as all inputs, for example after a Reshape.

    Args:
        rounds: whether results are rounded, because they can lie between two quantized values. An
            example is average pooling.
    """

    rounds: bool = False


@dataclasses.dataclass(frozen=True)
class FixedRange:
    """The output's quantization parameters are fixed, because TFLite's kernels require them.

    Args:
        minimum, maximum: the float values of the lowest and the highest int8 value.
        wide: the float values of the lowest and the highest int16 value.
        is_bound: whether all results are at least `minimum`. They are only clipped at `maximum`.
    """

    minimum: float
    maximum: float
    wide: tuple[float, float] = (-1.0, 32767 / 32768)
    is_bound: bool = False

    def params(self, bits: int) -> QuantParams:
        """Returns the required quantization parameters for 8 or 16 bits."""
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
        q: the quantized values of each input, relative to the zero point. They are stored as
            float32, or as float64 for 16 bits. Constant arguments of an operation are inputs too.
        params: the quantization parameters of each input, as float64 scalar tensors.
        output: the quantization parameters of the output.
        call: the call, for operators that run the Keras layer on integers.
        weights: the weights. None if the operator has no weights.
        merges_relu: whether the operator has a fused ReLU, which replaces negative results by 0.
        sized: whether files have a fixed batch size. In `call`, the batch size may be None.
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
        """Calls the Keras layer on `inputs` instead of the original call's tensors."""
        remaining = iter(inputs)
        args, kwargs = map_values(lambda value: next(remaining), (self.call.args, self.call.kwargs))
        if accepts_training(self.call.layer):
            kwargs = {**kwargs, "training": False}
        with compute_in_float32(self.call.layer):
            return self.call.layer.call(*args, **kwargs)


def get_held_dtype(params: QuantParams) -> tf.DType:
    """Returns the float type for quantized values: float64 above 8 bits, otherwise float32."""
    return tf.float64 if params.bits > 8 else tf.float32


Prepare = Callable[[Arguments], Any]
"""A function that computes constants from ranges and weights, such as fixed-point multipliers. It
runs once for many batches, in eager TensorFlow or in a graph. The result may be any structure.
`compute` finds it in `Arguments.prepared`, and reads no weights or scales. In the `Arguments` of
this function, `q` contains a `tf.TensorSpec` for each input. Two inputs share one `tf.TensorSpec`
if they are the same tensor, as in `x * x`."""

Compute = Callable[[Arguments], Any]
"""A function that computes the quantized output relative to the zero point. With several
outputs, it returns a structure of tensors. The caller clips them to the output's range."""

Emit = Callable[..., object]
"""A function that adds the operator to a TFLite file, given an `Emission`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An operator: how a layer or operation is quantized, computed in integers and exported.

    Args:
        name: the name in plans and for `register_op`.
        doc: the description on the page of operators.
        layers: the Keras layer classes that the operator computes. Several operators may list a
            class. The first that accepts a call computes the call.
        paths: import paths of more classes, which Keras does not export. See `get_class_path`.
        kinds: the TensorFlow operations that the operator computes, such as "concat".
        functions: the activation functions that the operator computes, such as `tf.nn.relu`.
        attributes: a function that returns the options of a call by name, such as `axis`.
        needs: names of the attributes that `register_op` requires.
        defaults: default values of the other attributes.
        accepts: a function that returns None if a call has an integer kernel. Otherwise, it
            returns a short reason, which `plan` prints. If it returns "", `plan` prints the reason
            of the next operator for the same layer.
        max_axes: the maximum number of axes of an input.
        integers: the integer types of inputs that kernels support. None means all types.
        bits: the bits of activations that kernels support, such as (8, 16). 8 includes 2 to 7.
        families: maps bits to a function. The function returns True for a kernel family that
            supports the bits. Without an entry for the bits, all families support them.
        accepts_wide: a function that returns True if 16-bit kernels support a call.
        on_request: whether layers stay in float unless an override has `quantize=True`.
        output: how the output is quantized.
        weights: maps the attribute that holds a weight to the axes of output channels. Axes are
            counted from the end. `()` means one scale per tensor.
        trains_weights: whether a wrapper fake-quantizes the weights in training.
        supports_int4: whether there are kernels for 4-bit weights.
        folds_batch_norm: whether a following BatchNormalization is folded into the weights.
        can_merge_relu: whether kernels can have a fused ReLU.
        clips: whether the operator is a ReLU that can be fused into the previous operator.
        elementwise: whether an output value depends only on the input values at its position.
        alias: whether the output is the input, as in Dropout at inference.
        only_rounds: whether the operator only rounds float values, like QUANTIZE.
        is_constant: whether the output is a constant in files. The values of the input do not
            matter, but its quantization parameters do.
        reads_only_weights: whether the output depends only on weights. Its range is then the
            minimum and maximum for the current weights.
        has_mark: whether the output may contain an extreme value that marks masked entries.
        is_table: whether the inputs are indices, which are not quantized. Any weights are a lookup
            table with the output's quantization parameters.
        gates: the number of gates in the columns of the weights, 4 for an LSTM. Each gate has a
            scale. With several gates, training simulates gates and states in each step.
        multiplies_tensors: whether the operator sums products of two tensors.
        falls_back_to_input_range: whether an output without a quantizer has the inputs' range. An
            example is a mean in `recipes.contrib`.
        quantizes_constants: whether constants are quantized like inputs, such as 2 in `x + 2`.
        inner: a function of the attributes. Returns the ranges of tensors inside the operator.
        symmetric: indices of inputs that should have zero point 0, which makes kernels faster.
        converts: maps the index of an input to the fixed range to which the operator converts it.
            A model input gets this range if all operators that read it convert it to this range.
        prepare: a function that computes constants from ranges and weights, once for many batches.
            Without `prepare`, `compute` reads ranges and weights.
        compute: the integer arithmetic, for every kernel family and all `bits`.
        emit: a function that adds the operator to a TFLite file.
        products: a function that returns the multiply-accumulates of a call for one example, or
            None if a size is unknown.
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
        """Whether the operator has weights that are fake-quantized in training."""
        return bool(self.weights) and self.trains_weights

    @property
    def is_affine(self) -> bool:
        """Whether the operator computes x * factor + offset for each channel."""
        return "" in self.weights

    def has_kernel_for(self, bits: int, family: KernelFamily | None = None) -> bool:
        """Returns True if `family` has kernels for `bits` bits. None means any family."""
        bits = 16 if bits == 16 else 8
        has_some = self.families.get(bits, lambda family: True)
        return bits in self.bits and (family is None or has_some(family))

    def only_families(self, bits: int) -> tuple[str, ...]:
        """Returns the names of the kernel families that support `bits` bits, or () if all do."""
        if bits not in self.families:
            return ()
        return tuple(name for name, family in FAMILIES.items() if self.families[bits](family))

    def prepare_arguments(self, a: Arguments) -> Arguments:
        """Returns the arguments with the result of `prepare`, and without weights."""
        if self.prepare is None:
            return a
        specs = {id(q): tf.TensorSpec(q.shape, q.dtype) for q in a.q}
        prepared = self.prepare(dataclasses.replace(a, q=[specs[id(q)] for q in a.q]))
        return dataclasses.replace(a, prepared=prepared, weights=None)

    def __call__(self, a: Arguments) -> Any:
        return self.compute(self.prepare_arguments(a))

    def __repr__(self) -> str:
        return f"<Op {self.name}>"
