"""All forms: subject -> name -> form."""

from tests.networks.forms import (
    attention,
    cells_and_convolutions,
    constants,
    equivalents,
    habits,
    in_the_wild,
    masks,
    patterns,
    python_on_sizes,
    recurrent,
    spectra,
    tensors,
    weights,
    written_out,
)
from tests.networks.forms.form import Form

__all__ = ["FORMS", "LEGACY", "Form"]

FORMS: dict[str, dict[str, Form]] = {
    **attention.FORMS,
    **cells_and_convolutions.FORMS,
    **constants.FORMS,
    **equivalents.FORMS,
    **habits.FORMS,
    **in_the_wild.FORMS,
    **masks.FORMS,
    **patterns.FORMS,
    **python_on_sizes.FORMS,
    **recurrent.FORMS,
    **spectra.FORMS,
    **tensors.FORMS,
    **weights.FORMS,
    **written_out.FORMS,
}
LEGACY = {
    *("cells", "formulas", "gather nd", "masked recurrent", "shared patterns", "softmax"),
    "written out",
}
"""Subjects that also have to pass on TensorFlow 2.15."""
