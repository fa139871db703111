"""notebooks/slides.py: a deck for each chapter, which needs no network and tells nothing early."""

import re

import pytest
from notebook_chapter import chapters, slides
from toy_notebooks import code, fact, markdown, notebook

PLOT = {
    "output_type": "display_data",
    "data": {"image/png": "iVBORw0KGgo=\n", "text/plain": "[figure]"},
    "metadata": {},
}
CAPTION = {
    "output_type": "display_data",
    "data": {"text/markdown": "*It rises.*", "text/plain": "x"},
    "metadata": {},
}
CELLS = (
    markdown("# Two seats are empty\n\nWords.", "header"),
    code("import time", "setup"),
    markdown("## A `batch` lasts\n\nMore words."),
    code('predict("90.n", ...)', "predict", says="How many?\n  a)  <1\n"),
    code("draw()", "plot", outputs=(PLOT, CAPTION)),
    fact("count", 3),
    code('compare("90.n", 3)', "result", says="Counted: 3. That is a.\n"),
    code("def f():\n    return 1 < 2", "fix"),
    code("x = 1\n" * 19, "fix"),
    code('task("e90.1")', outputs=({**CAPTION, "data": {"text/markdown": "a long task"}},)),
    markdown("## It does not buy\n\n* **Time.**", "losses"),
)


def test_slides_follow_the_tags():
    kinds, pages = zip(*slides.results_first(slides.slides(notebook(*CELLS))), strict=True)
    assert kinds == ("title", "predict", "result", "plot", "fix", "losses")
    assert "<h1>Two seats are empty</h1><p>Why?</p><svg" in pages[0]
    headed = [bool(re.search("<h2[^>]*>A <code>batch</code> lasts", page)) for page in pages]
    assert headed == [False, False, True, True, True, False]  # a heading may tell an answer
    assert "a)  &lt;1" in pages[1]
    assert "<em>How many?\n</em><pre>Counted: 3." in pages[2]
    assert 'src="data:image/png;base64,iVBORw0KGgo="' in pages[3]
    assert "<em>It rises.</em>" in pages[3]
    assert "return 1 &lt; 2" in pages[4]
    everything = "".join(pages)
    for left_out in ("count: 3", "a long task", "import time", "More words", "x = 1"):
        assert left_out not in everything


@pytest.mark.parametrize("path", chapters.chapter_paths(), ids=lambda path: path.stem)
def test_every_chapter_is_a_deck_without_a_network(path):
    deck = slides.deck(path)  # its last slide is of the teaching page
    kinds = re.findall(r'<section class="(\w+)', deck)
    assert {"predict", "result", "plot", "losses"} <= set(kinds)
    assert kinds[-1] == "home"
    assert kinds.index("predict") < kinds.index("result")
    assert not re.findall(r"""@import|(?:src=|url\()(?!["']?(?:data:|#))""", deck)
    assert "<link" not in deck
