"""Serialisation of plans and results, for executors in other processes: MessagePack, by msgspec.

Nothing is pickled, so reading runs no code. A value that is not of its field's type is refused, and
sampling parameters are validated again (`SamplingParams`).
"""

from msgspec.msgpack import Decoder, Encoder

from minillm.scheduling.plan import StepPlan

to_bytes = Encoder().encode
plan_from_bytes = Decoder(StepPlan).decode
