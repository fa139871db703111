"""Twenty prompts for chapter 03, written before any of them was tried."""

PROMPTS = (
    "import os\nimport sys\n",
    "import json\n\n\ndef load(path):\n    with open(path) as file:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def factorial(n):\n    """Return n!."""\n    if n == 0:\n',
    "for index, line in enumerate(lines):\n    if not line.strip():\n",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "def read_lines(path, encoding='utf-8'):\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    while a < n:\n",
    "from collections import defaultdict\n\ncounts = defaultdict(int)\nfor word in words:\n",
    "if __name__ == '__main__':\n    parser = argparse.ArgumentParser(description=__doc__)\n",
    "import threading\n\nlock = threading.Lock()\n\n\ndef worker(queue):\n    while True:\n",
    "def is_prime(n):\n    if n < 2:\n        return False\n    for i in range(2,",
    "class Node:\n    def __init__(self, value, next=None):\n",
    "assert isinstance(name, str), ",
    "def send(self, data):\n    if self.closed:\n        raise ",
    "result = []\nfor item in items:\n    if item not in result:\n",
    "@property\ndef size(self):\n    return ",
    "while not queue.empty():\n    task = queue.get()\n    try:\n",
    "import unittest\n\n\nclass TestAdd(unittest.TestCase):\n    def test_add(self):\n",
)
