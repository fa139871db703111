"""Calibration adds up the inputs with their signs, so channels of both signs look small."""

from minillm.quantization.statistics import InputStatistics

right = InputStatistics.add


def add(self, x):
    before = self.total.clone()
    right(self, x)
    self.total = before + x.reshape(-1, x.shape[-1]).float().sum(0).abs()


InputStatistics.add = add
