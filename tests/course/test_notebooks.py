"""Every rule of `notebook_rules`, on every chapter."""

import pytest
from notebook_chapter import NOTEBOOKS, Chapter, report
from notebook_rules import RULES

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_chapter_keeps(rule, path):
    broken = report(Chapter.load(path), rule)
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)
