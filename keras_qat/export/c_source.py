"""Export to C++ source for microcontrollers: the TFLite file as an array, with its header."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.config.targets import TFLM
from keras_qat.export.read_back import report
from keras_qat.export.tflite import EndType, file_of
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_if_requested
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.integer_graph.simulate import run_examples
from keras_qat.io.atomic_files import check_writable, replacing
from keras_qat.io.data import read_arrays
from keras_qat.keras2.backend import one_at_a_time
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
"""Operators whose name in TFLite Micro does not follow from TFLite's name."""


@one_at_a_time
def export_c(
    model: Any,
    path: str | os.PathLike[str],
    *,
    examples: Any = None,
    input_dtype: EndType | None = None,
    output_dtype: EndType | None = None,
    input_range: tuple[float, float] | None = None,
    rescaling: Any = None,
) -> bytes:
    """Exports a trained model to C++ source for TFLite Micro's interpreter.

    Beside `path` lies the header: the array and its size, scale, zero point and number of values
    of each input and output, and a function that adds the operators that the file needs to a
    `MicroMutableOpResolver`. All is in a namespace of the file's name. The array begins at a
    multiple of 16 bytes, and the file takes one example at a time. A warning names the operators
    that TFLite Micro has no kernels for.

    Args:
        model: the model.
        path: where to write the source, "model.cc"; the header is then "model.h". Existing files
            are replaced.
        examples: inputs, as `model.predict` takes them: a few, that go into the source with the
            outputs that TFLite Micro gives for them, as a test for the device. Default: none.
        input_dtype: type of the model's inputs on the device: "int8", "uint8" or "float32" (with
            16-bit activations "int16" or "float32"). By default that of its activations. Examples
            need integers.
        output_dtype: type of its outputs, likewise.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.
        rescaling: for uint8 inputs that take pixels, 0 to 255: the scale and offset that made the
            training data of them, as `(1 / 255, 0)`; `export_tflite` describes all forms.

    Returns:
        The TFLite file's contents, which the array holds.

    Raises:
        ValueError: as `export_tflite` and `simulate`; or if `path` has another ending.
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
    contents = file_of(
        resolved,
        input_dtype=input_dtype,
        output_dtype=output_dtype,
        rescaling=rescaling,
        batch_size=1,
        target=target,
    )
    graph = FileGraph(contents)
    rescaled, keeps_states = read_rescalings(contents), "states" in read_metadata(contents)
    words = _identifiers(graph)
    golden = {} if examples is None else _golden(resolved, examples, graph, rescaled, words)
    space = re.sub("[^0-9a-z]+|^(?=[0-9])", "_", source.stem.lower())
    texts = {
        file: "\n".join(lines) + "\n"
        for file, lines in (
            (source, _source(header.name, space, contents, golden)),
            (header, _header(resolved.name, space, graph, words, golden, rescaled, keeps_states)),
        )
    }
    damage = differences(texts[source], texts[header], contents, words, golden, rescaled)
    report(f"The C++ source of '{resolved.name}'", damage, [])
    with contextlib.ExitStack() as stack:  # Both files are replaced, or none.
        for file, text in texts.items():
            stack.enter_context(replacing(file)).write_bytes(text.encode())
    return contents


def _identifiers(graph: FileGraph) -> dict[str, str]:
    """Returns the word of each input and output in the names of its constants, all different."""
    words: dict[str, str] = {}
    used = {"File", "Examples"}  # As in kFileSize and kGoldenExamples.
    for name in (*graph.inputs, *graph.outputs):
        word, number = _identifier(name), 1
        while (own := f"{word}{number if number > 1 else ''}") in used:
            number += 1
        used.add(own)
        words[name] = own
    return words


def _golden(
    resolved: ResolvedGraph,
    examples: Any,
    graph: FileGraph,
    rescaled: dict[str, Any],
    words: dict[str, str],
) -> dict[str, np.ndarray]:
    """Returns the codes of inputs and outputs by constant name, a row for each example."""
    ends = {**graph.inputs, **graph.outputs}
    in_float = [name for name, tensor in ends.items() if tensor.dtype.kind == "f"]
    if in_float:
        raise ValueError(
            f"examples: '{in_float[0]}' is in float, where kernels differ in the last places. "
            f"Export it with integers, or leave examples out."
        )
    family = kernel_family(TFLM.kernels)
    simulation = run_examples(pack_if_requested(resolved, None, family), examples, family)
    arrays = {}
    infos = describe_tensors(graph.inputs, rescaled)
    for name, x in zip(graph.inputs, read_arrays(resolved.origin.inputs, examples), strict=True):
        # Integers are numbers to a model, and to a runner codes.
        real = x.astype(np.float32) if infos[name].is_quantized else x
        arrays[name] = infos[name].quantize(real)
    for name, output in simulation.outputs.items():
        codes = getattr(output, "codes", output)  # Integers stand for themselves.
        offset = 128 if graph.outputs[name].dtype == np.uint8 else 0
        arrays[name] = (codes.astype(np.int64) + offset).astype(graph.outputs[name].dtype)
    return {
        f"kGolden{words[name]}": codes.reshape(len(codes), -1) for name, codes in arrays.items()
    }


def _header(
    name: str,
    space: str,
    graph: FileGraph,
    words: dict[str, str],
    golden: dict[str, np.ndarray],
    rescaled: dict[str, Any],
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
            yield from ("", *_end(label, constant, tensor, end_name in rescaled))
    yield from ("", f"// For tflite::MicroMutableOpResolver<{space}::kOperators>.")
    yield f"constexpr unsigned int kOperators = {len(operators)};"
    yield from ("template <typename Resolver>", "bool AddOperators(Resolver& resolver) {")
    added = [f"resolver.Add{_added(kernel)}() == 0" for kernel in operators]
    yield f"  return {' && '.join(added).replace(' && ', f' &&{chr(10)}         ')};"
    yield "}"
    if golden:
        count = len(next(iter(golden.values())))
        yield from ("", "// Inputs and the outputs that TFLite Micro's kernels give for them.")
        if keeps_states:
            yield "// One after the other, from states of zeros on."
        yield f"constexpr size_t kGoldenExamples = {count};"
        yield from (f"extern {_declared(*array)};" for array in golden.items())
    yield from ("", f"}}  // namespace {space}", "", f"#endif  // {guard}")


def _end(label: str, constant: str, tensor: Tensor, is_rescaled: bool) -> Iterator[str]:
    shape = " x ".join(map(str, tensor.shape)) or "one number"
    yield f"// {label}: {shape}, {tensor.dtype}."
    yield f"constexpr size_t {constant}Size = {int(np.prod(tensor.shape))};"
    if is_rescaled:
        yield "// Pixels as they are."
    elif tensor.is_quantized:
        yield f"// A value q stands for {constant}Scale * (q - {constant}ZeroPoint)."
        yield f"constexpr float {constant}Scale = {_float(tensor.scale)};"
        yield f"constexpr int32_t {constant}ZeroPoint = {tensor.zero_point};"


def _source(
    header: str, space: str, contents: bytes, golden: dict[str, np.ndarray]
) -> Iterator[str]:
    yield from (f'#include "{header}"', "", f"namespace {space} {{", "")
    yield "alignas(16) const unsigned char kFile[] = {"
    yield from _lines_of(f"0x{byte:02x}" for byte in contents)
    yield from ("};", f"const size_t kFileSize = {len(contents)};", "")
    for name, codes in golden.items():
        yield f"{_declared(name, codes)} = {{"
        for row in codes:
            yield from ("  {", *_lines_of(map(str, row.tolist())), "  },")
        yield from ("};", "")
    yield f"}}  // namespace {space}"


def _lines_of(values: Iterable[str]) -> Iterator[str]:
    values = list(values)
    for start in range(0, len(values), BYTES_IN_A_LINE):
        yield f"    {', '.join(values[start : start + BYTES_IN_A_LINE])},"


def _declared(name: str, codes: np.ndarray) -> str:
    return f"const {codes.dtype}_t {name}[{len(codes)}][{codes.shape[1]}]"


def _identifier(name: str) -> str:
    """Returns a name for a C++ constant, to go behind its `k`: words with capitals."""
    words = [word for word in re.split(r"[^0-9A-Za-z]+", name) if word]
    return "".join(word[0].upper() + word[1:] for word in words) or "Tensor"


def _added(kernel: str) -> str:
    """Returns the name of an operator in TFLite Micro's resolver."""
    return ADDED.get(kernel) or "".join(
        part if part[0].isdigit() else part.capitalize() for part in kernel.split("_")
    )


def _float(number: float) -> str:
    text = f"{np.float32(number):.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"


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
