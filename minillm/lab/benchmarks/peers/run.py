"""``python run.py ENGINE``: serve one engine; ``python run.py ENGINE OPTIONS``: load it, print a
line when the first token is there, and leave.

It runs by its path, in an environment without minillm, so this folder is imported by itself.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Serve, or show the first token of ``{"prompt": ids, ...options}``."""
    folder = Path(__file__).resolve().parent
    sys.path[0] = str(folder.parent)  # python put this folder there
    protocol = import_module(f"{folder.name}.protocol")
    module = import_module(f"{folder.name}.{arguments[0]}_engine")
    sys.path.pop(0)  # that other files there have names of the standard library must not matter
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
    os._exit(0)  # taking an engine down is not what is measured


if __name__ == "__main__":
    main(sys.argv[1:])
