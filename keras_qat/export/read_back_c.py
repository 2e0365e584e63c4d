"""Reads the C++ source and header of a model back and compares them with the TFLite file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.tflite.reader import FileGraph


def differences(
    source: str,
    header: str,
    contents: bytes,
    words: dict[str, str],
    golden: dict[str, np.ndarray],
    rescaled: dict[str, Any],
) -> Iterator[str]:
    """Yields what the text says other than the file.

    Args:
        source: text of the source.
        header: text of the header.
        contents: the TFLite file.
        words: name of each input and output -> its word in the names of constants.
        golden: the examples' integers by the name of their array.
        rescaled: the inputs that take pixels, whose scale and zero point are not given.
    """
    graph = FileGraph(contents)
    if _array_in(source) != contents:
        yield "its array is not the TFLite file"
    if re.findall(r"kFileSize = (\d+);", source) != [str(len(contents))]:
        yield "kFileSize is not the size of the TFLite file"
    constants = re.findall(r"constexpr \w+(?: int)? (k\w+) = ([^;]+);", header)
    expected: dict[str, Any] = {"kOperators": len(graph.kernels)}
    if golden:
        expected["kGoldenExamples"] = len(next(iter(golden.values())))
    for name, tensor in {**graph.inputs, **graph.outputs}.items():
        expected[f"k{words[name]}Size"] = int(np.prod(tensor.shape))
        if tensor.is_quantized and name not in rescaled:
            expected[f"k{words[name]}Scale"] = np.float32(tensor.scale)
            expected[f"k{words[name]}ZeroPoint"] = tensor.zero_point
    if sorted(name for name, _ in constants) != sorted(expected):
        yield f"its constants are {', '.join(sorted(name for name, _ in constants))}"
        return
    for name, text in constants:
        if type(expected[name])(text.rstrip("f")) != expected[name]:
            yield f"{name} is {text} instead of {expected[name]}"
    operators = [name.lower() for name in re.findall(r"resolver\.Add(\w+)\(\)", header)]
    if operators != [kernel.replace("_", "").lower() for kernel in graph.kernels]:
        yield f"it adds the operators {', '.join(operators)}"
    arrays = dict(re.findall(r"(kGolden\w+)(?:\[\d+\])+ = \{(.*?)\n\};", source, re.DOTALL))
    for name, codes in golden.items():
        numbers = [int(number) for number in re.findall(r"-?\d+", arrays.get(name, ""))]
        if numbers != codes.reshape(-1).tolist():
            yield f"{name} does not hold the examples"


def _array_in(source: str) -> bytes:
    """Reads the TFLite file back from the source."""
    _, body = source.split("kFile[] = {", 1)
    return bytes.fromhex(body.split("}", 1)[0].replace("0x", "").replace(",", ""))
