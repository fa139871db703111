"""Every rule of `notebook_rules`, on every chapter."""

import pytest
from notebook_chapter import NOTEBOOKS, Chapter, prose, report
from notebook_edition import RULES as EDITION
from notebook_rules import RULES

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", [*RULES, *EDITION], ids=lambda rule: rule.__name__)
def test_every_chapter_keeps(rule, path):
    broken = report(Chapter.load(path), rule)
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize(("name", "claim"), prose.load_claims().items())
def test_a_claim_is_quoted_whole(name, claim):
    """What an article says, its figures as it prints them, "verdict: why", and where it stands."""
    assert claim.keys() == {"text", "figures", "verdict", "source"}
    verdict, _, why = claim["verdict"].partition(": ")
    assert verdict and why, f"claims.toml, {name}: the verdict is 'wrong: why', or 'holds: why'"  # noqa: PT018
    for figure in claim["figures"]:
        said = claim["text"] + claim["verdict"]
        assert figure in said, f"claims.toml, {name}: {figure!r} is in neither text nor verdict"


def test_there_is_a_chapter():
    """Tests over an empty list of files would all pass."""
    assert PATHS
