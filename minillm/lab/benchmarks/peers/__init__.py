"""Scripts that run in the environments of the other engines: one file per engine.

These environments do not contain minillm, so the files import only the standard library and the
engine. The exception is `minillm_engine.py`, which runs minillm through the same protocol.
"""
