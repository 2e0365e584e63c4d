"""Where TensorFlow would swap the axes of images on a GPU, found without one.

Its layout optimizer puts channels first in float32 convolutions, and swaps axes in front of and
behind each operation that it does not know to be indifferent to their order. Each swap reads and
writes a whole tensor.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

DEVICE = "/job:localhost/replica:0/task:0/device:{}:0"


def swaps(graph: Any, on_gpu: dict[str, bool]) -> int:
    """Returns how many transpositions the layout optimizer adds to a graph.

    Args:
        graph: a `GraphDef` whose arguments are placeholders of known shapes.
        on_gpu: name of each operation, and whether it runs on the GPU.
    """
    meta = meta_graph_pb2.MetaGraphDef(graph_def=graph)
    read = {name.split(":")[0].lstrip("^") for node in graph.node for name in node.input}
    for node in meta.graph_def.node:
        node.device = DEVICE.format("GPU" if on_gpu[node.name] else "CPU")
        if node.name not in read:
            meta.collection_def["train_op"].node_list.value.append(node.name)
        if node.op == "Placeholder" and _is_number(node):  # The optimizer takes it for any shape.
            node.op = "Const"
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0.5, tf.float32, []))
            del node.attr["shape"]
    config = config_pb2.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.optimizers.extend(["layout", "constfold"])  # It swaps axes of constants beforehand.
    rewriting.min_graph_nodes = -1
    rewriting.fail_on_optimizer_errors = True
    machine = cluster.Cluster(devices=[_device("GPU"), _device("CPU")])
    optimized = tf_optimizer.OptimizeGraph(config, meta, cluster=machine)
    return _transpositions(optimized) - _transpositions(graph)


def _is_number(node: Any) -> bool:
    shape, dtype = node.attr["shape"].shape, node.attr["dtype"].type
    is_scalar = "shape" in node.attr and not shape.unknown_rank and not shape.dim
    return is_scalar and dtype == types_pb2.DT_FLOAT


def _device(kind: str) -> Any:
    properties = device_properties_pb2.DeviceProperties(type=kind, num_cores=16, frequency=1000)
    properties.environment["architecture"] = "9.0"
    return device_properties_pb2.NamedDevice(name=DEVICE.format(kind), properties=properties)


def _transpositions(graph: Any) -> int:
    """Counts those that move numbers; of a vector with four axes they pass it on."""
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(graph, name="")
    shapes = [op.inputs[0].shape for op in imported.get_operations() if op.type == "Transpose"]
    return sum(shape.rank is None or sum(size != 1 for size in shape) > 1 for shape in shapes)
