"""Names of tfmot, of `tf.contrib.quantize` and of earlier releases, with what to call instead."""

from __future__ import annotations

COUNTERPARTS = {
    "quantize_annotate_layer": "quantize_model(model, scope=['conv_1', 'head*'])",
    "quantize_annotate_model": "quantize_model(model)",
    "quantize_apply": "quantize_model(model)",
    "quantize_scope": "keras.models.load_model(path): all classes are registered with Keras",
    "QuantizeConfig": "recipes.int8().override(layer, weight_bits=4), or register_op",
    "QuantizeWrapper": "layers.QuantizeWrapper",
    "QuantizeLayer": "layers.Quantize",
    "prune_low_magnitude": "callbacks=[keras_qat.callbacks.Prune(0.5)] in fit, then quantize_model",
    "PolynomialDecay": "callbacks.Polynomial",
    "ConstantSparsity": "callbacks.Constant",
    "UpdatePruningStep": "callbacks.Prune, which needs no other callback",
    "strip_pruning": "the model itself: callbacks.Prune wraps no layers",
    "cluster_weights": "callbacks=[keras_qat.callbacks.Cluster(16)] in fit, then quantize_model",
    "strip_clustering": "the model itself: callbacks.Cluster wraps no layers",
    "create_training_graph": "quantize_model(model, recipe='contrib'), and callbacks.QuantDelay",
    "create_eval_graph": "evaluate and predict of the quantized model",
    "experimental_create_training_graph": "quantize_model(model, recipes.contrib(weight_bits=4))",
    "experimental_create_eval_graph": "evaluate and predict of the quantized model",
    "convert": "export_tflite(qat, path)",
    "load_model": "keras.models.load_model(path), with keras_qat imported",
    "quantize": "quantize_model(model)",
    "register_rule": "register_op(MyDense, 'dense', weights={'kernel': (-1,)}), or nothing at all: "
    "custom layers are traced",
}
"""Public names of these libraries, and names that people try -> the call to use instead."""

ARGUMENTS = {
    "bits": "recipe=keras_qat.recipes.low_bits(4, 4)",
    "num_bits": "recipe=keras_qat.recipes.low_bits(4, 4)",
    "weight_bits": "recipe=keras_qat.recipes.int8(weight_bits=4)",
    "activation_bits": "recipe=keras_qat.recipes.int8(activation_bits=4)",
    "per_channel": "recipe=keras_qat.recipes.int8(per_channel=False)",
    "quant_delay": "callbacks=[keras_qat.callbacks.QuantDelay(steps)] to fit",
    "freeze_bn_delay": "callbacks=[keras_qat.callbacks.FreezeBatchNorm(steps)] to fit",
    "layers": "scope=['conv_1', 'head*']",
    "quantize_config": "recipe=keras_qat.recipes.int8().override(layer, weight_bits=4)",
    "dtype": "recipe=keras_qat.recipes.int8(), int16x8(), int4_weights() or another",
    "scheme": "recipe=keras_qat.recipes.int8()",
}
"""Arguments that people give to `quantize_model`, and what to pass instead."""
