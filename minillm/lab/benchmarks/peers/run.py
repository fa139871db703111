"""``python run.py ENGINE`` serves an engine; ``python run.py ENGINE OPTIONS`` loads it, prints a
line after the first token, and exits.

The script is started by its path in an environment without minillm.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Serve requests, or generate the first token of ``{"prompt": ids, ...options}``."""
    folder = Path(__file__).resolve().parent
    sys.path[0] = str(folder.parent)  # replaces this folder, which Python put there
    protocol = import_module(f"{folder.name}.protocol")
    module = import_module(f"{folder.name}.{arguments[0]}_engine")
    sys.path.pop(0)  # other files there have the names of standard modules
    protocol.end_with_parent()
    answers = protocol.private_stdout()
    if len(arguments) == 1:
        protocol.serve(module.Worker(), sys.stdin, answers)
        return
    options = json.loads(arguments[1])
    prompt = options.pop("prompt")
    engine = module.Worker()
    engine.open(options)
    engine.steps([prompt], 1)
    answers.write("first token\n")
    answers.flush()
    os._exit(0)  # shutting the engine down is not part of the measurement


if __name__ == "__main__":
    main(sys.argv[1:])
