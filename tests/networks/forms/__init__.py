"""All forms: subject -> name -> form."""

from tests.networks.forms import (
    attention,
    cells_and_convolutions,
    constants,
    equivalents,
    habits,
    in_the_wild,
    indices,
    masks,
    patterns,
    python_on_sizes,
    recurrent,
    sizes,
    spectra,
    tensors,
    weights,
    written_out,
)
from tests.networks.forms.form import Form

__all__ = ["FORMS", "LEGACY", "SLOW", "Form"]

MODULES = (
    *(attention, cells_and_convolutions, constants, equivalents, habits, in_the_wild),
    *(indices, masks, patterns, python_on_sizes, recurrent, sizes),
    *(spectra, tensors, weights, written_out),
)
FORMS: dict[str, dict[str, Form]] = {
    subject: forms for module in MODULES for subject, forms in module.FORMS.items()
}
LEGACY = {
    *("cells", "formulas", "gather nd", "masked recurrent", "shared patterns", "sizes"),
    *("softmax", "written out"),
}
"""Subjects that must also pass on TensorFlow 2.15."""

SLOW = {
    "conv lstm": ("of_images", "of_sequences", *cells_and_convolutions.RECIPES),
    "masks": ("translation",),
    "own activations": ("LSTM", "GRU", "layer"),
    "scans": ("both",),
    "states": ("both_ways", "apart", "relu_last", "translator"),
    "unrolled": ("mixed",),
}
"""Subject -> networks that take many seconds, so another network runs by default."""
