"""What runs inside another engine's environment: one file per engine, and what they share.

These files import nothing of minillm, which those environments do not have; only the standard
library and the engine itself. `minillm_engine.py` is the exception: it is our own side of the
comparison, driven in exactly the same way.
"""
