"""AWQ divides by the importance instead of multiplying: large channels are made smaller."""

from minillm.quantization import awq

right = awq.candidate
awq.candidate = lambda mean, magnitude, ratio: 1 / right(mean, magnitude, ratio)
