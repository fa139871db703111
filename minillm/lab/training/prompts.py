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
