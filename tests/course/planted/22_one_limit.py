"""A request is good if it meets one of the limits, not all of them."""

from minillm.lab.benchmarks.serving import slo

met = slo.met
slo.met = lambda reply, objectives: dict.fromkeys(objectives, any(met(reply, objectives).values()))
