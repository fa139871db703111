"""A percentile is the value at the place int(q * n / 100), which for p99 of few values is the
largest one."""

from minillm.lab.benchmarks.serving import percentiles

percentiles.percentile = lambda values, q: sorted(values)[
    min(int(len(values) * q / 100), len(values) - 1)
]
