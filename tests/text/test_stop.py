"""Stop strings found in pieces of text are those found in the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minillm.text.stop import StopStrings


def whole_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, by ``str.find`` over the whole text: first to end, then longest."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, minus_length, stop = min(ends)
    return text[: end if include else end + minus_length], stop


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include)
    out = "".join(matcher.push(piece) for piece in pieces)
    return out + matcher.flush(), matcher.matched


letters = st.text(alphabet="ab中", max_size=14)
stop_lists = st.lists(st.text(alphabet="ab中", min_size=1, max_size=4), max_size=4)


@given(letters, stop_lists, st.booleans())
@example("xaaab", ["aab"], False)  # the match begins inside a failed one
@example("xababac", ["abac"], False)
@example("xabcd", ["abcd", "bc"], False)  # the inner one ends first
@example("xab", ["b", "ab"], False)  # both end here: the longest
@example("ab", ["a", "ab"], False)  # same start: the shorter one ends first
def test_every_split_gives_the_result_of_the_whole_text(text, stops, include):
    text = text[:9]
    expected = whole_text(text, stops, include)
    for cuts in range(1 << max(len(text) - 1, 0)):
        pieces, start = [], 0
        for i in range(1, len(text)):
            if cuts >> (i - 1) & 1:
                pieces.append(text[start:i])
                start = i
        assert run([*pieces, text[start:]], stops, include) == expected


@given(letters, stop_lists, st.booleans())
def test_nothing_shown_is_ever_taken_back_and_nothing_is_held_without_need(text, stops, include):
    matcher = StopStrings(stops, include)
    shown = ""
    for i, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.matched is not None:
            break
        seen = text[: i + 1]
        starts = [k for s in stops for k in range(len(s)) if seen.endswith(s[:k])]
        held = 0 if include else max(starts, default=0)
        assert shown == seen[: len(seen) - held]
    assert whole_text(text, stops, include)[0].startswith(shown)


@pytest.mark.parametrize("include", [False, True])
def test_min_tokens_lets_a_completed_stop_string_pass(include: bool) -> None:
    matcher = StopStrings(["##"], include)
    out = matcher.push("a##b#", may_stop=False)
    assert matcher.matched is None
    out += matcher.push("#c")  # begins before the limit, ends after it
    assert matcher.matched == "##"
    assert out + matcher.flush() == ("a##b##" if include else "a##b")


def test_a_stop_string_that_passed_may_begin_the_next() -> None:
    matcher = StopStrings(["aa"])
    shown = matcher.push("aa", may_stop=False) + matcher.push("a")
    assert (shown, matcher.matched) == ("a", "aa")


def test_a_hostile_stop_string_costs_linear_time() -> None:
    stop = "a" * 5000 + "b"
    matcher = StopStrings([stop])
    shown = sum(len(matcher.push("a")) for _ in range(20_000))  # quadratic work would take minutes
    assert (shown, len(matcher.flush())) == (15_000, 5_000)
