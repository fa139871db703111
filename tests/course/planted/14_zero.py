"""A weight is restored with a zero point that is one too large."""

from minillm.quantization import quantized

right = quantized.Quantized.dense


def dense(self, *arguments):
    if self.zeros is None:
        return right(self, *arguments)
    return right(quantized.replace(self, zeros=self.zeros + 1), *arguments)


quantized.Quantized.dense = dense
