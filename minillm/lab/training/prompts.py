"""The fixed prompts that evaluate the embedded models."""

from minillm.lab.training import corpus
from minillm.text.tokenizer import Tokenizer

TEN_PROMPTS = (
    "def fib(n):",
    "def main():\n    parser = argparse.ArgumentParser(",
    "import os\nimport sys\n",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self):',
    "def read_lines(path):\n    with open(path) as",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
    "try:\n    import json\nexcept",
    "def is_empty(self):\n    return",
    'def merge(left, right):\n    """Merge two sorted lists',
    "for key, value in",
)


def held_out_texts(manifest: corpus.Manifest, *, stdlib: bool = True) -> list[str]:
    """Whole held-out files, in the order of the manifest."""
    files = manifest.select(held_out=True, stdlib=stdlib)
    return [corpus.read(file).decode() for file in files]


def held_out_prompts(
    manifest: corpus.Manifest, tokenizer: Tokenizer, count: int = 64, length: int = 128
) -> list[list[int]]:
    """`count` evenly spaced pieces of `length` tokens of the held-out standard library."""
    ids = [i for text in held_out_texts(manifest) for i in tokenizer.encode(text, False)]
    step = (len(ids) - length) // count
    return [ids[start : start + length] for start in range(0, step * count, step)]


def held_out_headers(manifest: corpus.Manifest, count: int = 64, context: int = 96) -> list[str]:
    """The first lines of `count` top-level functions and classes of the held-out standard library:
    at least `context` characters each, without the last line break.

    They start at column 0, so a model's completion can be parsed by itself.
    """
    found = []
    for text in held_out_texts(manifest):
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith(("def ", "class ")):
                end, size = number, 0
                while end < len(lines) and size < context:
                    size += len(lines[end]) + 1
                    end += 1
                found.append("\n".join(lines[number:end]))
    return [found[i * len(found) // count] for i in range(count)]
