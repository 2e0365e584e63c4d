"""Models of Keras 3. On TensorFlow 2.15, which has none, these tests are left out."""
