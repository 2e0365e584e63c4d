"""Runs the passes that rewrite a graph of Keras layers as a graph of operators."""

from __future__ import annotations

import contextvars
import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from keras_qat.graph.calls import Graph, drop_unused_calls
from keras_qat.graph.debug_graph import list_calls, list_changes, verify_graph
from keras_qat.graph.missing_values import REPLACES_NAN, find_nan_handling
from keras_qat.graph.sizes import fold_known_sizes, set_static_shapes
from keras_qat.imports.read_float import ReadsWeight
from keras_qat.lowering.activations import HARD_SWISH, LOG_SUM_EXP, SOFTMAX_BY_HAND
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.channels_last import move_channels_last
from keras_qat.lowering.clean_up import (
    drop_identities,
    fold_uniform_constants,
    make_names_unique,
    merge_common_subexpressions,
)
from keras_qat.lowering.concatenations import scale_tensors, skip_concatenations
from keras_qat.lowering.elementwise_chains import recognize_chains
from keras_qat.lowering.integer_types import cast_token_ids, slice_token_ids
from keras_qat.lowering.masked_scores import MISSING_VALUES, recognize_masks
from keras_qat.lowering.patterns import apply_rules
from keras_qat.lowering.split_layers import split_layers
from keras_qat.lowering.trace_layers import trace_layers
from keras_qat.lowering.weighted_products import make_weighted_layers
from keras_qat.messages import set_within


@dataclasses.dataclass(frozen=True)
class Pass:
    """A step that rewrites the graph.

    Args:
        name: a short description.
        run: a function that returns the new graph.
        after: a fact about the new graph to print, such as "equal calls are one call".
        always: whether to run the pass for all recipes. `recipes.contrib` runs no other passes.
    """

    name: str
    run: Callable[[Graph, LoweringContext], Graph]
    after: str
    always: bool = False


def lower(graph: Graph, context: LoweringContext | None = None) -> Graph:
    """Run all passes on a graph, and return the new graph.

    Raises:
        ValueError: if an operation still reads a layer's weight after tracing.
    """
    context = context or LoweringContext()
    graph = drop_unused_calls(dataclasses.replace(graph, weights=context.weights))
    listing = list_calls(graph) if _shows.get() else []
    for step in PASSES:
        if not (context.activations or step.always):
            continue
        graph = drop_unused_calls(step.run(graph, context))
        if _shows.get():
            before, listing = listing, list_calls(graph)
            if changes := list(list_changes(before, listing)):
                print("\n  ".join([f"{step.name}: {step.after}", *changes]))
        if context.verifies:
            verify_graph(graph, step.name, is_complete=step is PASSES[-1])
    return graph


SHOW = "KERAS_QAT_SHOW_PASSES"
"""Environment variable. Set it to 1 to print the changes of each pass."""

_shows = contextvars.ContextVar("shows passes", default=bool(os.environ.get(SHOW)))


def showing_passes(shows: bool = True) -> AbstractContextManager[None]:
    """Return a context that makes `lower` print the changes of each pass if `shows` is True."""
    return set_within(_shows, shows or _shows.get())


def fold_sizes(graph: Graph, context: LoweringContext) -> Graph:
    """Replace arithmetic on known sizes, such as `tf.shape(x)[1] * 2`, by constants."""
    return set_static_shapes(fold_known_sizes(set_static_shapes(graph)))


def check_weights(graph: Graph, context: LoweringContext) -> Graph:
    """Raise a ValueError if an operation still reads a layer's weight."""
    for call in graph.calls:
        if isinstance(call.layer, ReadsWeight):
            raise ValueError(call.layer.reason)
    return graph


def mark_missing_values(graph: Graph, context: LoweringContext) -> Graph:
    """Let calls that replace NaN compute in float, because integers cannot be NaN."""
    if not context.has_float:
        return graph
    calls = [call for calls in find_nan_handling(graph).values() for call in calls]
    return dataclasses.replace(graph, in_float={call.name: REPLACES_NAN for call in calls})


RULES = HARD_SWISH, SOFTMAX_BY_HAND, LOG_SUM_EXP, MISSING_VALUES

PASSES = (
    Pass("set shapes", set_static_shapes, "shapes that follow from inputs are known", always=True),
    Pass(
        "trace custom layers", trace_layers, "user code is replaced by Keras layers and operations"
    ),
    Pass("make weighted layers", make_weighted_layers, "products with weights are layers of Keras"),
    Pass("fold sizes", fold_sizes, "no operation computes with known sizes"),
    Pass("fold uniform constants", fold_uniform_constants, "no arithmetic on `zeros_like`, `fill`"),
    Pass("check weights", check_weights, "no operation reads a layer's weight", always=True),
    Pass("mark missing values", mark_missing_values, "calls that replace NaN are marked as float"),
    Pass("cast token ids", cast_token_ids, "inputs that are token ids are int32"),
    Pass("slice token ids", slice_token_ids, "no split returns both token ids and floats"),
    Pass("skip concatenations", skip_concatenations, "no slice reads one part of a concatenation"),
    Pass(
        "apply rules", partial(apply_rules, rules=RULES), "calls that a rule matches are one call"
    ),
    Pass("recognize masked scores", recognize_masks, "-1e9 sets no range before a softmax"),
    Pass("recognize chains", recognize_chains, "chains of elementwise operations are tables"),
    Pass("move channels last", move_channels_last, "every layer has its channels last"),
    Pass("split layers", split_layers, "each call is one operator, if possible", always=True),
    Pass("cast token ids", cast_token_ids, "token ids in a TimeDistributed are int32"),
    Pass("scale tensors", scale_tensors, "concatenated tensors have similar ranges"),
    Pass(
        "name calls",
        make_names_unique,
        "calls of different layers have different names",
        always=True,
    ),
    Pass("merge common subexpressions", merge_common_subexpressions, "equal calls are one call"),
    Pass("drop identities", drop_identities, "no identity is before a norm to fold", always=True),
)
