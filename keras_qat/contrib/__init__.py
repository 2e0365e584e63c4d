"""What only `recipes.contrib` needs: the placement and folding of `tf.contrib.quantize`."""
