"""Is `verify`'s verdict right? Models that are healthy, and models that were broken on purpose.

    python -m benchmarks.verdicts                 all models, half an hour on 2 cores
    python -m benchmarks.verdicts lenet           only those whose names contain "lenet"
    python -m benchmarks.verdicts --part test     digits, rules, test or fresh: see `cases.Part`
    python -m benchmarks.verdicts --diagnose      each model is diagnosed as well

Small networks are trained on scikit-learn's handwritten digits and on synthetic signals. Each is
verified three times: with all examples in float, with as few as of large inputs, and with labels.
With labels the verdict has to be right. Without, it may be "same", which asks for labels, but
neither good nor poor for the wrong model. Warnings of all verbs on the way are counted: healthy
models should have none.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import keras_qat
from benchmarks.markdown import head, row
from benchmarks.verdicts import digits, images, others, sensors, sequences, vectors  # noqa: F401
from benchmarks.verdicts.cases import CASES, Entry
from keras_qat.analysis.verify.outputs import FEW
from keras_qat.analysis.verify.verdict import GOOD, UNDECIDED

TITLES = (
    *("model", "part", "output", "dB", "kept", "by labels", "in float"),
    *("without labels", "with few", "with labels", "", "warned"),
)
WIDTHS = (44, 6, 17, 5, 6, 9, 9, 14, 13, 13, 6, 6)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", default=[""], help="parts of the models' names")
    parser.add_argument("--part", help="digits, rules, test or fresh")
    parser.add_argument("--diagnose", action="store_true", help="diagnose each model as well")
    options = parser.parse_args()
    cases = {
        name: case
        for name, case in CASES.items()
        if any(word.lower() in name.lower() for word in options.words)
        and options.part in (None, case.part)
    }
    print(head(TITLES, WIDTHS))
    right, open_ones, texts, false_alarms = 0, 0, [], 0
    for name, entry in cases.items():
        verdicts, told, report, texts_of_one = _try(entry, options.diagnose)
        plain, few, labelled = verdicts
        is_right = labelled == entry.truth and {plain, few} <= {entry.truth, UNDECIDED}
        right += is_right
        open_ones += plain == UNDECIDED
        is_healthy = entry.truth == GOOD and not entry.is_announced
        false_alarms += bool(told) and is_healthy
        figures = (*_figures(report), *verdicts, "right" if is_right else "WRONG")
        print(row((name, entry.part, *figures, str(len(told) or "")), WIDTHS), flush=True)
        if told or not is_right or plain != GOOD:
            texts.append("\n    ".join([name, *told, *texts_of_one]))
    healthy_ones = sum(entry.truth == GOOD and not entry.is_announced for entry in cases.values())
    print(
        f"\n{right} of {len(cases)} models are judged right; without labels {open_ones} are left "
        f"open; {false_alarms} of {healthy_ones} healthy models were warned of.\n",
        *texts,
        sep="\n",
    )


def _try(entry: Entry, diagnoses: bool) -> tuple[tuple[str, ...], list[str], Any, list[str]]:
    """Returns the verdicts, what was warned of, the report with labels, and what it says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, file, x, y = entry.make()
        plain = keras_qat.verify(model, file, x)
        few = keras_qat.verify(model, file, x, float_examples=FEW)
        labelled = keras_qat.verify(model, file, x, y)
    told = list(dict.fromkeys(str(warning.message) for warning in caught))
    texts = [str(plain.verdict), str(labelled.verdict)]
    if diagnoses:
        diagnosis = keras_qat.diagnose(model, x)
        told += [problem for problem in diagnosis.problems if problem not in told]
        texts.append(str(diagnosis))
    words = tuple(report.verdict.words for report in (plain, few, labelled))
    return words, told, labelled, texts


def _figures(report: Any) -> tuple[str, ...]:
    """Returns the figures of the output with the lowest signal to noise."""
    output = min(report.outputs, key=lambda output: output.float_sqnr or 0.0)
    score = output.score
    form = ".1%" if score and score.is_share else ".3g"
    return (
        output.use,
        "" if output.float_sqnr is None else f"{output.float_sqnr:.1f}",
        "" if output.same_decisions is None else f"{output.same_decisions:.1%}",
        "" if score is None else f"{score.value:{form}}",
        "" if score is None else f"{score.float_value:{form}}",
    )


if __name__ == "__main__":
    main()
