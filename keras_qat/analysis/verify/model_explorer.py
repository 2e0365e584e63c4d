"""A report's figures as node data of Model Explorer, which draws TFLite files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_qat.io.atomic_files import write_contents

if TYPE_CHECKING:
    from keras_qat.analysis.verify.report import Report, TensorReport

RED, ORANGE, YELLOW, GREEN = "#f28b82", "#fcc28c", "#fff475", "#a8dab5"
IDENTICAL = ((99, RED), (99.9, ORANGE), (99.9999, YELLOW), (100, GREEN))
"""Ends of intervals, in percent, and their colours: only all values are green."""
SIGNAL = ((10, RED), (20, ORANGE), (30, YELLOW), (1000, GREEN))
"""Ends of intervals of the signal to noise, in dB, and their colours."""


def write_node_data(report: Report, folder: Path) -> list[Path]:
    """Writes a file of node data for each figure.

    Raises:
        ValueError: if the report has no layers.
    """
    if not report.tensors:
        raise ValueError("The report has no layers: call verify with per_layer=True.")
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, tuple[Callable[[TensorReport], Any], Any]] = {
        "bits": (lambda tensor: tensor.bits, ()),
        "range": (_range, ()),
        "identical_percent": (lambda tensor: 100 * tensor.run.identical, IDENTICAL),
        # Model Explorer colours the nodes by the last one.
        "signal_to_noise_db": (lambda tensor: tensor.sqnr and round(tensor.sqnr, 1), SIGNAL),
    }
    paths = []
    for name, (figure, colours) in figures.items():
        values = {tensor.tensor: figure(tensor) for tensor in report.tensors}
        data = {
            "results": {
                key: {"value": value} for key, value in values.items() if value is not None
            },
            "thresholds": [{"value": end, "bgColor": colour} for end, colour in colours],
            "hideInAggregatedStatsTable": True,  # Sums and means of these say nothing.
            "hideInChildrenStatsTable": True,
        }
        paths.append(folder / f"{name}.json")
        write_contents(json.dumps(data, indent=1), paths[-1])
    return paths


def _range(tensor: TensorReport) -> str:
    """Writes the real values that the least and the greatest quantized value stand for."""
    low, high = tensor.range
    return f"{low:.4g} to {high:.4g}"


def open_file(tflite: str | os.PathLike[str], node_data: Iterable[Path]) -> None:
    """Opens a TFLite file in Model Explorer; returns when its server is stopped.

    Raises:
        ImportError: without the package `ai-edge-model-explorer`.
    """
    try:
        import model_explorer
    except ImportError as error:
        raise ImportError(
            "Opening the file needs Model Explorer: pip install ai-edge-model-explorer"
        ) from error
    config = model_explorer.config().add_model_from_path(os.fspath(tflite))
    for path in node_data:
        config.add_node_data_from_path(os.fspath(path))
    model_explorer.visualize_from_config(config)
