"""The public checks of e09.1: a tree beside a list of every start of every text."""

import random
from collections.abc import Sequence
from typing import Any

from minillm_exercises.checking import accept, check, equal, seeds

SALT = "a"


class Told:
    """A tree under test, and what it was told: each start of each text, with its last slot."""

    def __init__(self, impl: Any) -> None:
        self.tree = impl.RadixTree()
        self.starts: dict[tuple[str, tuple[int, ...]], int] = {}
        self.story = ""
        self.told = 0

    def insert(self, what: str, tokens: Sequence[int], salt: str = SALT) -> None:
        """Insert a text, the first in slots 100, 101, ..., the second in 200, ...; its answer."""
        known = self.known(tokens, salt)
        got = self.store(tokens, salt)
        equal(got, known, f"{what}: how many tokens were there already", self.story)

    def store(self, tokens: Sequence[int], salt: str = SALT) -> object:
        """Insert a text where what it returns is no matter; that is asked elsewhere."""
        self.told += 1
        slots = [100 * self.told + place for place in range(len(tokens))]
        self.story += f"{', ' * bool(self.story)}insert({list(tokens)}, slots from "
        self.story += f"{100 * self.told}, {salt!r})"
        for end in range(self.known(tokens, salt), len(tokens)):
            self.starts[salt, tuple(tokens[: end + 1])] = slots[end]
        given = (list(tokens), list(slots))
        got = self.tree.insert(*given, salt)
        self.untouched(given, (list(tokens), slots))
        return got

    def match(
        self, what: str, tokens: Sequence[int], salt: str = SALT, sampling: bool = False
    ) -> Any:
        """Look for a text; the list of slots that came out."""
        wanted = tokens[: len(tokens) - 1] if sampling and tokens else tokens
        length = self.known(wanted, salt)
        want = [self.starts[salt, tuple(tokens[: end + 1])] for end in range(length)]
        case = f"{self.story or 'nothing inserted'}; match({list(tokens)}, {salt!r}, {sampling})"
        given = list(tokens)
        got = self.tree.match(given, salt, sampling)
        self.untouched((given,), (list(tokens),))
        equal(got, want, f"{what}: the slots", case)
        return accept(got, what, case)

    def known(self, tokens: Sequence[int], salt: str) -> int:
        """The length of the longest start of `tokens` that is a start of a text."""
        ends = range(1, len(tokens) + 1)
        return max([0, *(end for end in ends if (salt, tuple(tokens[:end])) in self.starts)])

    def edges(self, what: str, salt: str = SALT) -> None:
        """The edges that the tree must have now, and has."""
        equal(
            self.tree.edges(salt),
            long_edges([start for known, start in self.starts if known == salt]),
            f"{what}: the tokens of the edges",
            f"{self.story}; edges({salt!r})",
        )

    def untouched(self, given: object, before: object) -> None:
        """The lists of the caller are as they were."""
        equal(given, before, "You changed a list that you were given; after the call", self.story)


def long_edges(starts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """The edges, as long as they can be, of a tree in which these are all ways from the root."""
    below: dict[tuple[int, ...], int] = {}
    for start in starts:
        below[start[:-1]] = below.get(start[:-1], 0) + 1
    edges = []
    for end in starts:
        if below.get(end, 0) == 1:
            continue  # an edge that comes here goes on
        length = 1
        while length < len(end) and below[end[:-length]] == 1:
            length += 1
        edges.append(list(end[len(end) - length :]))
    return sorted(edges)


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Three texts, two matches, four edges."""
    tree = impl.RadixTree()
    texts = (
        ([1, 2, 3, 4], [10, 11, 12, 13], 0),
        ([1, 2, 5], [20, 21, 22], 2),
        ([1, 2, 5, 6], [30, 31, 32, 33], 3),
    )
    for tokens, slots, want in texts:
        got = tree.insert(list(tokens), list(slots), "s")
        equal(got, want, "The worked example: tokens that were there", f"insert({tokens}, ...)")
    got = tree.match([1, 2, 3, 9], "s", False)
    equal(got, [10, 11, 12], "The worked example: the slots", "match([1, 2, 3, 9], 's', False)")
    got = tree.match([1, 2, 5, 6], "s", True)
    equal(got, [10, 11, 22], "The worked example: the slots", "match([1, 2, 5, 6], 's', True)")
    equal(tree.edges("s"), [[1, 2], [3, 4], [5, 6]], "The worked example: the edges", "edges('s')")


@check(2, "Matches of a whole text, a part of it, more than it, and none")
def test_match(impl: Any) -> None:
    """One edge, walked to its end, into its middle, and beyond."""
    told = Told(impl)
    told.match("An empty tree", [1, 2])
    told.store([3, 1, 4, 1, 5])
    told.match("The same text", [3, 1, 4, 1, 5])
    told.match("A longer text", [3, 1, 4, 1, 5, 9, 2])
    told.match("A text that ends in the middle of an edge", [3, 1, 4])
    told.match("A text that leaves the edge in its middle", [3, 1, 4, 2, 5])
    told.match("A text that leaves the edge after its first token", [3, 3, 4])
    told.match("A text with another first token", [1, 4, 1, 5])
    told.match("No tokens at all", [])


@check(2, "A split of an edge that has edges below it")
def test_split(impl: Any) -> None:
    """The second half takes what hangs below; all texts are found as before."""
    told = Told(impl)
    texts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 8, 9], [2, 1, 1], [1, 5]]
    for number, text in enumerate(texts):
        told.insert(f"Text {number + 1} of five", text)
        for known in texts[: number + 1]:
            told.match(f"After {number + 1} of five texts", known)
        told.match(f"After {number + 1} of five texts", [1, 2, 3, 4, 8])
    told.match("A text that changes from one branch to another", [1, 2, 8, 4, 5])


@check(2, "Edges are as long as possible: texts that differ")
def test_edges(impl: Any) -> None:
    """An edge is cut where texts part, and nowhere else."""
    told = Told(impl)
    for text in ([5, 5, 5, 5, 5], [5, 5, 6, 6], [7, 8, 9], [5, 5, 6, 7], [5, 5, 5, 8]):
        told.insert("A text", text)
        told.edges("Texts that part")


@check(2, "Edges are as long as possible: a conversation that grows")
def test_conversation(impl: Any) -> None:
    """A text that goes on makes its edge longer; a start of a text leaves no trace."""
    told = Told(impl)
    turns = [4, 2, 7, 1, 1, 3, 9, 5]
    for end in (2, 3, 6):
        told.insert("A conversation that grows", turns[:end])
        told.match("A conversation that grows", turns)
        told.edges("A conversation that grows")
    told.insert("The start of a text", [4, 2, 7, 1])
    told.edges("After a start of a text was inserted")
    told.insert("Another answer", [4, 2, 7, 1, 6])
    told.insert("The first answer goes on", turns)
    told.insert("The second answer goes on", [4, 2, 7, 1, 6, 6])
    told.insert("The start before the two answers", [4, 2, 7, 1])
    told.match("The first answer", turns)
    told.match("The second answer", [4, 2, 7, 1, 6, 6])
    told.edges("Two answers to one beginning")


@check(2, "Tokens in the tree keep their slots")
def test_slots(impl: Any) -> None:
    """The same text again, with other slots, whole and in part."""
    told = Told(impl)
    told.insert("A new text", [1, 2, 3, 4])
    told.insert("The same text once more", [1, 2, 3, 4])
    told.match("The slots of the first time", [1, 2, 3, 4])
    told.insert("A start of it", [1, 2])
    told.match("The slots of the first time", [1, 2, 3, 4])
    told.insert("A text that goes on", [1, 2, 3, 4, 5, 6])
    told.match("Four old slots, two new ones", [1, 2, 3, 4, 5, 6])
    told.insert("A text that parts from it", [1, 2, 3, 9, 9])
    told.match("Three old slots, two new ones", [1, 2, 3, 9, 9])
    told.insert("No tokens at all", [])


@check(2, "A match for sampling")
def test_sampling(impl: Any) -> None:
    """The last token is computed, and nothing but the last."""
    told = Told(impl)
    told.store([6, 6, 2, 8])
    told.store([6, 6, 3, 1, 1])
    told.match("All of it is cached", [6, 6, 2, 8], sampling=True)
    told.match("All but the last token are cached", [6, 6, 2, 8, 1], sampling=True)
    told.match("Only a start is cached", [6, 6, 2, 5, 5, 5], sampling=True)
    told.match("The last token is the first below a split", [6, 6, 3], sampling=True)
    told.match("One token", [6], sampling=True)
    told.match("No token", [], sampling=True)
    told.match("The same text without sampling", [6, 6, 2, 8])


@check(2, "Texts of different salts")
def test_salts(impl: Any) -> None:
    """Nothing is shared, in either direction, and the empty salt is one of them."""
    told = Told(impl)
    told.insert("A text of salt 'a'", [1, 2, 3], "a")
    told.match("The same text with the empty salt", [1, 2, 3], "")
    told.insert("The same text with salt 'b'", [1, 2, 3], "b")
    told.insert("Another text with salt 'b'", [1, 2, 4], "b")
    told.insert("A text with the empty salt", [1, 2], "")
    for salt in ("a", "b", ""):
        told.match(f"The text with salt {salt!r}", [1, 2, 3], salt)
        told.match(f"The other text with salt {salt!r}", [1, 2, 4], salt)
    told.match("A salt of which nothing was inserted", [1, 2, 3], "c")
    told.edges("The edges of salt 'a'", "a")
    told.edges("The edges of salt 'b'", "b")


@check(1, "A match changes nothing")
def test_looking(impl: Any) -> None:
    """The edges are the same after a match as before."""
    told = Told(impl)
    told.store([1, 2, 3, 4])
    told.edges("Before any match")
    for tokens in ([1, 2], [1, 2, 9], [2], [1, 2, 3, 4, 5]):
        told.match("A match", tokens)
        told.edges(f"After match({tokens}, ...)")


@check(1, "The lists belong to the caller")
def test_lists(impl: Any) -> None:
    """What the caller does with its lists after a call does not reach the tree."""
    told = Told(impl)
    tokens, slots = [1, 2, 3], [100, 101, 102]
    told.tree.insert(tokens, slots, SALT)
    for given in (tokens, slots):
        given[1] = 9
        given.append(9)
    told.starts = {(SALT, (1, 2, 3)[: end + 1]): 100 + end for end in range(3)}
    told.story = "insert([1, 2, 3], slots from 100, 'a'), then both lists changed by their owner"
    told.match("The text with what its owner appended", [1, 2, 3, 9])
    for again in range(2):
        got = told.match(f"match call {again + 1} of 2, its result changed after it", [1, 2, 3])
        if type(got) is list:
            got[0] = -1
            got.append(-1)


@check(2, "Twenty random trees")
def test_everything(impl: Any) -> None:
    """Texts of three letters, so that they share much; two salts; all edges at the end."""
    for seed in seeds(20):
        draw = random.Random(seed)
        told = Told(impl)
        for _ in range(draw.randint(1, 9)):
            told.insert("A random text", word(draw), draw.choice("ab"))
            for _ in range(3):
                salt, sampling = draw.choice("ab"), draw.random() < 0.5
                told.match("A random look", word(draw), salt, sampling)
        for salt in "ab":
            told.edges("A random tree", salt)


def word(draw: random.Random) -> list[int]:
    """Up to nine tokens of three kinds, mostly of the first."""
    return draw.choices((0, 1, 2), weights=(5, 2, 1), k=draw.randint(0, 9))
