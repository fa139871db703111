"""``python -m minillm_exercises``."""

import sys

from minillm_exercises.cli import main

if __name__ == "__main__":
    sys.exit(main())
