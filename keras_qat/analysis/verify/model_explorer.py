"""Writes the results of `verify` for Model Explorer, a viewer of TFLite files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from keras_qat.analysis.verify.results import TensorReport
from keras_qat.io.atomic_files import write_contents

RED, ORANGE, YELLOW, GREEN = "#f28b82", "#fcc28c", "#fff475", "#a8dab5"
IDENTICAL = ((99, RED), (99.9, ORANGE), (99.9999, YELLOW), (100, GREEN))
"""Colours of layers by the percentage of identical values: red up to 99, green only for 100."""
SIGNAL = ((10, RED), (20, ORANGE), (30, YELLOW), (1000, GREEN))
"""Colours of layers by the SQNR: red up to 10 dB, green above 30 dB."""


def write_node_data(tensors: Sequence[TensorReport], folder: Path) -> list[Path]:
    """Writes one file of node data for each measure, such as the SQNR. Returns their paths."""
    if not tensors:
        raise ValueError("The report has no layers: call verify with per_layer=True.")
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, tuple[Callable[[TensorReport], object], Sequence[tuple[float, str]]]] = {
        "bits": (lambda tensor: tensor.bits, ()),
        "range": (lambda tensor: "{:.4g} to {:.4g}".format(*tensor.range), ()),
        "identical_percent": (lambda tensor: 100 * tensor.run.identical, IDENTICAL),
        # Model Explorer colours the nodes by the last file.
        "signal_to_noise_db": (lambda tensor: tensor.sqnr and round(tensor.sqnr, 1), SIGNAL),
    }
    paths = []
    for name, (figure, colours) in figures.items():
        values = {tensor.tensor: figure(tensor) for tensor in tensors}
        data = {
            "results": {
                key: {"value": value} for key, value in values.items() if value is not None
            },
            "thresholds": [{"value": end, "bgColor": colour} for end, colour in colours],
            "hideInAggregatedStatsTable": True,  # Model Explorer would add them up.
            "hideInChildrenStatsTable": True,
        }
        paths.append(folder / f"{name}.json")
        write_contents(json.dumps(data, indent=1), paths[-1])
    return paths


def show_in_model_explorer(tflite: str | os.PathLike[str], node_data: Iterable[Path]) -> None:
    """Opens a TFLite file in Model Explorer. Returns when the user stops the viewer's server."""
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
