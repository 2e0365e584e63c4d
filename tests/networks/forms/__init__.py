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

FORMS: dict[str, dict[str, Form]] = {
    **attention.FORMS,
    **cells_and_convolutions.FORMS,
    **constants.FORMS,
    **equivalents.FORMS,
    **habits.FORMS,
    **in_the_wild.FORMS,
    **indices.FORMS,
    **masks.FORMS,
    **patterns.FORMS,
    **python_on_sizes.FORMS,
    **recurrent.FORMS,
    **sizes.FORMS,
    **spectra.FORMS,
    **tensors.FORMS,
    **weights.FORMS,
    **written_out.FORMS,
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
