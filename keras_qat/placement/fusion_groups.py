"""Groups calls that are quantized together, such as Conv2D, BatchNormalization and ReLU."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, is_batch_norm
from keras_qat.ops.op import FixedRange
from keras_qat.ops.registry import find_op


@dataclasses.dataclass(eq=False)
class Group:
    """A weighted layer with its BatchNormalization and its activation. One wrapper replaces them.

    `shared` is True if the layer is called several times. Each call is then a group with its own
    range.
    """

    kernel: Call
    batch_norm: Call | None = None
    activation: Call | None = None
    shared: bool = False

    @property
    def calls(self) -> list[Call]:
        return [call for call in (self.kernel, self.batch_norm, self.activation) if call]

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Maps each attribute with quantized weights to the axes of its output channels."""
        op = find_op(self.kernel)
        return {name: axes for name, axes in op.weights.items() if name} if op else {}

    @property
    def output(self) -> Value:
        return self.calls[-1].output


def find_groups(graph: Graph, folds_bias: bool = True, affine: bool = True) -> list[Group]:
    """Finds weighted layers, with the BatchNormalization and the activation after each.

    A group ends at a tensor that several calls read. If a layer is called several times, its groups
    have no activation. They have a BatchNormalization only if the same one follows all calls.

    Args:
        graph: a lowered graph.
        folds_bias: whether a BatchNormalization is folded into a layer that has a bias.
        affine: whether a BatchNormalization that is not folded forms a group of its own.
    """
    consumers, counts = graph.find_single_consumers(), graph.count_calls()

    def find_batch_norm(call: Call) -> Call | None:
        follower, op = consumers.get(call.output), ops[call]
        if follower is None or not is_batch_norm(follower):
            return None
        if op is None or not op.folds_batch_norm or (call.layer.use_bias and not folds_bias):
            return None
        return follower if _is_per_channel(follower, call) else None

    def is_fixed(call: Call) -> bool:
        return isinstance(getattr(ops[call], "output", None), FixedRange)

    ops = {call: find_op(call) for call in graph.calls}
    weighted = {call: op for call, op in ops.items() if op is not None and op.is_weighted}
    norms = {call: find_batch_norm(call) for call, op in weighted.items() if not op.is_affine}
    for call, norm in norms.items():
        if norm is not None:
            shared_norms = {n and n.layer for c, n in norms.items() if c.layer is call.layer}
            if shared_norms != {norm.layer} or counts[norm.layer] != counts[call.layer]:
                norms[call] = None
    folded = set(norms.values())
    result = []
    for call in graph.calls:
        is_affine = call in weighted and weighted[call].is_affine
        alone = affine and is_affine and call not in folded
        if not (call in norms or alone):
            continue
        group = Group(call, norms.get(call), shared=counts[call.layer] > 1)
        follower = consumers.get(group.output)
        clip = ops.get(follower) if follower is not None else None
        if clip is not None and clip.clips and not group.shared and not is_fixed(call):
            group.activation = follower
        result.append(group)
    return result


def _is_per_channel(norm: Call, kernel: Call) -> bool:
    """Return whether a BatchNormalization normalizes the channels, not another axis."""
    rank = len(norm.output.shape)
    channels_first = getattr(kernel.layer, "data_format", None) == "channels_first"
    channel_axis = 1 if channels_first else rank - 1
    axes = tf.nest.flatten(norm.layer.axis)
    return rank > 1 and [axis % rank for axis in axes] in ([channel_axis], [])
