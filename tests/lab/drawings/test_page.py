"""The page holds exactly the data it was given, and nothing in it can run, load or break out."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from minillm.errors import TraceFileError
from minillm.lab.drawings.figure import STATES
from minillm.lab.drawings.page import MARKER, SCRIPTS, page, scripts, write_page
from minillm.lab.drawings.timeline import BEHIND, timeline
from minillm.lab.simulated_drafts import SimulatedDrafts
from minillm.lab.simulation import Simulation
from tests.trace.simulation import data

HOSTILE = (
    "</script><script>alert(1)</script>", "<!--<script>", "]]>--><img src=x onerror=alert(1)>",
    "'\"&amp;\\u003c\\", "{{script}} {{data}}", "שלום \u202e evil",
    "line\u2028separator\u2029and\nbreak\x00", "half a pair \ud800", "😀" * 200,
)  # fmt: skip


class Elements(HTMLParser):
    """Tags with their attributes, and the text in each script and style."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.inline:
            self.inline[tag].append("")

    def handle_data(self, text: str) -> None:
        if self.cdata_elem is not None:  # the parser is inside a script or a style
            self.inline[self.cdata_elem][-1] += text

    def attributes(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


@pytest.fixture(scope="module")
def drawing() -> dict[str, Any]:
    return data(12, 24, names=HOSTILE, seed=1)


@pytest.fixture(scope="module")
def written(drawing: dict[str, Any]) -> Elements:
    return Elements(page(drawing, "run.jsonl"))


def source(name: str) -> str:
    return resources.files("minillm.lab.drawings").joinpath(name).read_text("utf-8")


def test_the_data_comes_back_unchanged(drawing: dict[str, Any], written: Elements) -> None:
    assert {sequence["name"] for sequence in drawing["sequences"]} >= set(HOSTILE)
    assert json.loads(written.inline["script"][0]) == drawing


def test_no_text_ends_its_element(drawing, written, tmp_path):
    assert [tag for tag, _ in written.tags].count("script") == 2
    assert len(written.inline["script"]) == 2
    assert "img" not in [tag for tag, _ in written.tags]
    assert not re.search("[<>&]", written.inline["script"][0])
    assert written.inline["script"][0].isascii()
    for title in HOSTILE:
        write_page(drawing, tmp_path / "page.html", title)
        text = (tmp_path / "page.html").read_text("utf-8")
        assert [tag for tag, _ in Elements(text).tags].count("script") == 2
        assert html.escape(title.replace("\ud800", "?")) in text
        assert MARKER in text


def test_the_policy_allows_exactly_this_script_and_this_style(written: Elements) -> None:
    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    (policy,) = (a["content"] or "" for _, a in written.tags if "http-equiv" in a)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": digest(written.inline["script"][1]),
        "style-src": digest(written.inline["style"][0]),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    names = [attrs.get("http-equiv") or tag for tag, attrs in written.tags]
    assert names.index("Content-Security-Policy") < min(names.index("style"), names.index("script"))


def test_nothing_is_loaded_from_anywhere(written: Elements) -> None:
    for name in ("src", "href", "srcset", "action", "background", "poster"):
        assert written.attributes(name) == []
    own = written.inline["script"][1] + written.inline["style"][0]
    loads = r"https?:|//\w+\.\w|url\(|@import|\bimport\b|\bfetch\(|XMLHttp|WebSocket|sendBeacon"
    assert re.findall(loads, own) == []
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc"
    assert re.findall(ways, written.inline["script"][1]) == []  # texts never become HTML
    assert not [name for _, attrs in written.tags for name in attrs if name.startswith("on")]
    assert written.attributes("style") == []  # the policy would ignore it


def test_every_element_that_a_script_asks_for_is_there(written: Elements) -> None:
    ids = written.attributes("id")
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'getElementById\("([\w-]+)"\)', written.inline["script"][1]))
    wanted |= set(re.findall(r'on\("([\w-]+)"', written.inline["script"][1]))
    assert wanted
    assert wanted <= set(ids)


def test_the_scripts_know_every_kind_of_span_and_the_reason_of_those_behind() -> None:
    kinds = set(re.findall(r'key: "(\w)"', source("page_model.js")))
    assert kinds == set(STATES)
    assert f'BEHIND = "{BEHIND}"' in source("page_words.js")


# What the scripts make of drafts, without a browser: the words of each cell, and its boxes.
ASK = """
const model = new Model(JSON.parse(require("fs").readFileSync(0, "utf-8")));
const words = new Words(model), theme = { ink: [0, 0, 0], back: [255, 255, 255] };
const columns = [...Array(model.numColumns).keys()];
function drawn(drafted, accepted) {
  const calls = [], context = {};
  context.fillRect = (...box) => calls.push([context.fillStyle, ...box]);
  drawDrafts(context, 10, 20, 6, 12, drafted, accepted, theme);
  return calls;
}
console.log(JSON.stringify({
  has: model.hasDrafts,
  states: model.sequences.map((_, s) => columns.map((c) => words.state(s, c))),
  counts: model.sequences.map((_, s) => model.draftCounts(s, 0, columns.length)),
  tokens: model.sequences.map((_, s) => columns.reduce((sum, _, c) => {
    const span = model.spanAt(s, c), first = span >= 0 && model.first[span] === c;
    return sum + (first && model.code[span] === DECODE ? model.decoded(s, span) : 0);
  }, 0)),
  drawn: [drawn(3, 2), drawn(1, 0)],
}));
"""


node = pytest.mark.skipif(shutil.which("node") is None, reason="no node")


def ask(names: tuple[str, ...], script: str, given: Any) -> dict[str, Any]:
    """What `script` makes of `given` behind some of the page's scripts, without a browser."""
    asked = f"{scripts(names)}\n{script}".replace('"use strict";', "")
    done = subprocess.run(
        ["node", "-e", asked], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@node
@pytest.mark.parametrize("survival", [(0.8, 0.6, 0.5), None])
def test_the_scripts_tell_and_draw_drafts(survival: tuple[float, ...] | None) -> None:
    sim = Simulation(40, 4, max_num_seqs=3, speculation=survival and SimulatedDrafts(survival))
    for number in range(5):
        sim.add(6, 9 + number)
    trace = sim.run()
    found = ask(("model", "words", "raster", "rows"), ASK, timeline(trace))
    assert found["has"] == (survival is not None)
    for one in trace.requests():
        place = int(one.request_id[1:])
        assert found["counts"][place] == [one.num_draft_tokens, one.num_accepted_tokens]
        assert found["tokens"][place] == one.num_tokens[0] - 1  # the first comes with the prompt
    for column, record in enumerate(trace):
        starts = {row.seq_id: row.start for row in record.rows}
        for one in record.drafted:
            first, last = starts[one.seq_id], starts[one.seq_id] + one.num_accepted
            words = found["states"][one.seq_id][column]
            many = f"{one.num_accepted + 1} tokens" if one.num_accepted else "1 token"
            where = f"positions {first}–{last}" if one.num_accepted else f"position {first}"
            assert words.startswith(f"decode of {many}, {where}")
            assert (f"{one.num_accepted} of {one.num_drafted} draft" in words) == (
                one.num_drafted > 0
            )
    ink, back = "rgb(0, 0, 0)", "rgb(255, 255, 255)"
    stack, hollow = found["drawn"]
    assert [call[0] for call in stack] == [ink, ink, ink, back]  # the last is inside the third
    assert [call[2] for call in stack[:3]] == [28, 24, 20]  # from below
    assert [call[0] for call in hollow] == [ink, back]


def test_every_script_is_in_the_page_which_is_small_without_its_data() -> None:
    folder = Path(str(resources.files("minillm.lab.drawings")))
    assert {path.name for path in folder.glob("page_*.js")} == {f"page_{n}.js" for n in SCRIPTS}
    assert len(page({}, "x").encode()) < 150_000


def test_a_page_may_be_replaced_and_another_file_not(drawing, tmp_path):
    page, thesis = tmp_path / "page.html", tmp_path / "thesis.html"
    for title in ("one", "two"):
        write_page(drawing, page, title)
        assert f"<title>{title}</title>" in page.read_text("utf-8")
    thesis.write_text("three years of work")
    with pytest.raises(TraceFileError, match="is not a trace page; give another name"):
        write_page(drawing, thesis)
    assert thesis.read_text() == "three years of work"


def test_what_cannot_be_written_is_one_sentence(drawing: dict[str, Any], tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no" / "x.html", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TraceFileError, match=f"cannot be written: {why}"):
            write_page(drawing, path)
