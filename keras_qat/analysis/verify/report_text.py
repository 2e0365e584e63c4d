"""The report of `verify` as a table in text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_qat.analysis.verify.report import Report, TensorReport


def report_text(report: Report, width: int) -> str:
    """Writes a report in lines of `width` characters."""
    arena = "" if report.arena_size is None else f", arena {report.arena_size} bytes"
    lines = [
        f"TFLite ({report.kernels} kernels{arena}) against the model on {report.examples} examples",
        f"{'output':<18} {'identical outputs':>18} {'largest diff.':>14} {'mean diff.':>12} "
        f"{'same argmax':>12}",
    ]
    for output in report.outputs:
        argmax = "-" if output.argmax_agreement is None else f"{output.argmax_agreement:.2%}"
        lines.append(
            f"{_fit(output.name, 18):<18} {output.identical:>18.3%} "
            f"{output.max_difference:>10.3g} LSB {output.mean_difference:>8.2g} LSB "
            f"{argmax:>12}"
        )
    if report.tensors:
        lines += ["", *_tensor_lines(report.tensors, width - 58), ""]
        if report.merged:
            lines += _wrapped(
                f"Merged with other layers in the file: {listed(report.merged)}.", width
            )
    figures = filter(None, (output.against_float() for output in report.outputs))
    for sentence in [*report.findings(), *figures, str(report.verdict)]:
        lines += _wrapped(sentence, width)
    if report.runtime and report.identical < 1:
        lines.append(f"Run by {report.runtime}.")
    return "\n".join(lines)


def _tensor_lines(tensors: Iterable[TensorReport], width: int) -> Iterable[str]:
    """Writes a line for each tensor, with names of `width` characters."""
    yield f"{'':<{width + 17}}  {'fed':>12} {'free run':>13} {'at':>5} {'SQNR':>5}"
    yield (
        f"{'layer':<{width}} {'kernel':<17} {'same':>8} {'LSB':>4} {'same':>8} {'LSB':>4} "
        f"{'ends':>5} {'dB':>5}"
    )
    for tensor in tensors:
        fed = "" if tensor.fed is None else share(tensor.fed.identical)
        off = "" if tensor.fed is None else f"{tensor.fed.max_difference:.0f}"
        sqnr = "-" if tensor.sqnr is None else f"{tensor.sqnr:.1f}"
        yield (
            f"{_fit(tensor.name, width):<{width}} {_fit(kernel_names(tensor), 17):<17} "
            f"{fed:>8} {off:>4} {share(tensor.run.identical):>8} "
            f"{tensor.run.max_difference:>4.0f} {tensor.at_ends:>5.1%} {sqnr:>5}"
        )


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(sentence, width, subsequent_indent="  ")


MOVING = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SHAPE", "STRIDED_SLICE", "PACK"}
"""Operations that tables do not name beside those that compute."""


def kernel_names(tensor: TensorReport) -> str:
    """Names the operations of the file that compute a tensor."""
    computing = [name for name in tensor.kernels if name not in MOVING]
    return "+".join(dict.fromkeys(computing or tensor.kernels)) or "input"


def share(part: float) -> str:
    """Formats a share in percent, rounded down: only a share of exactly 1 gives 100."""
    return f"{int(part * 100_000) / 1000:.3f}%"


def _fit(name: str, width: int) -> str:
    """Leaves out the middle of a name that is too long."""
    if len(name) <= width:
        return name
    return f"{name[: (width - 1) // 2]}…{name[len(name) - width // 2 :]}"


def listed(names: Iterable[str]) -> str:
    """Lists up to eight names, and says how many more there are."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
