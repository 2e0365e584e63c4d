"""What makes a model accurate without labels or training: weights changed, layer by layer."""

from keras_qat.post_training.batch_norm import reestimate_batch_norm
from keras_qat.post_training.bias import bias_correction
from keras_qat.post_training.equalize import equalize
from keras_qat.post_training.rounding import learn_rounding

__all__ = ["bias_correction", "equalize", "learn_rounding", "reestimate_batch_norm"]
