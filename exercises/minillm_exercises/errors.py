"""What a learner or an instructor can get wrong: one sentence each, never a traceback."""

from minillm.errors import MinillmError


class ExerciseError(MinillmError):
    """A wrong command, a missing file, an unknown name; the message says what to do."""
