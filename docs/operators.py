"""Writes docs/operators.md from the rows: `python docs/operators.py`."""

from __future__ import annotations

from keras_qat.graph.operations import NAMES
from keras_qat.ops.all_ops import ROWS
from keras_qat.ops.op import FixedRange, Op, SharedRange

HEAD = """# Operators

Every operator that is computed in integers is one row of `keras_qat/ops`, from which this page is
made (`python docs/operators.py > docs/operators.md`). `keras_qat.register_op` makes a
layer of your own one of them, by the name in the first column, with the attributes in the last one;
those in brackets have a default.

Each is tested against TFLite's interpreter, value for value, with random options, shapes, ranges
and weights, at the bits named here, with XNNPACK's rounding, with that of the reference kernels and
with TFLite Micro's; in brackets are those that alone have a kernel.

| operator | layers, functions and operations | bits | output's range | attributes |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The page as Markdown."""
    return HEAD + "".join(f"{_row(op)}\n" for op in ROWS)


def _row(op: Op) -> str:
    named = [f"`{layer.__name__}`" for layer in op.layers]
    named += [f"`{path.split('.')[-1]}`" for path in op.paths]
    functions = [f"{getattr(function, '__name__', function)}" for function in op.functions]
    named += [f"`{name}`" for name in dict.fromkeys(functions)]
    names = [name for kind in op.kinds for name in NAMES[kind] if not name.startswith("__")]
    named += [f"`tf.{name}`" for name in names]
    bits = ", ".join(_bits(op, count) for count in op.bits)
    attributes = [f"`{name}`" for name in op.needs]
    attributes += [f"[`{name}`]" for name in op.defaults]
    what = ": ".join(text for text in (op.doc, ", ".join(named)) if text)
    cells = (f"`{op.name}`", what, bits, _range(op), ", ".join(attributes))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _bits(op: Op, bits: int) -> str:
    label = "2 to 8" if bits == 8 else str(bits)
    only = " or ".join(f"`{name}`" for name in op.only_families(bits))
    return f"{label} ({only})" if only else label


def _range(op: Op) -> str:
    if op.alias:
        return "nothing is computed"
    if isinstance(op.output, SharedRange):
        return "that of its input" + (", rounded" if op.output.rounds else "")
    if isinstance(op.output, FixedRange):
        return f"{op.output.minimum:g} to {op.output.maximum:g}"
    return "its own"


if __name__ == "__main__":
    print(page(), end="")
