"""The course's helpers and graders: ``from minillm_exercises import predict, check, measure``."""
