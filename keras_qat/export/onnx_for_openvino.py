"""What ONNX files say in other words so that OpenVINO computes each quantized tensor.

Its optimizer looks for two patterns. A convolution in front of a sum is fused with it, and its
result is then not rounded. Strides of 1x1 convolutions move to a pooling in front of them, which is
in float, as is the convolution then. Poolings of single values, in integers, prevent both.
"""

from __future__ import annotations

from typing import Any

from keras_qat.integer_graph.graph import ResolvedGraph


def check_for_openvino(graph: ResolvedGraph, activations: str) -> None:
    """Checks that OpenVINO computes what the model does.

    Raises:
        ValueError: if it does not, with the layers.
    """
    known = graph.origin.family.operators or ()
    other = {node.call.name: node.op.name for node in graph.nodes if node.op is not None}
    other = {layer: name for layer, name in other.items() if name not in known}
    use = "Use kernels='onnxruntime' for a file that OpenVINO may round otherwise."
    if activations != "uint8":
        raise ValueError(
            f"activations={activations!r}: kernels='openvino' knows how OpenVINO rounds "
            f"uint8, not int8. {use}"
        )
    if other:
        named = ", ".join(f"'{layer}' ({name})" for layer, name in other.items())
        raise ValueError(
            f"kernels='openvino' does not know how OpenVINO rounds these layers: {named}. {use}"
        )


def pool_for_openvino(graph: Any) -> None:
    """Puts 1x1 poolings behind convolutions that are summed, and in front of strided 1x1 ones."""
    from onnx import helper

    makers = {name: node for node in graph.node for name in node.output}
    shapes = {array.name: array.dims for array in graph.initializer}
    nodes = {node.output[0]: [node] for node in graph.node}

    def source(name: str, op_type: str) -> Any:
        node = makers.get(name)
        return node if node is not None and node.op_type == op_type else None

    def pool(dequantize: Any, reader: Any, index: int, strides: Any) -> None:
        name = f"{reader.output[0]}/input_{index}_pooled"
        values, scale, zero_point = dequantize.input
        nodes[reader.output[0]][:0] = [
            helper.make_node(
                "MaxPool", [values], [name], name=name, kernel_shape=[1, 1], strides=strides
            ),
            helper.make_node("DequantizeLinear", [name, scale, zero_point], [f"{name}/real"]),
        ]
        reader.input[index] = f"{name}/real"

    for node in graph.node:
        for index, name in enumerate(node.input):
            dequantize = source(name, "DequantizeLinear")
            if dequantize is None:
                continue
            if node.op_type == "Add":
                quantize = source(dequantize.input[0], "QuantizeLinear")
                if quantize is not None and source(quantize.input[0], "Conv") is not None:
                    pool(dequantize, node, index, [1, 1])
            elif node.op_type == "Conv" and index == 0:
                options = {option.name: option for option in node.attribute}
                weights = source(node.input[1], "DequantizeLinear")
                kernel = shapes[weights.input[0]][2:] if weights is not None else ()
                strides = list(options["strides"].ints) if "strides" in options else [1, 1]
                if list(kernel) == [1, 1] and strides != [1, 1]:
                    pool(dequantize, node, index, strides)
                    options["strides"].ints[:] = [1, 1]
    in_order = [node for group in [nodes[n.output[0]] for n in graph.node] for node in group]
    del graph.node[:]
    graph.node.extend(in_order)
