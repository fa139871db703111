"""Deliberate bugs of the parser and the grammar of replies, each with a test that finds it."""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType

import pytest

from minillm.serving import reply_parser
from minillm.structured import lark
from tests.planting import broken
from tests.serving import test_reply_parser as tests
from tests.serving.test_reply_parser import Guidance, guidance  # noqa: F401

DIVIDED, WRITTEN = tests.test_any_division_gives_the_same, tests.test_what_was_written_is_read
BUGS: Mapping[str, tuple[ModuleType, str, str, Callable[[], object] | str]] = {
    # what is replaced by what, and the test, or arguments of `check_agreement`
    "brackets in texts count": (
        reply_parser, 'elif char == \'"\':', 'elif char == "\\0":', WRITTEN),
    "escapes are not seen": (reply_parser, 'char == "\\\\", char', "False, char", WRITTEN),
    "state is lost between deltas": (
        reply_parser, "self._held += text\n", "self._held += text\n        self._quoted = False\n",
        DIVIDED),
    "half a tag is passed on": (
        reply_parser, "range(len(tag) - 1, 0, -1)", "range(len(tag) - 2, 0, -1)", DIVIDED),
    "blanks are passed on": (
        reply_parser, "len(text) - kept].rstrip(BLANKS)", "len(text) - kept]", DIVIDED),
    "calls have one index": (reply_parser, "self.num_calls += 1", "self.num_calls = 1", WRITTEN),
    "the tag is lost": (
        reply_parser, 'self._add("content", self._tag', 'self._add("other", self._tag',
        partial(tests.test_cases, "an unknown tool")),
    "a cut call is complete": (
        reply_parser, "and self._step != self._arguments", "or True",
        partial(tests.test_cases, "cut within arguments")),
    "a tag opens nothing": (lark, "head[lazy]: TEXT", "head: TEXT", "never auto"),
    "required may be text": (
        lark, 'rest: call{more}{', 'rest: TEXT | call{more}{', "never required"),
    "a second call": (lark, 'if calls.many and calls.tagged', "if calls.tagged", "never required"),
    "arguments of another tool": (lark, "head_{i} arguments_{i}", "head_{i} arguments_0",
                                  "never required"),
}  # fmt: skip


def plant(name: str, patch: pytest.MonkeyPatch) -> Callable[[], object] | str:
    module, right, wrong, test = BUGS[name]
    found = broken(module, right, wrong)
    for each in ("ReplyParser", "reply"):
        if hasattr(found, each):
            patch.setattr(tests, each, getattr(found, each))
    return test


@pytest.mark.mutation
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    guidance: Guidance,  # noqa: F811
) -> None:
    test = plant(name, monkeypatch)
    if isinstance(test, str):
        thoughts, choice = test.split()
        must = choice == "required"
        test = partial(tests.check_agreement, guidance, thoughts, must, True, None)
    with pytest.raises(Exception):  # noqa: B017,PT011  (hypothesis has its own for several)
        test()
