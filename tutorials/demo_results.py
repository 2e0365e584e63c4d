"""What the demo measures, as a table and as checks."""

from __future__ import annotations

import dataclasses

__all__ = ["Results"]


@dataclasses.dataclass(frozen=True)
class Results:
    """What the demo measured: shares from 0 to 1, sizes in bytes, latencies in milliseconds."""

    float_accuracy: float
    qat_accuracy: float
    tflite_accuracy: float
    agreement: float
    identical: float
    max_difference: float
    float_size: int
    int8_size: int
    float_latency: float
    int8_latency: float
    float_operations: int
    reloaded_identical: bool

    def checks(self) -> dict[str, bool]:
        """What the job has to reach -> whether it did. Latency depends on the machine."""
        drop = abs(self.tflite_accuracy - self.float_accuracy)
        return {
            "int8 TFLite accuracy within 0.5 points of the float model's": drop <= 0.005,
            "QAT model and TFLite agree on >= 99.5 % of the test images": self.agreement >= 0.995,
            ">= 98 % of the output codes identical": self.identical >= 0.98,
            "no output code more than 1 LSB apart": self.max_difference <= 1,
            "file about 4x smaller (>= 3.5x)": self.float_size >= 3.5 * self.int8_size,
            "no float operation in the file": self.float_operations == 0,
            "saved and reloaded model computes the same": self.reloaded_identical,
        }

    def __str__(self) -> str:
        smaller = self.float_size / self.int8_size
        faster = self.float_latency / self.int8_latency
        rows = [
            ("", "float", "QAT (Keras)", "int8 TFLite", ""),
            (
                "accuracy on the test set",
                f"{self.float_accuracy:.2%}",
                f"{self.qat_accuracy:.2%}",
                f"{self.tflite_accuracy:.2%}",
                "",
            ),
            ("same class as QAT", "", "", f"{self.agreement:.2%}", ""),
            ("same output codes as QAT", "", "", f"{self.identical:.2%}", ""),
            ("largest difference to QAT", "", "", f"{self.max_difference:g} LSB", ""),
            (
                "size of the .tflite file",
                f"{self.float_size / 1000:.1f} kB",
                "",
                f"{self.int8_size / 1000:.1f} kB",
                f"  {smaller:.2f}x smaller",
            ),
            (
                "latency, 1 image, 1 thread",
                f"{self.float_latency:.3f} ms",
                "",
                f"{self.int8_latency:.3f} ms",
                f"  {faster:.2f}x faster",
            ),
        ]
        return "\n".join(f"{a:<28}{b:>12}{c:>14}{d:>14}{e}".rstrip() for a, b, c, d, e in rows)
