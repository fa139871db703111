"""Fingerprints of timed code, and measuring a chapter again."""

import json

import pytest
from notebook_chapter import chapters, execute, stale
from rich.console import Console
from toy_notebooks import code, notebook

MODULE = '''"""A module."""

class Cache:
    """A cache."""

    def write(self, key):
        """Write."""
        self.key = key  # kept

def step():
    return 1
'''
C_FILE = "/* A comment. */\nint f(void) { return 1; } // one\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "cache.py").write_text(MODULE)
    (tmp_path / "engine" / "f.c").write_text(C_FILE)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("cache.py", "self.key = key", "self.key = key + 1", {"cache", "Cache", "Cache.write"}),
        ("cache.py", "return 1", "return 2", {"cache", "step"}),
        ("cache.py", '"""Write."""', '"""Writes a key."""', set()),
        ("cache.py", "  # kept", "", set()),
        ("f.c", "return 1", "return 2", {"f.c"}),
        ("f.c", "/* A comment. */", "/* Another\n one */", set()),
        ("f.c", "{ return", "{\n    return", set()),
    ],
)
def test_a_fingerprint_follows_the_code_and_not_its_comments(root, file, old, new, changes):
    names = ["engine.cache", "engine.cache.Cache", "engine.cache.Cache.write", "engine.cache.step",
             "engine/f.c"]  # fmt: skip
    before = stale.fingerprints({"timed": names}, root)
    path = root / "engine" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    found = stale.changed({"timed": names}, {"timed": before}, root)
    short = {name.removeprefix("engine.cache.").removeprefix("engine.").removeprefix("engine/")
             for name in found}  # fmt: skip
    assert short == changes


@pytest.mark.parametrize(("name", "says"), [
    ("engine/g.c", "no such file"), ("engine.cache.Gone", "no 'Gone' in it"),
    ("motor.cache", "no such module"),
])  # fmt: skip
def test_a_name_of_nothing_is_refused(root, name, says):
    with pytest.raises(chapters.ChapterError, match=says):
        stale.fingerprint(name, root)


def test_numbers_are_compared_with_their_bands():
    old, new = {"a": {"value": 2.0}}, {"a": {"value": 3.1}}
    assert stale.outside({"a": 1.6}, old, new) == []
    assert stale.outside({"a": 1.6}, new, old) == []
    (sentence,) = stale.outside({"a": 1.5}, old, new)
    assert sentence == "'a' was 2, is 3.1; its band is a factor of 1.5"
    assert "was not recorded" in stale.outside({"b": 2.0}, old, new)[0]


def measured(folder, value, about, results):
    """The toy chapter that records `value`, measured again: what is said, and its results then."""
    cell = code(f'from minillm_exercises import record\nrecord("ratio", {value})')
    path = folder / "90_toy.ipynb"
    chapters.write_notebook(path, notebook(cell, timed=["minillm.errors.MinillmError"], **about))
    kept = execute.results_of(path)
    kept.parent.mkdir()
    if results:
        kept.write_text(json.dumps(results))
    return execute.older(path, Console(), True, 60), json.loads(kept.read_text())


OLD = {"values": {"ratio": {"value": 1.0}}, "timed": {}}


@pytest.mark.parametrize(("bands", "results"), [({}, OLD), ({"ratio": 1.5}, None)])
def test_nothing_is_renewed_without_a_comparison(tmp_path, bands, results):
    with pytest.raises(chapters.ChapterError, match="no recorded results, or no bands"):
        measured(tmp_path, 1.0, {"bands": bands}, results)


@pytest.mark.parametrize(("value", "renewed"), [(1.1, True), (9.0, False)])
def test_a_chapter_is_measured_again(tmp_path, value, renewed):
    found, kept = measured(tmp_path, value, {"bands": {"ratio": 1.5}}, OLD)
    assert bool(kept["timed"]) is renewed is not bool(found)
    assert kept["values"] == OLD["values"]  # the page's numbers stay
    if found:
        assert "its band is a factor of 1.5" in found[0]
        assert found[1] == "execute it again: python notebooks/execute.py 90"


def test_links_get_the_lines_that_a_name_has_now(root):
    page = "Read [`Cache.write`](../engine/cache.py#L1-L2), [`step`](../engine/cache.py#L9-L9)."
    assert stale.pointed(page, root) == (
        "Read [`Cache.write`](../engine/cache.py#L6-L8), [`step`](../engine/cache.py#L10-L11)."
    )
    with pytest.raises(chapters.ChapterError, match="no 'read' in it"):
        stale.pointed("[`Cache.read`](../engine/cache.py#L1-L2)", root)
