"""Runs the exported file as an application does: without TensorFlow, Keras or keras_qat."""

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from data import TEST, load


def main() -> None:
    """Prints the share of digits that the file recognizes."""
    images, digits = load(TEST)
    run = Interpreter("build/digits.tflite").get_signature_runner()
    scale, zero_point = run.get_input_details()["image"]["quantization"]
    right = 0
    for image, digit in zip(images, digits, strict=True):
        quantized = np.floor(image[None] / scale + 0.5) + zero_point
        scores = run(image=np.clip(quantized, -128, 127).astype(np.int8))["digit"]
        right += int(scores.argmax() == digit)
    print(f"the file: {right} of {len(digits)} digits")


if __name__ == "__main__":
    main()
