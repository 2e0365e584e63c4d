"""Mutants that no test can see, each with the reason: `benchmarks.mutants` counts them apart."""

from __future__ import annotations

UNUSED = "the one more that is made is never read"
BEYOND = "the table has entries of values that a tensor can't have"
SLOWER = "it chooses the slower one of two computations with the same results"

EQUIVALENT = {
    "keras_qat/arithmetic/sigmoid_and_tanh.py compute_int16_tanh.interpolate: 0 -> 1": (
        "both sides give 0 for 0 steps: 127 and 128, 8 bits behind the point"
    ),
    "keras_qat/arithmetic/fake_quant.py : 2 -> 3": SLOWER,
    "keras_qat/arithmetic/fixed_point.py inverse_square_root: 1 -> 2": (
        "what is computed of 0 and 1 is replaced"
    ),
    "keras_qat/arithmetic/fixed_point.py exponential: 2 -> 3 (3)": "no x of 16 bits has that bit",
    "keras_qat/arithmetic/plain_operations.py are_numbers: maximum -> minimum": SLOWER,
    "keras_qat/arithmetic/plain_operations.py _divide: sign > 0 -> sign >= 0": (
        "the sign of a scale is 1 or -1"
    ),
    "keras_qat/integer_graph/fold_weights.py fold_calls: count_terms(tuple(q.shape), axes) > FEW "
    "-> count_terms(tuple(q.shape), axes) >= FEW": "what is not computed here is where it is used",
    "keras_qat/integer_graph/float_inference.py evaluate_all: max -> min": (
        "how many examples are computed at once"
    ),
    "keras_qat/integer_graph/float_inference.py evaluate_all: max -> min (2)": (
        "how many examples are computed at once"
    ),
    "keras_qat/integer_graph/pixel_inputs.py _check_values: 1 -> 2 (2)": (
        "numpy infers any size below zero, -2 like -1"
    ),
    "keras_qat/ops/mean.py _accepts_mean: any -> all": "a mean reads one tensor",
    "keras_qat/ops/stored_weights.py _emit: 1 -> 2": (
        "numpy infers any size below zero, -2 like -1"
    ),
    "keras_qat/integer_graph/passes.py _divide: np.round -> np.floor": (
        "multiples of the divisor are divided without a remainder"
    ),
    "keras_qat/integer_graph/fold_recurrent.py _fold_unrolled.fold: 1 -> 2 (10)": (
        "only a SimpleRNN of two units has two columns, whose outputs have one scale"
    ),
    "keras_qat/integer_graph/fold_recurrent.py _fold_lstm: 0 -> 1 (2)": (
        "what an LSTM reads and what it gives have the same bits"
    ),
    "keras_qat/ops/activations.py : True -> False (3)": SLOWER,
    "keras_qat/ops/activations.py _elu: x < 0 -> x <= 0": "both sides give 0 for 0",
    "keras_qat/ops/activations.py _make_bounded.prepare: x.scale > FARTHEST -> x.scale >= "
    "FARTHEST": ("a scale that is brought to itself changes nothing"),
    "keras_qat/ops/activations.py _make_bounded.compute.reduce_scale: 1 -> 2": (
        "in steps of 4 curves have ended far before both numbers"
    ),
    "keras_qat/ops/matmul.py _find_equation: 2 -> 3 (3)": "other letters for the same axes",
    "keras_qat/ops/composed.py Preparing.reshape: 0 -> 1": (
        "products and sums of 32 bits prepare nothing by the type of their numbers"
    ),
    "keras_qat/ops/composed.py Preparing.split: 1 -> 2": "of a part's sizes only the last is read",
    "keras_qat/ops/composed.py Preparing._run: 32 -> 33": "32 bits are cut off at their own ends",
    "keras_qat/ops/division.py _find_steps: 2.0 -> 3.0 (3)": BEYOND,
    "keras_qat/ops/division.py _find_steps: 8 -> 9": BEYOND,
    "keras_qat/ops/normalization.py : 2048 -> 2049": (
        "variances 2047 and 2048 have the same entry, 724, and positions move with the table"
    ),
    "keras_qat/ops/normalization.py _make_function.normalize: 1 -> 2 (4)": (
        "groups become examples, until values get the shape that gamma is multiplied in"
    ),
    "keras_qat/ops/conv.py _emit_affine: 1 -> 2 (4)": (
        "numpy infers any size below zero, -2 like -1"
    ),
    "keras_qat/ops/elementwise.py _prepare_multiply: factor < 2.0 ** 8 -> factor <= 2.0 ** 8": (
        "256 times a product is exact in float32 and in fixed point"
    ),
    "keras_qat/ops/elementwise.py _find_native_of_product: first * second > FAR * output.scale -> "
    "first * second >= FAR * output.scale": "a scale that is brought to itself changes nothing",
    "keras_qat/ops/weighted_sums.py : 17 -> 18": "tests run on TensorFlow 2.15 and on recent ones",
    "keras_qat/ops/weighted_sums.py _fits: reach * _largest(a) < EXACT -> "
    "reach * _largest(a) <= EXACT": "float32 holds 2^24 as well",
    "keras_qat/ops/dense.py _find_sizes: known.count(None) > 1 -> known.count(None) >= 1": SLOWER,
    "keras_qat/ops/movement.py emit_slice: 0 -> 1": (
        "kernels take one entry of a dropped axis, whatever its end is"
    ),
    "keras_qat/ops/movement.py emit_slice: 1 -> 2": (
        "kernels take one entry of a dropped axis, whatever its end is"
    ),
    "keras_qat/ops/op.py Op: 99 -> 100": "no tensor has 99 axes",
    "keras_qat/ops/op.py get_held_dtype: 8 -> 9": "tensors have 2 to 8 bits, 16 or 32",
    "keras_qat/ops/relu.py _tabulate_leaky_relu: q >= 0 -> q > 0": (
        "0 has the same multiple for both slopes"
    ),
    "keras_qat/ops/relu.py _compute_prelu: x >= 0 -> x > 0": (
        "0 has the same multiple for both slopes"
    ),
    "keras_qat/ops/requantize.py prepare_requantization: 8 -> 9": (
        "tensors have 2 to 8 bits, 16 or 32"
    ),
    "keras_qat/ops/selection.py _find_common: 0 -> 1": "both tensors have the same bits",
    "keras_qat/ops/slicing.py _slice_attributes: 0 -> 1": "no tensor is empty",
    "keras_qat/ops/softmax.py _prepare: 256 -> 257": UNUSED,
    "keras_qat/ops/softmax.py _tabulate: 513 -> 514": UNUSED,
    "keras_qat/ops/weights.py compute_reach: 0 -> 1 (3)": SLOWER,
    "keras_qat/ops/weights.py compute_reach: -len(channels) -> len(channels)": SLOWER,
    "keras_qat/ops/recurrent/kept_states.py store_states: False -> True": (
        "what was assigned is read once more, by nobody"
    ),
    "keras_qat/ops/recurrent/lstm.py _prepare: 0 -> 1": SLOWER,
    "keras_qat/ops/recurrent/lstm.py _emit: 1 -> 2 (8)": "of the last step alone, each second one",
    "keras_qat/ops/recurrent/lstm.py _emit_zeros: times > 1 -> times >= 1": SLOWER,
    "keras_qat/ops/tiling.py _emit_reverse: len(shape) > SLICED_ANYWHERE -> len(shape) >= "
    "SLICED_ANYWHERE": "axes may be merged where they need not be",
    "keras_qat/ops/weighted_sums.py weight_constants: 1 -> 2 (2)": (
        "numpy infers any size below zero, -2 like -1"
    ),
    "keras_qat/ops/weighted_sums.py _sums_of_8_bits.products: if not (has_gpu() and is_wide and "
    "(len(a.prepared.channels) == 1)): -> if not not (has_gpu() and is_wide and "
    "(len(a.prepared.channels) == 1)):": SLOWER,
    "keras_qat/tflite/builder.py Builder.constant: 1 -> 2": (
        "numpy infers any size below zero, -2 like -1"
    ),
    "keras_qat/tflite/builder.py Builder.copy: sizes.count(-1) > 1 -> sizes.count(-1) >= 1": (
        "a SLICE of everything copies as well"
    ),
    "keras_qat/tflite/builder.py Builder.finish: 17 -> 18": (
        "the buffer in which a file is packed grows where it does not suffice"
    ),
    "keras_qat/tflite/builder.py Builder.finish: 2 -> 3": (
        "the buffer in which a file is packed grows where it does not suffice"
    ),
    "keras_qat/tflite/builder.py Builder.quantize: 0 -> 1 (2)": "no tensor is empty",
}
"""Key of a mutant -> why it computes the same."""
