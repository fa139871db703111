"""``python -m minillm`` is ``minillm``."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.exit(main())
