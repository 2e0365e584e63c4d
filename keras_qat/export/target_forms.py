"""Other forms of operators that a target would compute wrongly."""

from __future__ import annotations

from collections.abc import Callable

from keras_qat.config.targets.target import Target
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.reader import FileGraph, Site


def avoiding(target: Target) -> Callable[[Builder], None]:
    """Returns a function that writes a file's operators in the forms that a target computes."""

    def rewrite(builder: Builder) -> None:
        graph, operators = FileGraph(builder.model), builder.graph.operators
        builder.graph.operators = []
        for operation, operator in zip(graph.operations, operators, strict=True):
            site = Site(graph, operation)
            fault = target.fault(site)
            if fault is None or fault.form is None:
                builder.graph.operators.append(operator)
            else:
                fault.form(builder, site)
        builder.drop_unused()

    return rewrite
