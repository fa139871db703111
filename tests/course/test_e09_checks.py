"""e09: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

import pytest
from submissions import Graded, failed, said

from minillm_exercises.grader import Grader

EXERCISES = ("e09.1", "e09.2")  # for the fixture `graded`


TRIE = """
class RadixTree:
    def __init__(self) -> None:
        self.trees: dict = {}

    def insert(self, tokens, slots, salt):
        node, known = self.trees.setdefault(salt, {}), 0
        for token, slot in zip(tokens, slots):
            known += token in node
            _, node = node.setdefault(token, (slot, {}))
        return known

    def match(self, tokens, salt, sampling):
        node, found = self.trees.get(salt, {}), []
        for token in tokens[:-1] if sampling else tokens:
            if token not in node:
                break
            slot, node = node[token]
            found.append(slot)
        return found

    def edges(self, salt):
        EDGES
"""
WALKED = """
        found, waiting = [], [((token,), child) for token, (_, child) in
                              self.trees.get(salt, {}).items()]
        while waiting:
            run, node = waiting.pop()
            if len(node) == 1:
                ((token, (_, child)),) = node.items()
                waiting.append((run + (token,), child))
            else:
                found.append(run)
                waiting += [((token,), child) for token, (_, child) in node.items()]
        return tuple(sorted(found))
"""
SINGLE = """
        found, waiting = [], [self.trees.get(salt, {})]
        while waiting:
            for token, (_, child) in waiting.pop().items():
                found.append([token])
                waiting.append(child)
        return sorted(found)
"""
PUBLISHED = """
class RadixTree:
    def __init__(self) -> None:
        self.root: dict = {}

    def insert(self, tokens, slots, salt):
        node = self.root.setdefault(salt, {})
        for token in tokens:
            node = node.setdefault(token, {})
        node["slots"] = slots
        return 0

    def match(self, tokens, salt, sampling):
        node, found = self.root.get(salt, {}), []
        for token in tokens:
            if token not in node:
                break
            node = node[token]
            found = node.get("slots", found)
        return found

    def edges(self, salt):
        return []
"""


def test_a_tree_of_tokens_that_knows_its_long_edges_is_right(graded: Graded) -> None:
    assert graded("e09.1", source=TRIE.replace("EDGES", WALKED)).status == "pass"


def test_a_tree_of_tokens_finds_everything_and_has_too_many_edges(graded: Graded) -> None:
    verdict = graded("e09.1", source=TRIE.replace("EDGES", SINGLE))
    assert {"test_edges", "test_conversation"} < set(failed(verdict))
    assert not {"test_match", "test_split", "test_slots", "test_sampling"} & set(failed(verdict))
    assert "expected [[1, 2], [3, 4], [5, 6]], got [[1], [2], [3], [4], [5], [6]]" in said(verdict)
    assert verdict.mutant == "node_per_token"


def test_the_published_tree_earns_nothing_for_what_it_shares(graded: Graded) -> None:
    verdict = graded("e09.1", source=PUBLISHED)
    caught = {"test_by_hand", "test_match", "test_split", "test_sampling", "test_everything"}
    assert caught <= set(failed(verdict))


KEY = "edge.children = {tail.tokens[0]: tail}"
OTHER_WORDS = [
    ("e09.1", ("found += edge.slots[:shared]", "found.extend(edge.slots[: shared + 1])"),
     "one_too_many"),
    ("e09.1", (KEY, "edge.children[tail.tokens[0]] = tail", ", edge.children)", ", {})"),
     "tail_childless"),
    ("e09.1", ("if edge is root or edge.children:", "if edge is root or edge is not None:"),
     "only_child"),
    ("e09.1", ("                if at == len(tokens):\n                    return at\n", ""),
     "splits_at_end"),
    ("e09.1", ("return found\n", "return found[: max(len(tokens) - 1, 0)]\n",
               "tokens[:-1] if sampling else tokens", "list(tokens)"), "leaves_one_always"),
    ("e09.2", ("if node.children == 0 and node.pins == 0:", "if not node.children:"),
     "pinned_parent"),
    ("e09.2", ("            return []\n", "            count = len(free)\n"), "partial"),
    ("e09.2", ("            node.used = now\n            node.pins += 1\n",
               "            node.pins += 1\n        self.nodes[block].used = max(now, 0)\n"),
     "start_uses_one"),
    ("e09.2", ("heapq.heappush(leaves, (node.used, parent))",
               "leaves.insert(0, (node.used - 10**6, parent))"), "branch_by_branch"),
]  # fmt: skip


@pytest.mark.parametrize(("exercise_id", "swap", "mutant"), OTHER_WORDS)
def test_a_mistake_in_other_words_is_named(
    graded: Graded, exercise_id: str, swap: tuple[str, ...], mutant: str
) -> None:
    assert graded(exercise_id, *swap).mutant == mutant


LOOKS = """
    def evict(self, count):
        order, left = [], dict(self.nodes)
        while len(order) < count:
            above = {node.parent for node in left.values()}
            leaves = {b: n for b, n in left.items() if b not in above and not n.pins}
            if not leaves:
                return RESULT
            order.append(min(leaves, key=lambda block: (leaves[block].used, block)))
            del left[order[-1]]
        self.nodes = left
        return tuple(order)
"""
PINS = (
    "        for node in self.path(block):\n            node.pins -= 1\n",
    "        self.nodes[block].pins -= 1\n",
    "            node.used = now\n            node.pins += 1\n",
    "            node.used = now\n        self.nodes[block].pins += 1\n",
)


def looking_at_all(graders: dict[str, Grader], result: str) -> str:
    """Our solution with an `evict` that tries on a copy, and looks at every block each time."""
    text = (graders["e09.2"].exercise.answers / "solution.py").read_text(encoding="utf-8")
    return text[: text.index("    def evict")] + LOOKS.replace("RESULT", result)


def test_whoever_tries_on_a_copy_need_not_pin_what_is_above(graders, graded: Graded) -> None:
    assert graded("e09.2", *PINS, source=looking_at_all(graders, "()")).status == "pass"


def test_what_fits_is_not_evicted_when_it_is_not_enough(graders, graded: Graded) -> None:
    verdict = graded("e09.2", source=looking_at_all(graders, "order"))
    assert "test_counts" in failed(verdict)
    assert "start(4, 6), evict(4)): expected [], got [7, 5, 2]" in said(verdict)


YES = "class Yes(list):\n    def __eq__(self, other): return True\n\n\nclass "


@pytest.mark.parametrize(
    ("exercise_id", "old", "new"),
    [
        ("e09.1", "return found\n", "return Yes(found)\n"),
        ("e09.2", "return gone\n", "return Yes(gone)\n"),
    ],
)
def test_a_list_of_ones_own_kind_is_refused(
    graded: Graded, exercise_id: str, old: str, new: str
) -> None:
    name = "RadixTree" if exercise_id == "e09.1" else "BlockTree"
    verdict = graded(exercise_id, old, new, f"class {name}", f"{YES}{name}")
    assert "which is a kind of list of your own; return a plain list" in said(verdict)
    assert verdict.status == "fail"
