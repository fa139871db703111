"""``python run.py ENGINE`` serves an engine.

The script is started by its path in an environment without minillm.
"""

import sys
from importlib import import_module
from pathlib import Path


def main(engine: str) -> None:
    """Serve requests."""
    folder = Path(__file__).resolve().parent
    sys.path[0] = str(folder.parent)  # replaces this folder, which Python put there
    protocol = import_module(f"{folder.name}.protocol")
    module = import_module(f"{folder.name}.{engine}_engine")
    sys.path.pop(0)  # other files there have the names of standard modules
    protocol.end_with_parent()
    protocol.serve(module.Worker(), sys.stdin, protocol.private_stdout())


if __name__ == "__main__":
    main(sys.argv[1])
