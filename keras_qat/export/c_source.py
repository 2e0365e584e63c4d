"""Exports to C++ source for microcontrollers: the TFLite file as an array, and a header."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.config.targets import TFLM
from keras_qat.export.tflite import EndType, write_file
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_if_requested
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.integer_graph.simulate import run_examples
from keras_qat.io.atomic_files import check_writable, replacing
from keras_qat.io.data import read_arrays
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.tflite.metadata import read_metadata, read_rescalings
from keras_qat.tflite.model import describe_tensors
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.training.readiness import check_before_export
from keras_qat.version import __version__

BYTES_IN_A_LINE = 12

ADDED = {
    "BATCH_MATMUL": "BatchMatMul",
    "CUMSUM": "CumSum",
    "PADV2": "PadV2",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "UnidirectionalSequenceLSTM",
}
"""Names in TFLite Micro that `_get_resolver_name` cannot derive from TFLite's names."""


@one_at_a_time
def export_c(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    examples: Any = None,
    input_dtype: EndType | None = None,
    output_dtype: EndType | None = None,
    input_range: tuple[float, float] | None = None,
    rescaling: Any = None,
) -> bytes:
    """Exports a trained model to C++ source for TFLite Micro's interpreter.

    The source contains the TFLite file as an array, aligned to 16 bytes. The header beside the
    source declares the array and its size. It also declares scale, zero point and number of values
    of each input and output. The header's function `AddOperators` adds all operators to a
    `MicroMutableOpResolver`. The namespace is the file's name. The batch size is 1. A warning lists
    operators without a kernel in TFLite Micro.

    Args:
        model: the model.
        path: the path of the source, such as "model.cc". The header is then "model.h". Existing
            files are replaced.
        examples: a few inputs, as for `model.predict`. The source then contains a test for the
            device: the examples and TFLite Micro's outputs. By default, there is no test.
        input_dtype: type of the model's inputs on the device: "int8", "uint8" or "float32". With
            16-bit activations: "int16" or "float32". The default is the type of the model's
            activations. With `examples`, use an integer type.
        output_dtype: type of the model's outputs, as for inputs.
        input_range: minimum and maximum of inputs without a quantizer, as in `recipes.contrib`.
            Without `input_range`, these inputs and the layers that read them are float.
        rescaling: the scale and offset that convert pixels to training data, such as `(1 / 255,
            0)`. Pass it if uint8 inputs are pixels from 0 to 255. See `export_tflite`.

    Returns:
        The contents of the TFLite file in the array.

    Raises:
        ValueError: if `path` does not name a C++ source, or if `export_tflite` or `simulate` fails.
        OSError: if a file cannot be written.

    Example:
        >>> keras_qat.export_c(qat, "model.cc", examples=x_test[:4])
    """
    check_before_export(model, path)
    source = Path(path)
    if source.suffix not in (".cc", ".cpp", ".cxx"):
        raise ValueError(f"path={str(path)!r}: name a C++ source, such as 'model.cc'.")
    header = check_writable(source.with_suffix(".h"))
    resolved = resolve_to_export(model, input_range=input_range)
    resolved.origin.warn()
    target = resolved.origin.target
    if target is None or target.kernels != TFLM.kernels:
        target = TFLM
    contents = write_file(
        resolved,
        input_dtype=input_dtype,
        output_dtype=output_dtype,
        rescaling=rescaling,
        batch_size=1,
        target=target,
    )
    graph = FileGraph(contents)
    rescaled, keeps_states = read_rescalings(contents), "states" in read_metadata(contents)
    words = _find_identifiers(graph)
    golden = {} if examples is None else _make_golden(resolved, examples, graph, rescaled, words)
    space = re.sub("[^0-9a-z]+|^(?=[0-9])", "_", source.stem.lower())
    texts = {
        file: "\n".join(lines) + "\n"
        for file, lines in (
            (source, _source(header.name, space, contents, golden)),
            (header, _header(resolved.name, space, graph, words, golden, rescaled, keeps_states)),
        )
    }
    with contextlib.ExitStack() as stack:  # Replaces both files or none.
        for file, text in texts.items():
            stack.enter_context(replacing(file)).write_bytes(text.encode())
    return contents


def _find_identifiers(graph: FileGraph) -> dict[str, str]:
    """Return a dict from the name of each input and output to a unique C++ identifier."""
    words: dict[str, str] = {}
    used = {"File", "Examples"}  # Reserved for kFileSize and kGoldenExamples.
    for name in (*graph.inputs, *graph.outputs):
        word, number = _make_identifier(name), 1
        while (unique := f"{word}{number if number > 1 else ''}") in used:
            number += 1
        used.add(unique)
        words[name] = unique
    return words


def _make_golden(
    resolved: ResolvedGraph,
    examples: Any,
    graph: FileGraph,
    rescaled: dict[str, tuple[Any, Any]],
    words: dict[str, str],
) -> dict[str, NDArray]:
    """Return the test's quantized inputs and expected outputs, by the name of their C++ array."""
    ends = {**graph.inputs, **graph.outputs}
    in_float = [name for name, tensor in ends.items() if tensor.dtype.kind == "f"]
    if in_float:
        raise ValueError(
            f"examples: '{in_float[0]}' is float, and float results depend on the kernels. Export "
            f"it as int8, or leave examples out."
        )
    family = kernel_family(TFLM.kernels)
    simulation = run_examples(pack_if_requested(resolved, None, family), examples, family)
    arrays = {}
    infos = describe_tensors(graph.inputs, rescaled)
    for name, x in zip(graph.inputs, read_arrays(resolved.origin.inputs, examples), strict=True):
        # Integers in `examples` stand for float values, as in `predict`.
        values = x.astype(np.float32) if infos[name].is_quantized else x
        arrays[name] = infos[name].quantize(values)
    for name, output in simulation.outputs.items():
        q = getattr(output, "codes", output)  # Integers, such as an argmax, have no scale.
        offset = 128 if graph.outputs[name].dtype == np.uint8 else 0
        arrays[name] = (q.astype(np.int64) + offset).astype(graph.outputs[name].dtype)
    return {f"kGolden{words[name]}": q.reshape(len(q), -1) for name, q in arrays.items()}


def _header(
    name: str,
    space: str,
    graph: FileGraph,
    words: dict[str, str],
    golden: dict[str, NDArray],
    rescaled: dict[str, tuple[Any, Any]],
    keeps_states: bool,
) -> Iterator[str]:
    guard = f"KERAS_QAT_{space.upper()}_H_"
    operators = graph.kernels
    yield f"// The model '{name}', written by keras_qat {__version__}."
    yield from (f"#ifndef {guard}", f"#define {guard}", "", "#include <cstddef>")
    yield from ("#include <cstdint>", "", f"namespace {space} {{", "")
    yield "// The TFLite file, for tflite::GetModel."
    if keeps_states:
        yield "// It keeps the states of recurrent layers from one Invoke() to the next;"
        yield "// interpreter.Reset() writes zeros into them."
    elif "UNIDIRECTIONAL_SEQUENCE_LSTM" in operators:
        yield "// Each Invoke() begins with states of zeros."
    yield from ("extern const unsigned char kFile[];", "extern const size_t kFileSize;")
    for end, tensors in (("Input", graph.inputs), ("Output", graph.outputs)):
        for index, (end_name, tensor) in enumerate(tensors.items()):
            label, constant = f"{end} {index}, '{end_name}'", f"k{words[end_name]}"
            yield from ("", *_describe_end(label, constant, tensor, end_name in rescaled))
    yield from ("", f"// For tflite::MicroMutableOpResolver<{space}::kOperators>.")
    yield f"constexpr unsigned int kOperators = {len(operators)};"
    yield from ("template <typename Resolver>", "bool AddOperators(Resolver& resolver) {")
    added = [f"resolver.Add{_get_resolver_name(kernel)}() == 0" for kernel in operators]
    yield f"  return {' && '.join(added).replace(' && ', f' &&{chr(10)}         ')};"
    yield "}"
    if golden:
        count = len(next(iter(golden.values())))
        yield from ("", "// Inputs, and the outputs of TFLite Micro's kernels for them.")
        if keeps_states:
            yield "// Run them in order, starting with states of zeros."
        yield f"constexpr size_t kGoldenExamples = {count};"
        yield from (f"extern {_declare(*array)};" for array in golden.items())
    yield from ("", f"}}  // namespace {space}", "", f"#endif  // {guard}")


def _describe_end(label: str, constant: str, tensor: Tensor, is_rescaled: bool) -> Iterator[str]:
    shape = " x ".join(map(str, tensor.shape)) or "one value"
    yield f"// {label}: {shape}, {tensor.dtype}."
    yield f"constexpr size_t {constant}Size = {int(np.prod(tensor.shape))};"
    if is_rescaled:
        yield "// Pixels, 0 to 255."
    elif tensor.is_quantized:
        yield f"// A value q stands for {constant}Scale * (q - {constant}ZeroPoint)."
        yield f"constexpr float {constant}Scale = {_format_float(tensor.scale)};"
        yield f"constexpr int32_t {constant}ZeroPoint = {tensor.zero_point};"


def _source(header: str, space: str, contents: bytes, golden: dict[str, NDArray]) -> Iterator[str]:
    yield from (f'#include "{header}"', "", f"namespace {space} {{", "")
    yield "alignas(16) const unsigned char kFile[] = {"
    yield from _wrap_lines(f"0x{byte:02x}" for byte in contents)
    yield from ("};", f"const size_t kFileSize = {len(contents)};", "")
    for name, array in golden.items():
        yield f"{_declare(name, array)} = {{"
        for row in array:
            yield from ("  {", *_wrap_lines(map(str, row.tolist())), "  },")
        yield from ("};", "")
    yield f"}}  // namespace {space}"


def _wrap_lines(values: Iterable[str]) -> Iterator[str]:
    values = list(values)
    for start in range(0, len(values), BYTES_IN_A_LINE):
        yield f"    {', '.join(values[start : start + BYTES_IN_A_LINE])},"


def _declare(name: str, array: NDArray) -> str:
    return f"const {array.dtype}_t {name}[{len(array)}][{array.shape[1]}]"


def _make_identifier(name: str) -> str:
    """Return capitalized words for the name of a C++ constant: "my/layer" becomes "MyLayer"."""
    words = [word for word in re.split(r"[^0-9A-Za-z]+", name) if word]
    return "".join(word[0].upper() + word[1:] for word in words) or "Tensor"


def _get_resolver_name(kernel: str) -> str:
    """Return an operator's name in TFLite Micro's resolver: "CONV_2D" becomes "Conv2D"."""
    return ADDED.get(kernel) or "".join(
        part if part[0].isdigit() else part.capitalize() for part in kernel.split("_")
    )


def _format_float(value: float) -> str:
    text = f"{np.float32(value):.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"
