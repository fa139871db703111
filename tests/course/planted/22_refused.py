"""Attainment is a share of the answered requests; those that were refused are left out."""

from minillm.lab.benchmarks.serving import slo

all_requests = slo.evaluate


def of_answered(replies, objectives, wall):
    return all_requests([reply for reply in replies if reply.error is None], objectives, wall)


slo.evaluate = of_answered
