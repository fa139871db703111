"""Folded listings of a chapter."""

import pytest

from minillm_exercises import listing
from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import series
from minillm_exercises.predictions import Prediction


def test_a_listing_is_folded_and_says_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[object] = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    listing("How a plot is made", Prediction.text, series)
    (page,) = shown
    text = page.data  # type: ignore[attr-defined]
    assert text.startswith("<details><summary>How a plot is made</summary>\n\n```python\ndef text(")
    assert "\n\ndef series(" in text
    assert text.endswith("```\n\n</details>")
    with pytest.raises(ExerciseError, match="needs a function"):
        listing("Nothing")
