"""One of several parts of a test run: the same tests are in it on every machine."""

import re
from hashlib import sha256

import pytest


def part_of(test: str, count: int) -> int:
    """Which of `count` parts a test is in, from 1."""
    return int.from_bytes(sha256(test.encode()).digest()[:8]) % count + 1


class Part:
    """The plugin behind `--part K/N`. Tests of the other parts are deselected."""

    def __init__(self, part: str) -> None:
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
        if not found or int(found[1]) > int(found[2]):
            raise pytest.UsageError(f"--part is {part!r}; it must be K/N with K from 1 to N: 2/5.")
        self.mine, self.count = map(int, found.groups())

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        mine, others = [], []
        for item in items:
            (mine if part_of(item.nodeid, self.count) == self.mine else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = mine

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session):
        """A part may be empty where there are few tests."""
        yield
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
