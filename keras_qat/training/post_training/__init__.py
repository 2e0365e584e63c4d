"""Post-training methods, which change weights layer by layer without labels or training."""

from keras_qat.training.post_training.bias_correction import bias_correction
from keras_qat.training.post_training.learn_rounding import learn_rounding

__all__ = ["bias_correction", "learn_rounding"]
